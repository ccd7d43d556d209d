"""Layer: one process. The folder of a server's uploads, and the folders that killed servers left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from mllm_seqpar.serving.upload_folder import upload_folder

HOLD = """
import sys
from mllm_seqpar.serving.upload_folder import upload_folder
with upload_folder(sys.argv[1]) as folder:
    (folder / "video").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def other_server(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_leftovers_of_a_killed_server_are_removed_and_a_living_one_keeps_its_files(tmp_path: Path) -> None:
    (living, kept), (killed, left) = other_server(tmp_path), other_server(tmp_path)
    foreign = tmp_path / "mllm-seqpar-elsewhere"
    foreign.mkdir()
    (foreign / "server.lock").write_text("another machine")
    (tmp_path / "mllm-seqpar-link").symlink_to(kept)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "video").exists()
    with upload_folder(str(tmp_path)) as folder:
        assert not left.exists() and (kept / "video").exists() and foreign.exists()
        assert os.listdir(folder) == ["server.lock"]
    assert not folder.exists()
    living.communicate("")
    assert not kept.exists()
