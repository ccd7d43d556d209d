"""Layer: gloo ranks. The reader's thread has a group of its own, so it communicates while the main thread does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mllm_seqpar.data import ChatDataset
from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.training.batches import BatchReader, reader_communicator, replacement
from mllm_seqpar.training.sample_order import SampleOrder
from ranks import ranks
from tiny_models.mplug_owl3 import IMAGE_SIZE, tiny_tokenizer


def trained(rank: int, world: int, path: str, sp: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the samples of the micro-batches and the skipped ones; the main thread communicates all the time."""
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
    data = ChatDataset(path, processor, on_bad_media="skip")
    reader = BatchReader(data, None, reader_communicator(60.0))
    order = SampleOrder(samples=len(data), global_batch=4, micro_batch=1, dp=world // sp, seed=0)
    found = []
    for number, batch in enumerate(reader.read_all(order.passes(rank // sp, 0, 2), order.micro_batches)):
        for _ in range(20):
            total = torch.tensor([float(number)])
            dist.all_reduce(total)
            assert total.item() == number * world
        shard: Any = batch.arguments["visual_shard"]
        assert batch.arguments["pixel_values"].shape[0] == len(shard) < shard.total
        found.append(batch.samples)
    return found, sorted(reader.skipped)


@pytest.mark.slow
def test_agreement_runs_beside_the_collectives_of_training(tmp_path: Path) -> None:
    videos = make_needle_videos(tmp_path, 6, frames=(6, 6), rate=1)
    rows = [json.dumps(video.sample(tmp_path)) for video in videos]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    order = SampleOrder(samples=6, global_batch=4, micro_batch=1, dp=1, seed=0)
    bad = order.step(0, 0)[1][0]
    Path(videos[bad].path).write_bytes(b"")
    (found, skipped), other = ranks(2).run(trained, str(tmp_path / "train.jsonl"), 2)
    assert (found, skipped) == other and skipped == [bad]
    assert len(found) == 8 and (bad,) not in found and found[1] == (replacement(bad, 1, 6),)
