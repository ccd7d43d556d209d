"""Layer: one process. Frames of Qwen-VL in pairs, and their rows of patches, without torchvision."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from mllm_seqpar.chats.clip import ImageListSource
from mllm_seqpar.patches.chats.qwen_vl import Qwen3VLChats, TemporalPatches
from mllm_seqpar.patches.qwen_vl import Qwen3VLFamily
from mllm_seqpar.sharding import frame_bounds

CUT = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}


def frames(count: int, height: int = 16, width: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator) for _ in range(count)]


class Recorded(ImageListSource):
    """Images that record which of them are read."""

    def __init__(self, pictures: list[Tensor]) -> None:
        super().__init__(pictures)
        object.__setattr__(self, "asked", list[tuple[int, int]]())

    def read(self, start: int, stop: int, **options: Any) -> Iterator[Tensor]:
        self.asked.append((start, stop))  # type: ignore[attr-defined]
        return super().read(start, stop, **options)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_rank_reads_the_frames_of_its_own_patches_only(count: int, batch: int) -> None:
    source = Recorded(frames(count))
    patches = TemporalPatches(source, 2, (16, 24))
    whole = torch.stack([*source.images, source.images[-1]][: 2 * len(patches)]).unflatten(0, (-1, 2)).flatten(1, 2)
    assert len(patches) == -(-count // 2)
    for ranks in (1, 2, 4):
        source.asked.clear()  # type: ignore[attr-defined]
        for start, stop in frame_bounds(len(patches), ranks):
            found = [part for part in patches.read(start, stop, batch=batch) if len(part)] if stop > start else []
            assert torch.equal(torch.cat([whole[:0], *found]), whole[start:stop])
        read = [number for first, last in source.asked for number in range(first, last)]  # type: ignore[attr-defined]
        assert read == list(range(count))


def test_rows_of_patches_are_those_of_the_published_processor() -> None:
    videos = Qwen3VLVideoProcessor(**CUT)
    images = SimpleNamespace(**CUT, rescale_factor=1 / 255, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])
    family = Qwen3VLChats(SimpleNamespace(video_processor=videos, image_processor=images), Qwen3VLFamily)
    pictures = torch.stack(frames(4)).unflatten(0, (2, 2)).flatten(1, 2)
    (pixels,) = family.pixels(pictures)
    expected, *grid = videos.patchify(pixels.unflatten(1, (2, 3)).flatten(0, 1)[None], 4, 2, 2)
    still, rows = family.joined([family.pixels(pictures[:, :3]), (pixels,)])
    assert grid == [2, 4, 6] and torch.equal(rows, expected[0])
    twice = pictures[:, :3].repeat(1, 2, 1, 1).float() / 255
    mean, deviation = (torch.tensor(x).repeat(2)[:, None, None] for x in (images.image_mean, images.image_std))
    own, *_ = videos.patchify(((twice - mean) / deviation).unflatten(1, (2, 3)).flatten(0, 1)[None], 4, 2, 2)
    torch.testing.assert_close(still, own[0])


def test_large_videos_are_resized_within_the_budget_of_all_frames() -> None:
    """The size follows from the number of frames, which every rank has, and not from what a rank decodes."""
    videos = Qwen3VLVideoProcessor(
        **CUT, size={"shortest_edge": 64, "longest_edge": 4 * 256}, cap_pixels_per_frame=False
    )
    family = Qwen3VLChats(SimpleNamespace(video_processor=videos), Qwen3VLFamily)
    sizes = {count: family.frame_groups(ImageListSource(frames(count, 64, 64))).size for count in (2, 4, 8)}  # type: ignore
    assert sizes == {2: (16, 16), 4: (16, 16), 8: (8, 8)}
