"""Layer: gloo ranks. Features of each family on disk, sharded weights, other builds of a family, bad input."""

from pathlib import Path
from typing import Any

import pytest
from family_chats import CHATS, asks, image, says, text, write_chats
from infer_runs import answered, run, unpatched_tokens
from tiny_directories import MAKERS, make_idefics

from mllm_seqpar.data import ChatDataset
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_processor
from ranks import ranks

FAMILIES = [*MAKERS]


@pytest.mark.parametrize("name", FAMILIES)
def test_features_written_by_two_ranks_are_read_by_any_number(folder: Path, name: str) -> None:
    model = ["--model", folder / name]
    kept = folder / f"kept-{name}"
    video = ["--video", folder / "clip.mp4", "--num-frames", 5]
    answered(2, folder, *model, *video, "--save-features", kept, questions=())
    expected = unpatched_tokens(folder, name, 5)
    for world in (1, 3):
        assert answered(world, folder, *model, "--features", kept) == expected
    others = {"idefics": "mllama", "mllama": "idefics"}
    argv = ["--model", folder / others.get(name, "mllama"), "--features", kept, "--question", "?"]
    errors = ranks(2).errors(run, [*map(str, argv)])
    assert "made by another model" in str(errors[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_sharded_weights_change_no_answer(folder: Path, name: str) -> None:
    argv = ["--model", folder / name, "--video", folder / "clip.mp4", "--num-frames", 3, "--shard-weights"]
    assert answered(2, folder, *argv) == unpatched_tokens(folder, name, 3)


def test_idefics_with_a_resampler(folder: Path) -> None:
    make_idefics(folder / "resampled", resampler=True)
    argv = ["--model", folder / "resampled", "--video", folder / "clip.mp4", "--num-frames", 5]
    assert answered(2, folder, *argv) == unpatched_tokens(folder, "resampled", 5)


def test_flamingo_over_mpt(folder: Path) -> None:
    if "open_flamingo" not in MAKERS:
        pytest.skip("open-flamingo is not installed")
    from tiny_directories import make_open_flamingo

    make_open_flamingo(folder / "mpt", "mpt")
    argv = ["--model", folder / "mpt", "--video", folder / "clip.mp4", "--num-frames", 5]
    assert answered(2, folder, *argv) == unpatched_tokens(folder, "mpt", 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_depend_on_the_video(folder: Path, name: str) -> None:
    """Without this the other tests could compare answers of a model that does not look."""
    assert unpatched_tokens(folder, name, 2) != unpatched_tokens(folder, name, 4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bad_chats_are_one_sentence(folder: Path, name: str) -> None:
    processor: Any = load_processor(str(folder / name))
    mark = {"mllama": "<|image|>"}.get(name, "<image>")
    path = write_chats(folder / "wrong.jsonl", [CHATS["a video"], [asks(image(0), text(f"{mark} what?")), says("x")]])
    with pytest.raises(DataError, match=r"wrong.jsonl:2: message 0 \(user\): its text holds <"):
        ChatDataset(path, processor)
    # A tokenizer that does not know the picture's token: it becomes characters, and pictures have no place.
    path = write_chats(folder / "right.jsonl", [CHATS["a video"]])
    real, unknown = processor.tokenizer.convert_tokens_to_ids, processor.tokenizer.unk_token_id
    try:
        processor.image_token_id = unknown
        processor.tokenizer.convert_tokens_to_ids = lambda token: unknown
        with pytest.raises(DataError, match=r"right.jsonl:1: sample 0 has 3 pictures, but 0 tokens <\|?image"):
            ChatDataset(path, processor).batch([0])
    finally:
        processor.tokenizer.convert_tokens_to_ids = real


@pytest.mark.parametrize("name", FAMILIES)
def test_bad_directories_are_one_sentence(folder: Path, tmp_path: Path, name: str) -> None:
    bare, mixed = tmp_path / "bare", tmp_path / "mixed"
    for target in (bare, mixed):
        target.mkdir()
        for file in ("config.json", "model.safetensors"):
            (target / file).write_bytes((folder / name / file).read_bytes())
    other = folder / ("idefics" if name == "mllama" else "mllama")
    for file in other.iterdir():
        if not (mixed / file.name).exists() and file.name != "generation_config.json":
            (mixed / file.name).write_bytes(file.read_bytes())
    argv = ["--video", str(folder / "clip.mp4"), "--num-frames", "2", "--question", "?"]
    for target in (bare, mixed):
        errors = ranks(1).errors(run, ["--model", str(target), *argv])
        assert isinstance(errors[0], (ConfigError, DataError)), errors
        assert "processor" in str(errors[0]) and "\n" not in str(errors[0])
