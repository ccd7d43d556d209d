"""Images and videos of MOSS-VL: their sizes, which frames of a video are used, and pixels as patches.

Pixels are resized as the published processor does it, with torchvision: bicubically and with antialiasing, on levels
from 0 to 255. The operation is torch's, so torchvision is not needed.

The budgets of pixels and frames are those of one call: an image or a video gets its part of them, so its size depends
on what else is in the call.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.hub import local_file

Size = tuple[int, int]
"""(height, width)."""

FPS_OF_FRAMES = 24.0
"""Frames per second of a video that is given as frames without their times."""

_MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class PixelOptions:
    """How pixels become patches; the defaults are those of the published files.

    Attributes:
        size: "shortest_edge" and "longest_edge", the fewest and most pixels of an image or a frame.
        patch_size, merge_size: a visual token has merge_size x merge_size patches of patch_size x patch_size pixels.
        image_mean, image_std: per channel, of values from 0 to 1.
    """

    size: Mapping[str, int] = field(default_factory=lambda: {"shortest_edge": 4096, "longest_edge": 16777216})
    patch_size: int = 16
    temporal_patch_size: int = 1
    merge_size: int = 2
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among these values; others, such as the names of classes, are ignored."""
        known = {x.name for x in fields(cls)}
        given = {name: x for name, x in values.items() if name in known and x is not None}
        arguments: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        return cls(**arguments)

    @classmethod
    def from_file(cls, path: str | os.PathLike, file: str, **hub: Any) -> Self:
        """Return the options of a JSON file of a directory or a repository of the Hub.

        Raises:
            DataError: there is no such file.
        """
        local = local_file(path, file, **hub)
        if local is None:
            raise DataError(f"{os.fspath(path)!r} has no {file}; copy the processor files of MOSS-VL into it")
        return cls.of(json.loads(local.read_text(encoding="utf-8")))

    def with_options(self, given: Mapping[str, Any]) -> Self:
        """Return the options with other values; `min_pixels` and `max_pixels` are the limits of `size`."""
        values = {name: value for name, value in given.items() if value is not None}
        names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        limits = {edge: values[name] for name, edge in names.items() if name in values}
        changed = self.of(asdict(self) | values)
        return replace(changed, size={**changed.size, **limits}) if limits else changed

    @property
    def factor(self) -> int:
        """The sides of a resized frame are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def _limits(self) -> tuple[int, int]:
        return self.size["shortest_edge"], self.size["longest_edge"]

    def grid(self, size: Size) -> Size:
        """Return height and width in patches of a resized frame."""
        return size[0] // self.patch_size, size[1] // self.patch_size

    def normalised(self, frames: Tensor) -> Tensor:
        """Resized frames (n, 3, H, W), uint8 -> the same in float32, normalised."""
        mean, deviation = (
            torch.tensor(x, device=frames.device)[:, None, None] * 255.0 for x in (self.image_mean, self.image_std)
        )
        return (frames.float() - mean) / deviation

    def patches(self, frames: Tensor) -> Tensor:
        """Normalised frames (n, 3, H, W) -> patches (n, H W / patch^2, 3 patch^2), those of a visual token in a row."""
        count, merge, patch = len(frames), self.merge_size, self.patch_size
        height, width = (side // merge for side in self.grid((frames.shape[2], frames.shape[3])))
        values = frames.view(count, 3, height, merge, patch, width, merge, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
        return values.reshape(count, height * width * merge**2, 3 * patch**2)


@dataclass(frozen=True, kw_only=True)
class ImagePixelOptions(PixelOptions):
    """Attributes:
    multi_image_max_pixels: the most pixels of all images of a call; None: the most pixels of one image.
    """

    multi_image_max_pixels: int | None = None

    def sizes(self, sizes: Sequence[Size]) -> list[Size]:
        """Return the resized sizes of all images of a call.

        Raises:
            DataError: an image that is too long for its width.
        """
        least, most = self._limits
        total, budget = sum(height * width for height, width in sizes), self.multi_image_max_pixels or most
        found = []
        for height, width in sizes:
            _check_aspect(height, width)
            own = min(max(int(budget * (height * width / total)), least), most)
            found.append(smart_resize(height, width, self.factor, least, own))
        return found


@dataclass(frozen=True, kw_only=True)
class VideoPixelOptions(PixelOptions):
    """Attributes:
    video_max_pixels: the most pixels of all frames of all videos of a call; None: the most pixels of one frame.
    video_fps: frames per second.
    min_frames, max_frames: the fewest frames of a video, and the most frames of all videos of a call.
    """

    video_max_pixels: int | None = None
    video_fps: float = 1.0
    min_frames: int = 1
    max_frames: int = 256

    def sizes(self, videos: Sequence[tuple[int, int, int]]) -> list[Size]:
        """Return the resized sizes of the frames of all videos (frames, height, width) of a call.

        Raises:
            DataError: a side that is shorter than a visual token, or a frame that is too long for its width.
        """
        volumes = [count * height * width for count, height, width in videos]
        budget, most = self.video_max_pixels, self._limits[1]
        return [
            self._resized(*video, most if budget is None else int(budget * volume / sum(volumes)))
            for video, volume in zip(videos, volumes, strict=True)
        ]

    def _resized(self, frames: int, height: int, width: int, volume: int) -> Size:
        """Return the size of the frames of a video that may have `volume` pixels in all of them."""
        factor, (least, most) = self.factor, self._limits
        if min(height, width) < factor:
            raise DataError(f"a video has frames of {height} x {width} pixels; each side needs at least {factor}")
        _check_aspect(height, width)
        pixels = height * width

        def at_most(area: float) -> Size:
            scale = math.sqrt(area)
            return (
                max(factor, math.floor(height / scale / factor) * factor),
                max(factor, math.floor(width / scale / factor) * factor),
            )

        def at_least(area: float) -> Size:
            scale = math.sqrt(area)
            return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor

        size = round(height / factor) * factor, round(width / factor) * factor
        if math.prod(size) > most:
            size = at_most(pixels / most)
        if frames * math.prod(size) > volume:
            size = at_most(frames * pixels / volume)
        elif frames * math.prod(size) < least:
            size = at_least(least / (frames * pixels))
        return at_least(least / pixels) if math.prod(size) < least else size

    def frame_numbers(self, frames: int, duration: float, most: int | None = None) -> list[int]:
        """Return the numbers of the frames that are used of a video.

        Args:
            frames, duration: of the video, in seconds.
            most: the most frames of this video; None: `max_frames`.
        """
        most = self.max_frames if most is None else most
        if self.video_max_pixels is not None:
            most = min(most, self.video_max_pixels // self._limits[0])
        wanted = max(math.ceil(duration * self.video_fps - 1e-6), self.min_frames)
        count = min(wanted, most, frames)
        return np.unique(np.linspace(0, frames - 1, count).astype(np.int32)).tolist()

    def frames_of_videos(self, durations: Sequence[float]) -> list[int]:
        """Return the most frames of each video of a call: one each, and the others by duration."""
        count, budget = len(durations), int(self.max_frames)
        if count == 1:
            return [budget]
        left, total = max(0, budget - count), sum(durations)
        parts = [left * (seconds / total) if total > 0 else left / count for seconds in durations]
        counts = [1 + math.floor(part) for part in parts]
        by_fraction = sorted(range(count), key=lambda number: (math.floor(parts[number]) - parts[number], number))
        for number in by_fraction[: left - sum(map(math.floor, parts))]:
            counts[number] += 1
        return counts

    def segment_times(self, segments: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the seconds of the frames of each segment [start, end) or [time] of a video.

        The limits of the number of frames are shared by the duration of the segments.
        """
        lengths = [segment[1] - segment[0] if len(segment) == 2 else None for segment in segments]
        spans = [length for length in lengths if length is not None]
        times = []
        for segment, length in zip(segments, lengths, strict=True):
            if length is None:
                times.append([float(segment[0])])
                continue
            weight = length / sum(spans) if sum(spans) > 0 else 1 / len(spans)
            least, most = (max(1, round(max(1, limit) * weight)) for limit in (self.min_frames, self.max_frames))
            count = min(max(math.ceil(length * self.video_fps), least), most)
            start, end = segment
            times.append([start] if count == 1 else np.linspace(start, end, count, endpoint=False).tolist())
        return times


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > _MOST_ASPECT:
        raise DataError(
            f"an image of {height} x {width} pixels; one side may be at most {_MOST_ASPECT} times as long as the "
            "other: crop it"
        )


def resized_patches(frames: Tensor, size: Size, options: PixelOptions) -> Tensor:
    """Return the patches of frames (n, 3, H, W), uint8, of any size."""
    return options.patches(options.normalised(resized(frames, size)))


def resized(frames: Tensor, size: Size) -> Tensor:
    """Resize frames (n, 3, H, W), uint8, to (n, 3, height, width)."""
    if tuple(frames.shape[2:]) == size:
        return frames
    return F.interpolate(frames, size, mode="bicubic", antialias=True)
