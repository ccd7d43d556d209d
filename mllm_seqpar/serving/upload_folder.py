"""The folder of a server's uploads. It is removed with the server, even if the server is killed.

While it runs, a server holds a lock on a file in its folder. The next server on the same machine removes the folders
whose lock it can take. In a shared directory, folders of other machines are kept, because locks may not work across
machines.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "mllm-seqpar-"
_LOCK = "server.lock"


@contextmanager
def upload_folder(parent: str | None) -> Iterator[Path]:
    """Yield a new folder below `parent` (default: the system's temporary directory), and remove it at the end."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_if_dead(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        # Locked before it has its name, so that no other server finds it without its owner.
        unnamed = Path(name, f"{_LOCK}.new")
        with unnamed.open("w") as lock:
            lock.write(socket.gethostname())
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(Path(name, _LOCK))
            yield Path(name)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # of another user, or just removed by its owner
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with Path(folder, _LOCK).open() as lock:
            if lock.read() == socket.gethostname():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
