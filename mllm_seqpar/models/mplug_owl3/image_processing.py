"""Preprocessing of frames and still images to `pixel_values`.

The published code resizes with Pillow. For uint8 pictures on the CPU this module does the same, with the same bytes, if
Pillow is installed. Otherwise torch computes the same two passes, width first, within one level of 255. (Releases of
Pillow that resize the height first where that is cheaper differ by more.) Floating pictures are not rounded to levels.
torchvision is not used: it has no build for some machines.

A still image is cut as in the published code: it is resized to the box of a grid (rows, columns), cut row by row, and
followed by the whole image once more, which gives rows * columns + 1 tiles. Each tile is a frame.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_base import ImageProcessingMixin

from mllm_seqpar.errors import DataError, ShapeError

Frame = Any
"""A picture: PIL image, or array or tensor, (H, W, 3) or (3, H, W), uint8 (0 to 255) or floating (0 to 1)."""

Grid = tuple[int, int]
"""(rows, columns)."""

GRIDS: tuple[Grid, ...] = ((2, 2), (1, 3), (1, 4), (3, 1), (4, 1), (2, 3), (3, 2))

_AT_ONCE = 32  # the largest number of frames that are resized together


class ImageOptions(TypedDict, total=False):
    """Options that `MPlugOwl3ImageProcessor.from_pretrained` takes in place of the saved ones."""

    image_size: int
    image_mean: list[float]
    image_std: list[float]


class MPlugOwl3ImageProcessor(ImageProcessingMixin):
    """Resize frames of any aspect ratio to a square, bicubic with antialiasing, and normalise them.

    A call returns one frame for each picture. `tiles` cuts a still image; its result can be passed to a call.
    `image_size` is the side of the square: a vision tower of 27 x 27 patches of 14 accepts both 378 and 384.
    `image_mean` and `image_std` are per channel, of values from 0 to 1.
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
        self.image_size, self.image_mean, self.image_std = image_size, list(image_mean), list(image_std)

    def __call__(
        self, images: Frame | Iterable[Frame], return_tensors: str | None = None, **unknown: Any
    ) -> BatchFeature:
        """Return `pixel_values` (F, 3, size, size), float32, of one frame, several frames, or an array of frames.

        `return_tensors` is accepted for transformers' callers; the result is always a torch tensor.

        Raises:
            ShapeError: a frame is not a colour picture.
            DataError: an unknown argument.
        """
        if unknown:
            raise DataError(
                f"unknown arguments: {', '.join(sorted(unknown))}; size and normalisation are set when it is created"
            )
        frames = [to_tensor(frame, number) for number, frame in enumerate(frame_list(images))]
        parts = []
        for _, run in groupby(frames, key=lambda frame: (frame.shape, frame.dtype, frame.device)):
            parts += [self._preprocess(chunk) for chunk in torch.stack(list(run)).split(_AT_ONCE)]
        empty = torch.zeros(0, 3, self.image_size, self.image_size)
        return BatchFeature({"pixel_values": torch.cat(parts or [empty])})

    preprocess = __call__

    def grid(self, height: int, width: int) -> Grid:
        """Return the (rows, columns) that a still image of that size is cut into."""
        return best_grid(height, width, self.image_size)

    def tiles(self, picture: Frame, grid: Grid | None = None) -> Tensor:
        """Return the tiles of a still image and then the whole image, (rows * columns + 1, 3, size, size).

        The result has the picture's dtype, uint8 or floating, and needs no further resizing. None: the best grid.
        """
        whole, size = to_tensor(picture, 0)[None], self.image_size
        rows, columns = grid or self.grid(*whole.shape[2:])
        cut = resized(whole, rows * size, columns * size).unflatten(2, (rows, size)).unflatten(4, (columns, size))
        return torch.cat([cut[0].permute(1, 3, 0, 2, 4).flatten(0, 1), resized(whole, size, size)])

    def _preprocess(self, frames: Tensor) -> Tensor:
        """(F, 3, H, W), uint8 or floating -> (F, 3, size, size) float32, normalised."""
        frames = resized(frames, self.image_size, self.image_size)
        frames = frames.float() / 255 if frames.dtype == torch.uint8 else frames.float()
        mean, std = (torch.tensor(x, device=frames.device)[:, None, None] for x in (self.image_mean, self.image_std))
        return (frames - mean) / std


def best_grid(height: int, width: int, size: int) -> Grid:
    """Return the grid of tiles of side `size` that fits best: the closest shape first, then the closest resolution.

    The published code computes in float32 and in whole pixels, which decides near ties; this function does the same.
    """
    boxes = torch.tensor([(columns * size, rows * size) for rows, columns in GRIDS])
    same_shape = boxes.clone()
    same_shape[:, 1] = height / width * boxes[:, 0]  # truncated to whole pixels
    score = _overlap(boxes, same_shape) * 100 + _overlap(boxes, torch.tensor([[width, height]]))
    return GRIDS[int(score.argmax())]


def _overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes (width, height) that share a corner."""
    intersection = torch.minimum(boxes, others).prod(1)
    return intersection / (boxes.prod(1) + others.prod(1) - intersection + 1e-5)


def resized(frames: Tensor, height: int, width: int) -> Tensor:
    """Resize pictures (F, 3, H, W) to (F, 3, height, width) of the same dtype."""
    if frames.shape[2:] == (height, width):
        return frames
    if frames.is_floating_point():
        return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True).clamp(0, 1)
    if frames.device.type == "cpu" and _pillow() is not None:
        return torch.stack([_resized_by_pillow(frame, height, width) for frame in frames])
    levels = frames.float()
    for size in ((frames.shape[2], width), (height, width)):  # Pillow rounds to whole levels after each pass
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
    """Return a list of pictures from one picture, an array or tensor of several, or any iterable of pictures."""
    if isinstance(images, (np.ndarray, Tensor)):
        return list(images) if images.ndim == 4 else [images]
    return [images] if hasattr(images, "convert") else list(images)


def to_tensor(frame: Any, number: int) -> Tensor:
    """Return the picture as (3, H, W), uint8 or floating; `number` is its index in error messages."""
    if hasattr(frame, "convert"):  # a PIL image; PIL may not be installed
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
