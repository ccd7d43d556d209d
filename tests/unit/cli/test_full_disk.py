"""Layer: one process. A file that cannot be written takes one line, whichever library writes it.

A limit on the size of files stands for the full disk: the operating system's errors are handled alike.
"""

import io
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_seqpar.__main__ import main
from mllm_seqpar.cli.outputs import require_writable_directory, write_text
from mllm_seqpar.cli.program_exit import describe
from mllm_seqpar.errors import ConfigError, DataError, write_fault, writing
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.ask import _videos

LIMIT = 50_000
TENSORS = {"a": torch.zeros(LIMIT)}


@contextmanager
def small_files() -> Iterator[None]:
    """Make writes beyond the first `LIMIT` bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, path)


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"word {n}": n for n in range(LIMIT // 10)}, unk_token="word 0")).save(str(path))


def save_shards(path: Path) -> None:
    from torch.distributed.checkpoint import save

    save(dict(TENSORS), checkpoint_id=path, no_dist=True)


WRITERS = {
    "safetensors": save_safetensors,
    "torch.save": lambda path: torch.save(TENSORS, path),
    "torch.distributed.checkpoint": save_shards,
    "tokenizers": save_tokenizer,
    "Python": lambda path: path.write_bytes(bytes(2 * LIMIT)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_file_that_no_library_can_write_is_one_line(writer: str, tmp_path: Path) -> None:
    with small_files(), pytest.raises(BaseException) as found:  # noqa: PT011, B017 - of any library
        WRITERS[writer](tmp_path / "file")
    assert write_fault(found.value)
    text, status = describe(found.value)
    assert text.startswith("error: ") and "\n" not in text and status == 1
    with small_files(), pytest.raises(DataError, match=r"^here: the file cannot be written \(.*\); free some space$"):
        with writing("here", "the file", "free some space"):
            WRITERS[writer](tmp_path / "file")


def test_other_errors_are_not_about_files(tmp_path: Path) -> None:
    assert write_fault(KeyError("x")) is None
    with pytest.raises(KeyError), writing("here", "the file", "free some space"):
        raise KeyError("x")


def test_commands_that_write_a_directory_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_files():
        assert main(["example", "--output", str(tmp_path / "hour")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path / 'hour'}: the directory cannot be written (")
    assert not list(tmp_path.iterdir())
    with small_files(), pytest.raises(ConfigError, match="report.json: cannot be written"):
        write_text(tmp_path / "report.json", "x" * 2 * LIMIT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any directory")
def test_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="--upload_dir .*: files cannot be written"):
        require_writable_directory("upload_dir", tmp_path)


@pytest.mark.parametrize("option", ["report", "evidence_html", "save_features"])
def test_outputs_of_ask_are_checked_before_the_work(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    argv = ["--model", "m", "--video", "v", "--question", "q", f"--{option}", str(tmp_path / "file" / "x")]
    with pytest.raises(ConfigError, match=rf"^--{option} .*: .*cannot be written \((Not a directory|File exists)\)"):
        _videos(parse(argv), create=True)
    argv[-1] = str(tmp_path / "new" / "x")
    _videos(parse(argv), create=True)
    assert not (tmp_path / "new" / "x").is_file()


@pytest.mark.slow
def test_checkpoint_that_cannot_be_written_ends_training_with_one_line(training_files: Path, tmp_path: Path) -> None:
    from mllm_seqpar.training.finetune import fine_tune

    options: dict[str, Any] = {"model": training_files / "model", "data": training_files / "train.jsonl"}
    options |= {"output_dir": tmp_path / "run", "max_steps": 2, "save_steps": 1}
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with small_files(), pytest.raises(DataError, match=r"run: checkpoint-1 cannot be written \(.*resume_from_chec"):
        fine_tune([*argv, "--use_cpu", "--disable_tqdm", "true"])
    assert fine_tune([*argv, "--use_cpu", "--disable_tqdm", "true", "--resume_from_checkpoint", "auto"]) == 0
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 2


def test_upload_that_the_server_cannot_store_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
    from mllm_seqpar.serving.media import MediaStore
    from mllm_seqpar.serving.protocol import ApiError

    store = MediaStore(tmp_path, max_bytes=10 * LIMIT, max_total=10 * LIMIT)
    with small_files(), pytest.raises(ApiError, match="the server cannot store the file .*--upload_dir") as found:
        store.add(io.BytesIO(bytes(2 * LIMIT)), "a.mp4", "user_data")
    assert found.value.status == 507 and not list(tmp_path.iterdir()) and not store.uploads()
    assert store.add(io.BytesIO(b"x"), "a.mp4", "user_data").bytes == 1
