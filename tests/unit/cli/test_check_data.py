"""Layer: one process, real files. `mllm-seqpar check-data` reports what is broken or long, and what the data have."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from chats import chat, video, write_rows
from mllm_seqpar.__main__ import main
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.cli import check_data
from mllm_seqpar.errors import LengthError
from mllm_seqpar.inference.ask import ask
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.training.finetune import fine_tune


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (needle,) = make_needle_videos(tmp_path, 1, frames=(20, 20), rate=10)
    Path(needle.path).rename(tmp_path / "a.mp4")
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    Image.new("RGB", (28, 28)).save(tmp_path / "1.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, list[str]]:
    status = main(["check-data", *map(str, argv)])
    return status, capsys.readouterr().out.splitlines()


def test_every_fault_has_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llava = [{"from": "human", "value": "<image>Look."}, {"from": "gpt", "value": "Red."}]
    rows = [
        chat(video("a.mp4", num_frames=8), "What?"),
        chat(video("cut.mp4"), "What?"),
        chat(video("none.mp4"), "What?"),
        {"image": "1.png", "conversations": llava},
        {"image": "bad.png", "conversations": llava},
        {"hello": 1},
        chat(video("a.mp4", fps="2"), "What?"),
        chat(video("a.mp4", fps=4), "What?"),
    ]
    path = write_rows(folder / "train.jsonl", [*rows, "{"])
    for workers in (1, 3):
        status, lines = check(capsys, path, "--workers", workers, "--long", 1.5)
        assert status == 1
        expected = [
            (1, "long: a.mp4 has 0:00:02, 8 frames are used"),
            (2, f"broken: {folder / 'cut.mp4'}: "),
            (3, f"broken: {folder / 'none.mp4'}: no such file"),
            (5, f"broken: {folder / 'bad.png'}: not a readable image"),
            (6, "broken: has the keys 'hello', which is not a known format"),
            (7, "broken: message 0 (user) has a part of type video with fps: '2'"),
            (8, "long: a.mp4 has 0:00:02, 8 frames are used"),
            (9, "broken: not JSON"),
        ]
        for line, (number, text) in zip(lines, expected, strict=False):
            assert line.startswith(f"{path}:{number}: {text}")
        assert lines.pop().startswith("decoding: ")
        assert lines[len(expected) :] == [
            f"{path}: 9 samples, 6 broken, 2 long videos; the good samples have 2 videos and 1 images with 17 frames",
            f"most frames: {path}:1 (8), {path}:8 (8), {path}:4 (1)",
        ]


def test_name_with_half_of_a_surrogate_pair_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(folder / "train.jsonl", [chat(video("\ud83d \N{SNOWMAN}.mp4"), "What?")])
    status, lines = check(capsys, path)
    assert status == 1 and lines[0] == f"{path}:1: broken: {folder}/\\ud83d \N{SNOWMAN}.mp4: no such file"


def test_hours_of_a_long_video_are_not_split_into_days(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_data, "probe", lambda path: SimpleNamespace(duration=90000.4))
    path = write_rows(folder / "train.jsonl", [chat(video("a.mp4", num_frames=8), "What?")])
    status, lines = check(capsys, path)
    assert status == 0 and lines[0] == f"{path}:1: long: a.mp4 has 25:00:00, 8 frames are used"


def test_sample_longer_than_the_context_of_the_model_is_broken(
    folder: Path, inference_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(inference_files / "gated", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 45}))
    path = write_rows(folder / "train.jsonl", [chat(video("a.mp4", num_frames=n), "?") for n in (2, 18)])
    status, lines = check(capsys, path, "--model", model)
    assert status == 1 and lines[0].startswith(f"{path}:2: broken: ")
    assert "(18 of them are placeholders of frames), more than the 45 of the model's context" in lines[0]
    argv = ["--model", model, "--data", path, "--output_dir", tmp_path / "run", "--use_cpu", "--max_steps", 2]
    with pytest.raises(LengthError, match="more than the 45 of the model's context; use fewer frames"):
        fine_tune([*map(str, argv)])
    argv = ["--model", model, "--video", folder / "a.mp4", "--fps", 10, "--question", "?", "--no_progress"]
    with pytest.raises(LengthError, match="the context of this model is 45 tokens"):
        ask([*map(str, argv)])


def test_model_adds_tokens_and_limits(folder: Path, inference_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = folder / "train.jsonl", inference_files / "gated"
    write_rows(path, [chat(video("a.mp4", num_frames=n), "What?") for n in (2, 12)])
    status, lines = check(capsys, path, "--model", model)
    data = ChatDataset(path, load_processor(str(model)))
    batches = [data.batch([index]) for index in range(2)]
    tokens, targets = sum(batch.tokens for batch in batches), sum(batch.targets for batch in batches)
    assert status == 0 and lines[1].startswith(f"text tokens: {tokens}, of which {targets} are targets")
    assert lines[1].endswith("; visual tokens: 56, 4 for each frame")
    status, lines = check(capsys, path, "--model", model, "--max-length", batches[0].tokens)
    assert status == 1 and lines[0].startswith(
        f"{path}:2: broken: {batches[1].tokens} tokens (12 of them are placeholders of"
    )
    assert check(capsys, path, "--num-frames", 3, "--model", model)[1][0].endswith("with 6 frames")


def test_several_data_sets_and_one_video_of_many_questions(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    source = ChatDataset.source
    monkeypatch.setattr(ChatDataset, "source", lambda *args: opened.append(args[2].source) or source(*args))
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(folder / name, [chat(video("a.mp4"), "What?")] * 5)
    status, lines = check(capsys, folder / "a.jsonl", folder / "b.jsonl")
    assert status == 0 and opened == ["a.mp4"] * 2
    assert [line.partition(": ")[2] for line in lines if "samples" in line] == [
        "5 samples, 0 broken, 0 long videos; the good samples have 5 videos and 0 images with 10 frames"
    ] * 2


def test_help_describes_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check-data", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--workers WORKERS files opened at once" in shown and "DATA JSONL, JSON, CSV, parquet" in shown
