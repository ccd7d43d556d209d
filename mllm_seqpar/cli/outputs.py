"""Files and directories that a command writes: they are checked before the work begins, and nothing that exists is
lost."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mllm_seqpar.errors import ConfigError, writing

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_STREAM = re.compile(r"/dev/fd/(\d+)|/proc/self/fd/(\d+)")


def stream_descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the file descriptor that a name such as /dev/stdout stands for; None for the name of a file.

    Opening such a name for writing truncates the file that the stream is redirected to. Write to the descriptor.
    """
    name = os.fspath(path)
    match = _STREAM.fullmatch(name)
    return int(match[1] or match[2]) if match else _STREAMS.get(name)


def require_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Raise ConfigError unless the file `path` can be written; leave it as it was, or absent.

    Args:
        option: the name of the option, for the message.
    """
    if stream_descriptor(path) is not None:
        return
    existed = os.path.lexists(path)
    with writing(f"--{option} {path}", "", "give a file in a directory that exists", ConfigError):
        with open(path, "a"):
            pass
    if not existed:
        with suppress(OSError):
            os.unlink(path)


def require_writable_directory(option: str, path: str | os.PathLike[str]) -> None:
    """Create the directory `path` unless it exists; raise ConfigError unless files can be written in it."""
    remedy = "give a directory that you may write to"
    with writing(f"--{option} {path}", "files", remedy, ConfigError):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"0")


def write_text(path: str | os.PathLike[str] | None, text: str) -> None:
    """Write text to a file, which it replaces; for None to standard output; or to a stream such as /dev/stderr."""
    descriptor = None if path is None else stream_descriptor(path)
    if path is None or descriptor == 1:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif descriptor is not None:
        with open(os.dup(descriptor), "w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        with writing(path, "", "free some space, or give another one", ConfigError):
            Path(path).write_text(text, encoding="utf-8")


@contextmanager
def new_directory(option: str, path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft beside a new directory, which becomes `path` at the end; an exception leaves nothing.

    Args:
        option: the name of the option, for the message.
        path: a directory that does not exist, or is empty. Its parents are created.

    Raises:
        ConfigError: it exists and is not empty, or cannot be created.
    """
    target = Path(path).resolve()  # a link to an empty directory cannot be replaced
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"--{option} {target}: it exists and is not an empty directory; choose another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise ConfigError(
            f"--{option} {target}: cannot be created ({error.strerror}); choose a directory that you may write to"
        ) from error
    with temporary as scratch, writing(target, "the directory", "free some space, or give another one", ConfigError):
        draft = Path(scratch) / target.name
        yield draft
        os.replace(draft, target)
