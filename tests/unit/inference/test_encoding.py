"""Layer: one process. Encoding gives the same features on any number of ranks, in bounded memory; ranks as threads."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.data import FrameChoice, FrameSource, VideoSource, chat_family
from mllm_seqpar.errors import AgreementError, ConfigError, VideoError
from mllm_seqpar.inference import Encoded, encode, encoding
from mllm_seqpar.inference.engine import Engine
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.sharding import FrameShard, frame_spans, in_frame_order
from model_copies import tiny_model
from tiny_models.mplug_owl3 import IMAGE_SIZE, TOKENS_PER_FRAME, tiny_tokenizer


def tiny_processor() -> MPlugOwl3Processor:
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())


@dataclass
class RandomPictures(FrameSource):
    """A source of random images; image `bad` cannot be read, and from `resize_at` on the size differs."""

    count: int
    bad: int | None = None
    resize_at: int = 1000
    missing: int = 0

    def __len__(self) -> int:
        return self.count

    def picture(self, number: int) -> Tensor:
        side, generator = 20 if number < self.resize_at else 24, torch.Generator().manual_seed(number)
        return torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Iterator[Tensor]:
        last = stop - self.missing
        for first in range(start, last, batch):
            numbers = range(first, min(first + batch, last))
            if self.bad in numbers:
                raise VideoError(f"film.mp4: frame {self.bad} cannot be decoded")
            for _, same_size in groupby(map(self.picture, numbers), key=lambda image: image.shape):
                yield torch.stack([*same_size])


def encoded_at_once(source: RandomPictures) -> Tensor:
    pictures = [source.picture(number) for number in range(len(source))]
    with torch.no_grad():
        return tiny_model().encode_frames(tiny_processor().image_processor(pictures)["pixel_values"])


class CountingProcessor(MPlugOwl3Processor):
    """A processor that counts how many preprocessed frames exist at one time."""

    def __init__(self) -> None:
        tiny = tiny_processor()
        super().__init__(tiny.image_processor, tiny.tokenizer)
        self.process, self.alive, self.most = tiny.image_processor, 0, 0
        self.image_processor = self.count

    def count(self, frames: Tensor) -> dict[str, Tensor]:
        pixels = self.process(frames)["pixel_values"]
        self.alive += len(pixels)
        self.most = max(self.most, self.alive)
        weakref.finalize(pixels, self._freed, len(pixels))
        return {"pixel_values": pixels}

    def _freed(self, count: int) -> None:
        self.alive -= count


def test_at_most_two_batches_of_pixels_exist() -> None:
    processor, progress = CountingProcessor(), []
    video = encode(tiny_model(), processor, RandomPictures(30), batch=4, progress=lambda *now: progress.append(now))
    assert 4 <= processor.most <= 8
    assert processor.alive == 0
    assert progress == [(done, 30) for done in (*range(0, 30, 4), 30)]
    assert video.shard == FrameShard(0, 30, 30) and video.visual_tokens == 30 * TOKENS_PER_FRAME
    assert Encoded(torch.zeros(7, 5), FrameShard(0, 2, 2)).visual_tokens == 7  # images of different sizes
    assert torch.allclose(video.features, encoded_at_once(RandomPictures(30)), atol=1e-5)


def test_unusable_sources_are_refused() -> None:
    for kind, message, source, batch in (
        (VideoError, "no frames", RandomPictures(0), 16),
        (ConfigError, "batch: 0 is not allowed", RandomPictures(3), 0),
        (VideoError, "ended after 3 of 5 frames", RandomPictures(5, missing=2), 16),
    ):
        with pytest.raises(kind, match=message):
            encode(tiny_model(), tiny_processor(), source, batch=batch)


@pytest.mark.parametrize(("world", "frames"), [(1, 11), (2, 2), (3, 11), (4, 2)])
def test_each_rank_encodes_its_frames(world: int, frames: int) -> None:
    source = RandomPictures(frames, resize_at=5)

    def encoded(comm: Communicator) -> tuple[Tensor, FrameShard, list[int]]:
        progress: list[int] = []
        video = encode(
            tiny_model(),
            tiny_processor(),
            source,
            group=comm,
            batch=3,
            progress=lambda done, total: progress.append(done),
        )
        return video.features, video.shard, progress

    shards = run_loopback(world, encoded)
    by_rank = frame_spans(len(source), world, "zigzag")  # as patched mPLUG-Owl3 maps frames to ranks
    assert tuple(shard.spans for _, shard, _ in shards) == by_rank
    features = in_frame_order([features for features, _, _ in shards], by_rank)
    assert torch.allclose(features, encoded_at_once(source), atol=1e-5)
    assert len({tuple(progress) for _, _, progress in shards}) == 1
    assert shards[0][2][-1] == len(source)


def test_an_unreadable_frame_stops_all_ranks_within_one_batch() -> None:
    rounds: list[int] = []  # the progress of rank 0
    source = RandomPictures(90, bad=40)  # in the fourth of ten batches of rank 2

    def failed(comm: Communicator) -> Exception | None:
        progress = (lambda done, total: rounds.append(done)) if comm.rank == 0 else None
        options = {"group": comm, "batch": 3, "progress": progress}
        return attempt(lambda: encode(tiny_model(), tiny_processor(), source, **options))[1]

    errors = run_loopback(3, failed)
    assert [type(error) for error in errors] == [AgreementError, AgreementError, VideoError]
    assert str(errors[2]) == "film.mp4: frame 40 cannot be decoded"
    assert str(errors[0]) == str(errors[1]) == f"reading the video: rank 2: {errors[2]}"
    assert rounds == [0, 9, 18]


def test_rank_that_fails_within_a_gather_of_weights_exchanges_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are in the gather, and would not answer."""

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    engine: Any = Engine.__new__(Engine)  # without a group
    encoder = encoding._Encoder(tiny_model(), chat_family(tiny_processor()), 2, False)
    monkeypatch.setattr(encoder, "_collective", True)
    monkeypatch.setattr(encoder, "_run", fail)
    with pytest.raises(RuntimeError, match="sharded weights: no memory"):
        engine.settled(lambda: encoder.encode(None))


def test_clip_is_opened_and_encoded_as_its_source(inference_files: Path) -> None:
    path, model, processor = str(inference_files / "clip.mp4"), tiny_model(), tiny_processor()
    frames = FrameChoice(num_frames=3)
    from_clip = encode(model, processor, Clip.of_file("video", path, frames))
    from_source = encode(model, processor, VideoSource.open(path, num_frames=3))
    assert from_clip.frames == 3 and torch.equal(from_clip.features, from_source.features)
