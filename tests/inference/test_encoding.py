"""Layer: one process, then gloo ranks. Encoding: the same features on any number of ranks, in bounded memory."""

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm.collective_check import check_collectively
from mllm_seqpar.data import VideoSource
from mllm_seqpar.errors import AgreementError, ConfigError, VideoError
from mllm_seqpar.inference import encode_video, shard_weights
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patches.mplug_owl3.testing import IMAGE_SIZE, TOKENS_PER_FRAME, tiny_model, tiny_tokenizer
from mllm_seqpar.sharding import FrameShard, frame_bounds
from ranks import ranks


def tiny_processor() -> MPlugOwl3Processor:
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())


@dataclass
class Pictures:
    """Random pictures by number; picture `bad` cannot be read, and a change of size ends a batch early."""

    count: int
    bad: int | None = None
    resize_at: int | None = None
    pause: float = 0.0

    def __len__(self) -> int:
        return self.count

    def picture(self, number: int) -> Tensor:
        side = 20 if self.resize_at is None or number < self.resize_at else 24
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Iterator[Tensor]:
        images: list[Tensor] = []
        for number in range(start, stop):
            time.sleep(self.pause)
            if number == self.bad:
                raise VideoError(f"film.mp4: frame {number} cannot be decoded")
            image = self.picture(number)
            if images and (len(images) == batch or image.shape != images[0].shape):
                yield torch.stack(images)
                images = []
            images.append(image)
        if images:
            yield torch.stack(images)


def all_at_once(source: Pictures) -> Tensor:
    pictures = [source.picture(number) for number in range(len(source))]
    with torch.no_grad():
        return tiny_model().encode_frames(tiny_processor().image_processor(pictures)["pixel_values"])


@dataclass
class Watched:
    """A processor that knows how many of the frames it has prepared exist at one time, and the most so far."""

    processor: MPlugOwl3Processor
    alive: int = 0
    most: int = 0

    def image_processor(self, frames: Tensor) -> dict[str, Tensor]:
        prepared = self.processor.image_processor(frames)["pixel_values"]
        self.alive += len(prepared)
        self.most = max(self.most, self.alive)
        weakref.finalize(prepared, self._gone, len(prepared))
        return {"pixel_values": prepared}

    def _gone(self, count: int) -> None:
        self.alive -= count


@pytest.mark.parametrize("count", [8, 90])
def test_two_batches_of_pixels_exist_at_most(count: int) -> None:
    model, watched, seen = tiny_model(), Watched(tiny_processor()), []
    video = encode_video(model, watched, Pictures(count), batch=4, progress=seen.append)
    assert 4 <= watched.most <= 8
    assert watched.alive == 0
    assert seen == [*range(0, count, 4), count]
    assert video.shard == FrameShard(0, count, count) and video.visual_tokens == count * TOKENS_PER_FRAME
    assert torch.allclose(video.features, all_at_once(Pictures(count)), atol=1e-5)


def test_videos_and_batches_that_cannot_be() -> None:
    with pytest.raises(VideoError, match="no frames"):
        encode_video(tiny_model(), tiny_processor(), Pictures(0))
    with pytest.raises(ConfigError, match="0 frames at once"):
        encode_video(tiny_model(), tiny_processor(), Pictures(3), batch=0)

    class Short(Pictures):
        def read(self, start: int, stop: int, **options: Any) -> Iterator[Tensor]:
            yield from super().read(start, stop - 2, **options)

    with pytest.raises(VideoError, match="gave 3 of 5 frames"):
        encode_video(tiny_model(), tiny_processor(), Short(5))


def encode(rank: int, world: int, source: Any, shard: bool = False, batch: int = 3) -> tuple[Tensor, FrameShard, list]:
    model, seen = tiny_model(), []
    if shard:
        from mllm_seqpar.comm import as_communicator

        shard_weights(model, as_communicator(None), torch.device("cpu"))
        whole = [name for name, weight in model.named_parameters() if weight.to_local().numel() == weight.numel()]
        assert len(whole) <= 1, whole  # (one) of a single row
    video = encode_video(model, tiny_processor(), source, batch=batch, progress=seen.append)
    return video.features, video.shard, seen


@pytest.mark.parametrize(("world", "shard"), [(1, False), (2, False), (3, False), (4, False), (3, True)])
@pytest.mark.parametrize("source", [Pictures(11, resize_at=5), Pictures(2)], ids=["11", "2"])
def test_ranks_encode_their_own_frames(world: int, shard: bool, source: Pictures) -> None:
    parts = ranks(world).run(encode, source, shard)
    assert [(part.start, part.stop) for _, part, _ in parts] == frame_bounds(len(source), world)
    assert torch.allclose(torch.cat([features for features, _, _ in parts]), all_at_once(source), atol=1e-5)
    assert len({tuple(seen) for _, _, seen in parts}) == 1  # all know how far all are
    assert parts[0][2][-1] == len(source)


def test_a_damaged_part_stops_all_ranks_within_a_batch(folder: Path) -> None:
    clip = folder / "clip.mp4"
    data = bytearray(clip.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 600] = bytes(600)
    (folder / "damaged.mp4").write_bytes(data)
    errors = ranks(3).errors(encode, VideoSource.open(folder / "damaged.mp4"))
    damaged = [rank for rank, error in enumerate(errors) if isinstance(error, VideoError)]
    assert damaged and 0 not in damaged  # the first third is whole
    assert isinstance(errors[0], AgreementError)
    assert f"rank {damaged[0]}: " in str(errors[0]) and "cannot be decoded" in str(errors[0])

    begun = time.monotonic()
    errors = ranks(3).errors(encode, Pictures(3000, bad=1010, pause=0.1))  # 100 s of reading for the other two
    assert time.monotonic() - begun < 90
    assert [type(error) for error in errors] == [AgreementError, VideoError, AgreementError]
    assert str(errors[1]) == "film.mp4: frame 1010 cannot be decoded"
    assert str(errors[0]) == str(errors[2]) == f"reading the video: rank 1: {errors[1]}"


def check_together(rank: int, world: int, failing: list[int], value: Any) -> Any:
    from mllm_seqpar.comm import as_communicator

    def work() -> Any:
        if rank in failing:
            raise VideoError("no such file")
        return value if rank else "own"

    return check_collectively(as_communicator(None), "video", work, lambda made: {"frames": 7, "size": made})


def test_ranks_that_found_other_things_say_which() -> None:
    assert ranks(3).run(check_together, [], "own") == ["own"] * 3
    for error in ranks(3).errors(check_together, [], "other"):
        assert type(error) is AgreementError
        assert str(error).startswith("video: the ranks differ in size: rank 0: own; ranks 1, 2: other. Start all")
    errors = ranks(3).errors(check_together, [0, 2], "own")
    assert [type(error) for error in errors] == [VideoError, AgreementError, VideoError]
    assert str(errors[1]) == "video: ranks 0, 2: no such file"
