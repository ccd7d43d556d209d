"""Layer: one process. Micro-batches from a chat file: whose frames, what stands in for none, what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch

from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.errors import DataError
from mllm_seqpar.integrations.accelerate.launch import make_layout
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patches.mplug_owl3.testing import IMAGE_SIZE, IMAGE_TOKEN, tiny_model, tiny_tokenizer
from mllm_seqpar.training.arguments import TrainArguments
from mllm_seqpar.training.data_loader import ShardedDataLoader, media_sizes, open_data_loader

CPU = torch.device("cpu")
TEXT = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture
def feed(tmp_path: Path) -> ShardedDataLoader:
    videos = make_needle_videos(tmp_path / "videos", 3, frames=(2, 5))
    rows = [*(video.sample(tmp_path) for video in videos), TEXT]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return opened(tmp_path / "chat.jsonl")


def opened(path: Path, **options: int) -> ShardedDataLoader:
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
    args = TrainArguments(model="m", data="d", output="o", **options)
    return open_data_loader(str(path), processor, args, make_layout(None, "cpu"))


def test_a_batch_of_video_and_text_runs(feed: ShardedDataLoader) -> None:
    batch = feed.batch([0, 3])
    inputs = batch.inputs(CPU)
    assert inputs["pixel_values"].shape == (batch.frames, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert "visual_shard" not in inputs
    assert int((inputs["input_ids"] == IMAGE_TOKEN).sum()) == batch.frames
    assert batch.targets == int((inputs["labels"][:, 1:] != -100).sum()) > 0
    assert tiny_model()(**inputs).loss.isfinite()


def test_the_digest_sees_text_and_media(feed: ShardedDataLoader, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    assert opened(path).digest == feed.digest
    assert [size for _, size in media_sizes(path)] == [
        p.stat().st_size for p in sorted((tmp_path / "videos").iterdir())
    ]
    with (tmp_path / "videos" / "00001.mp4").open("ab") as video:
        video.write(b"more")
    longer = opened(path).digest
    assert longer != feed.digest
    path.write_text(path.read_text().replace("hello.", "hullo."))
    assert opened(path).digest != longer


def test_samples_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        opened(tmp_path / "none.jsonl")
    (tmp_path / "chat.jsonl").write_text(json.dumps(TEXT) + os.linesep)
    with pytest.raises(DataError, match="max_length = 5"):
        opened(tmp_path / "chat.jsonl", max_length=5).batch([0])
