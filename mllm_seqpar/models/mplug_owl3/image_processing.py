"""Frames and the tiles of still images to `pixel_values`.

The published code resizes with Pillow. So does this, to the same bytes, for uint8 pictures on the CPU where Pillow is
installed. Elsewhere torch does the same two passes, the width first, within one level of 255; releases of Pillow that
take the height first where that is cheaper differ by more there. Floating pictures are not rounded to levels.
torchvision is not needed: it has no build for some machines.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_base import ImageProcessingMixin

from mllm_seqpar.errors import DataError, ShapeError

from .cutting import Grid, best_grid

Frame = Any
"""A picture: PIL image, or array or tensor, (H, W, 3) or (3, H, W), uint8 (0 to 255) or floating (0 to 1)."""

_AT_ONCE = 32  # frames of one size that are resized together


class ImageOptions(TypedDict, total=False):
    """What `MPlugOwl3ImageProcessor.from_pretrained` takes in place of what is saved."""

    image_size: int
    image_mean: list[float]
    image_std: list[float]


class MPlugOwl3ImageProcessor(ImageProcessingMixin):
    """Resizes frames to a square, bicubic with antialiasing and whatever their aspect, and normalises them.

    A call makes one frame of each picture. `tiles` cuts a still image; what it returns is then passed to a call.

    Attributes:
        image_size: side of the square; a vision tower of 27 x 27 patches of 14 takes 378 and 384 alike.
        image_mean: per channel, of values from 0 to 1.
        image_std: per channel.
    """

    model_input_names = ["pixel_values"]
    valid_kwargs = ImageOptions

    def __init__(
        self,
        image_size: int = 384,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def __call__(
        self, images: Frame | Iterable[Frame], return_tensors: str | None = None, **unknown: Any
    ) -> BatchFeature:
        """`pixel_values` (F, 3, size, size), float32, of one frame, several, or an array of frames.

        Raises:
            ShapeError: something that is no colour picture.
            DataError: an argument that is not known; `return_tensors` is, and what comes out is always a tensor.
        """
        if unknown:
            raise DataError(
                f"unknown arguments: {', '.join(sorted(unknown))}; size and normalisation are set when it is made"
            )
        frames = [as_tensor(frame, number) for number, frame in enumerate(frame_list(images))]
        resized: list[Tensor] = []
        start = 0
        while start < len(frames):
            stop = start
            while stop < min(len(frames), start + _AT_ONCE) and _alike(frames[stop], frames[start]):
                stop += 1
            resized.append(self._normalised(self._resized(torch.stack(frames[start:stop]))))
            start = stop
        empty = torch.zeros(0, 3, self.image_size, self.image_size)
        return BatchFeature({"pixel_values": torch.cat(resized) if resized else empty})

    def preprocess(self, images: Frame | Iterable[Frame], **kwargs: Any) -> BatchFeature:
        """The same as calling it."""
        return self(images, **kwargs)

    def grid(self, height: int, width: int) -> Grid:
        """Return the (rows, columns) that a still image of that size is cut into."""
        return best_grid(height, width, self.image_size)

    def tiles(self, picture: Frame, grid: Grid | None = None) -> Tensor:
        """Return the tiles of a still image, row by row, and last the whole of it: (rows * columns + 1, 3, size, size).

        They are of the picture's dtype, uint8 or floating, so that a call has nothing more to resize.

        Args:
            picture: the image.
            grid: (rows, columns); the one that fits best when None.
        """
        whole, size = as_tensor(picture, 0)[None], self.image_size
        rows, columns = grid or self.grid(*whole.shape[2:])
        cut = resized(whole, rows * size, columns * size).unflatten(2, (rows, size)).unflatten(4, (columns, size))
        return torch.cat([cut[0].permute(1, 3, 0, 2, 4).flatten(0, 1), resized(whole, size, size)])

    def _resized(self, frames: Tensor) -> Tensor:
        """(F, 3, size, size) float32 from 0 to 1, of frames (F, 3, H, W), uint8 or floating."""
        frames = resized(frames, self.image_size, self.image_size)
        return frames.float() / 255 if frames.dtype == torch.uint8 else frames.float()

    def _normalised(self, frames: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(part, device=frames.device)[:, None, None] for part in (self.image_mean, self.image_std)
        )
        return (frames - mean) / std


def resized(frames: Tensor, height: int, width: int) -> Tensor:
    """Return pictures (F, 3, H, W) resized to (F, 3, height, width), of the same dtype."""
    if frames.shape[2:] == (height, width):
        return frames
    if frames.is_floating_point():
        return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True).clamp(0, 1)
    if frames.device.type == "cpu" and _pillow() is not None:
        return torch.stack([_resized_by_pillow(frame, height, width) for frame in frames])
    levels = frames.float()
    for size in ((frames.shape[2], width), (height, width)):  # in whole levels, as Pillow does
        levels = F.interpolate(levels, size=size, mode="bicubic", antialias=True).clamp(0, 255).round()
    return levels.to(frames.dtype)


def _resized_by_pillow(frame: Tensor, height: int, width: int) -> Tensor:
    image = _pillow()
    picture = image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())
    picture = picture.resize((width, height), image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@cache
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image


def frame_list(images: Any) -> list[Frame]:
    """The pictures of what is one picture, an array or tensor of several, or any iterable of them."""
    if isinstance(images, (np.ndarray, Tensor)):
        return list(images) if images.ndim == 4 else [images]
    return [images] if hasattr(images, "convert") else list(images)


def as_tensor(frame: Any, number: int) -> Tensor:
    """Return the picture as (3, H, W), uint8 or floating; `number` is for the message that it is none."""
    if hasattr(frame, "convert"):  # a PIL image, without importing PIL
        frame = np.array(frame.convert("RGB"))
    if isinstance(frame, np.ndarray):
        frame = torch.from_numpy(np.ascontiguousarray(frame))
    if not isinstance(frame, Tensor) or frame.dim() != 3 or 3 not in (frame.shape[0], frame.shape[2]):
        found = tuple(frame.shape) if isinstance(frame, Tensor) else type(frame).__name__
        raise ShapeError(f"frame {number} is {found}; expected a picture, (height, width, 3) or (3, height, width)")
    if frame.shape[2] == 3:
        frame = frame.permute(2, 0, 1)
    if frame.dtype != torch.uint8 and not frame.is_floating_point():
        raise ShapeError(f"frame {number} is {frame.dtype}; expected uint8 from 0 to 255, or floating from 0 to 1")
    if frame.is_floating_point() and frame.numel() and not (frame.min() >= 0 and frame.max() <= 1):
        raise ShapeError(
            f"frame {number} is floating and reaches from {frame.min():.3g} to {frame.max():.3g}; expected 0 to 1, or "
            "uint8"
        )
    return frame


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
