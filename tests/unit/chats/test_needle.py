"""Layer: one process, real files. The videos of the needle task show their answers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chats import write_rows
from mllm_seqpar.chats.needle import COLOURS, QUESTION, make_needle_videos, make_tokenizer
from mllm_seqpar.data import ChatDataset, VideoSource, probe
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.processors.mplug_owl3.image_processing import MPlugOwl3ImageProcessor
from mllm_seqpar.processors.mplug_owl3.processing import MPlugOwl3Processor


def nearest_colour(frame: Tensor) -> str:
    """Return the colour nearest to the mean of the middle of a frame."""
    middle = frame[:, 12:20, 12:20].mean((1, 2))
    return min(COLOURS, key=lambda name: float((middle - torch.tensor(COLOURS[name])).norm()))


def test_one_frame_shows_the_answer(tmp_path: Path) -> None:
    videos = make_needle_videos(tmp_path, 12, frames=(2, 40), seed=3)
    assert Counter(v.colour for v in videos) == dict.fromkeys(COLOURS, 2)
    assert len({v.frames for v in videos}) > 5 and all(2 <= v.frames <= 40 for v in videos)
    for video in videos:
        source = VideoSource.open(video.path, fps=1)
        frames = torch.cat(list(source.read(0, len(source)))).float()
        assert len(frames) == video.frames == probe(video.path).frames
        assert nearest_colour(frames[video.marker]) == video.colour
        if video.colour != "white":
            grey = (frames.mean((2, 3)).amax(1) - frames.mean((2, 3)).amin(1)).tolist()
            assert grey.pop(video.marker) > 40 and max(grey) < 15


def test_same_seed_gives_same_videos(tmp_path: Path) -> None:
    made = [make_needle_videos(tmp_path / str(n), 3, frames=(4, 9), seed=seed) for n, seed in enumerate((1, 1, 2))]
    one, two, other = ([(v.colour, v.frames, v.marker, Path(v.path).read_bytes()) for v in part] for part in made)
    assert one == two
    assert any(mine[-1] != theirs[-1] for mine, theirs in zip(one, other, strict=True))


def test_chat_file_asks_about_each_video(tmp_path: Path) -> None:
    videos = make_needle_videos(tmp_path / "videos", 4, frames=(3, 6))
    write_rows(tmp_path / "train.jsonl", [video.sample(tmp_path) for video in videos])
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert first["messages"][0]["content"][0]["path"] == "videos/00000.mp4"
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=32), make_tokenizer())
    data = ChatDataset(tmp_path / "train.jsonl", processor)
    batch = data.batch(range(4))
    assert batch.frames == sum(v.frames for v in videos)
    unknown = processor.tokenizer.unk_token_id
    assert not bool((batch.input_ids == unknown).any())
    answers = [processor.tokenizer.decode(row[row != -100][0]) for row in batch.labels]
    assert answers == [v.colour for v in videos]


def test_tokenizer_restores_text_and_has_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["How many frames, then?"])
    whole = f"<|im_start|>user\n<|video|><|image|>{QUESTION} How many frames<|im_end|>\n<|im_start|>assistant\npurple"
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, type(tokenizer).from_pretrained(tmp_path)):
        ids = made(whole)["input_ids"]
        assert made.decode(ids) == whole and made.unk_token_id not in ids
        assert made.eos_token == "<|im_end|>" and made.pad_token == "<|endoftext|>"
        assert made.unk_token_id in made("zebra")["input_ids"]
        assert [len(made(t)["input_ids"]) for t in ("<|im_start|>", "<|im_end|>", "<|image|>", "<|video|>")] == [1] * 4


@pytest.mark.parametrize(
    "wrong", [{"colours": ["red"]}, {"colours": ["red", "beige"]}, {"frames": (4, 3)}, {"size": 31}]
)
def test_impossible_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_needle_videos(tmp_path, 2, **({"frames": (2, 3)} | wrong))
