"""One view of anything that gives frames: a planned video file, or a list of pictures.

A source is cheap to make and to pickle: it names what to read; files are opened when frames are asked for.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..errors import VideoError
from .reader import check_range, read_frames
from .video import FramePlan, plan_frames, probe


@runtime_checkable
class FrameSource(Protocol):
    """Frames with numbers 0 .. len - 1, any range of which can be read without the others."""

    def __len__(self) -> int:
        """Number of frames."""
        ...

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yields frames start <= i < stop in order, as uint8 tensors (at most `batch`, 3, H, W) of one size each."""
        ...


@dataclass(frozen=True)
class VideoSource:
    """The planned frames of a video file."""

    plan: FramePlan

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
    ) -> "VideoSource":
        """Probes `path` and plans its frames by the rules of `plan_frames`."""
        return cls(plan_frames(probe(path), fps=fps, num_frames=num_frames, max_frames=max_frames))

    def __len__(self) -> int:
        return len(self.plan)

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Decodes a range of the plan, as `read_frames`."""
        return read_frames(self.plan, start, stop, size=size, batch=batch)


@dataclass(frozen=True)
class ImageListSource:
    """A list of picture files as a video: one frame each, in the order given."""

    paths: tuple[str, ...]

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        names = tuple(os.fspath(p) for p in paths)
        if not names:
            raise VideoError("an image list without images; give at least one path")
        for name in names:
            if not os.path.isfile(name):
                raise VideoError(f"{name}: no such file; an image list needs paths of picture files")
        object.__setattr__(self, "paths", names)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Reads pictures start <= i < stop; without `size`, a change of size starts a new batch."""
        check_range(start, stop, len(self), batch)
        images: list[Tensor] = []
        for name in self.paths[start:stop]:
            image = _read_picture(name, size)
            if images and (len(images) == batch or image.shape != images[0].shape):
                yield torch.stack(images)
                images = []
            images.append(image)
        if images:
            yield torch.stack(images)


def _read_picture(name: str, size: tuple[int, int] | None) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(
            "Reading pictures needs Pillow, which is not installed: pip install 'mllm-seqpar[video]'"
        ) from error
    try:
        with Image.open(name) as file:
            picture: Any = ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for broken files, by format
        raise VideoError(f"{name}: not a readable picture ({error}); replace or convert it") from error
    if size is not None:
        picture = picture.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
