"""Preprocessing of frames and still images to `pixel_values`.

The published code resizes with Pillow. For uint8 images on the CPU this module does the same, with the same bytes, if
Pillow is installed. Otherwise torch computes the same two passes, width first, within one level of 255. (Releases of
Pillow that resize the height first where that is cheaper differ by more.) Floating images are not rounded to levels.
torchvision is not used: it has no build for some machines.

A still image is cut as in the published code: it is resized to the box of a grid (rows, columns), cut row by row, and
followed by the whole image once more, which gives rows * columns + 1 tiles. Each tile is a frame.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import get_size_dict
from transformers.processing_utils import ImagesKwargs

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.auto_classes import SavedWithCode, auto_map
from mllm_seqpar.models.mplug_owl3.configuration import MPlugOwl3Config
from mllm_seqpar.processors.base import frame_list, returned, to_tensor

Frame = Any
"""An image: PIL image, path or URL, or array or tensor, (H, W, 3) or (3, H, W), uint8 (0 to 255) or floating (0 to 1).
"""

Grid = tuple[int, int]
"""(rows, columns)."""

GRIDS: tuple[Grid, ...] = ((2, 2), (1, 3), (1, 4), (3, 1), (4, 1), (2, 3), (3, 2))

_AT_ONCE = 32  # the largest number of frames that are resized together
_BICUBIC = 3  # as numbered by Pillow

_UNSUPPORTED = ("do_center_crop", "crop_size", "do_pad", "pad_size", "image_seq_length")


class ImageOptions(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options of `MPlugOwl3ImageProcessor`: those of transformers' image processors, and the side of the square."""

    image_size: int | None


class MPlugOwl3ImageProcessor(SavedWithCode, PilBackend):
    """Resize frames of any aspect ratio to a square, bicubic with antialiasing, and normalise them.

    A call returns one frame for each image. `tiles` cuts a still image; its result can be passed to a call.

    Attributes:
        image_size: the side of the square: a vision tower of 27 x 27 patches of 14 accepts both 378 and 384. `size`,
            transformers' name, may be passed instead.
        do_resize, do_rescale, do_normalize: False skips a step.
        rescale_factor: what the levels from 0 to 255 are multiplied by. Floating images, from 0 to 1, count as levels
            divided by 255.
        image_mean, image_std: per channel, of values from 0 to 1.
        do_convert_rgb: convert PIL images of other modes.

    Raises:
        DataError: an unknown option, or one that frames cannot have: cropping, padding, another filter.
    """

    model_type = MPlugOwl3Config.model_type
    valid_kwargs = ImageOptions
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    resample = _BICUBIC
    image_mean = image_std = (0.5, 0.5, 0.5)

    def __init__(self, image_size: int = 384, **kwargs: Any) -> None:
        _check_options(kwargs)
        height, width = (image_size, image_size) if kwargs.get("size") is None else _height_width(kwargs["size"])
        if height != width:
            raise DataError(f"size is {kwargs['size']!r}; the vision tower takes squares, so pass one number")
        kwargs |= {"image_size": height, "size": height, "auto_map": auto_map(self.model_type)}
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as saved; `image_size` states the size."""
        return {name: value for name, value in super().to_dict().items() if name != "size"}

    def with_options(self, options: Mapping[str, Any]) -> "MPlugOwl3ImageProcessor":
        """Return an image processor with other options; this one if none differs."""
        given = {name: value for name, value in options.items() if value is not None}
        return type(self).from_dict(self.to_dict(), **given) if given else self

    def preprocess(self, images: Frame | Iterable[Frame], **options: Any) -> BatchFeature:
        """Return `pixel_values` (F, 3, size, size), float32, of one frame, several frames, or an array of frames.

        Args:
            **options: the attributes, instead of the processor's; `size` may be (height, width). `device`: where the
                frames are processed. `input_data_format`: "channels_first" or "channels_last", which is otherwise
                detected. `return_tensors`: "pt", which is the default, or "np".

        Raises:
            ShapeError: a frame is not a colour image.
            DataError: an option is unknown or not supported, or frames that are not resized have several sizes.
        """
        unknown = sorted(set(options) - set(self.valid_kwargs.__annotations__))
        if unknown:
            raise DataError(f"unknown arguments: {', '.join(unknown)}")
        _check_options(options)
        side = options.pop("image_size", None)
        if side is not None:
            options.setdefault("size", side)
        if options.get("size") is not None:
            options["size"] = dict(zip(("height", "width"), _height_width(options["size"]), strict=True))
        return super().preprocess(images, **options)

    def _preprocess_image_like_inputs(
        self, images: Frame | Iterable[Frame], *, return_tensors: str | None, **options: Any
    ) -> BatchFeature:
        frames = [
            self.process_image(frame, number=number, **options) for number, frame in enumerate(frame_list(images))
        ]
        parts = []
        for _, run in groupby(frames, key=lambda frame: (frame.shape, frame.dtype, frame.device)):
            parts += [self._preprocess(chunk, **options) for chunk in torch.stack(list(run)).split(_AT_ONCE)]
        if len(sizes := {tuple(part.shape[2:]) for part in parts}) > 1:
            raise DataError(
                f"do_resize is False and the frames have the sizes {sorted(sizes)}; pass frames of one size"
            )
        empty = torch.zeros(0, 3, options["size"].height, options["size"].width)
        return returned({"pixel_values": torch.cat(parts or [empty])}, return_tensors or "pt")

    def process_image(
        self,
        image: Frame,
        do_convert_rgb: bool | None = None,
        input_data_format: str | None = None,
        device: Any = None,
        number: int = 0,
        **options: Any,
    ) -> Tensor:
        """Return an image as (3, H, W), uint8 or floating; `number` is its index in error messages."""
        image = self.fetch_images(os.fspath(image)) if isinstance(image, (str, os.PathLike)) else image
        convert = self.do_convert_rgb if do_convert_rgb is None else do_convert_rgb
        tensor = to_tensor(image, number, convert_rgb=convert, layout=input_data_format)
        device = device or self.device
        return tensor if device is None else tensor.to(device)

    def grid(self, height: int, width: int) -> Grid:
        """Return the (rows, columns) that a still image of that size is cut into."""
        return best_grid(height, width, self.image_size)

    def tiles(self, image: Frame, grid: Grid | None = None) -> Tensor:
        """Return the tiles of a still image and then the whole image, (rows * columns + 1, 3, size, size).

        The result has the image's dtype, uint8 or floating, and needs no further resizing. None: the best grid.
        """
        whole, size = to_tensor(image, 0)[None], self.image_size
        rows, columns = grid or self.grid(*whole.shape[2:])
        cut = resized(whole, rows * size, columns * size).unflatten(2, (rows, size)).unflatten(4, (columns, size))
        return torch.cat([cut[0].permute(1, 3, 0, 2, 4).flatten(0, 1), resized(whole, size, size)])

    def _preprocess(self, frames: Tensor, *, size: Any, **options: Any) -> Tensor:
        """(F, 3, H, W), uint8 or floating -> (F, 3, height, width) float32, normalised."""
        if options["do_resize"]:
            frames = resized(frames, size.height, size.width)
        values = frames.float()
        if options["do_rescale"]:
            values = (values / 255 if frames.dtype == torch.uint8 else values) * (options["rescale_factor"] * 255)
        if options["do_normalize"]:
            per_channel = (options["image_mean"], options["image_std"])
            mean, std = (torch.tensor(x, device=values.device).view(-1, 1, 1) for x in per_channel)
            values = (values - mean) / std
        return values


def _height_width(size: Any) -> tuple[int, int]:
    sides = get_size_dict(size if isinstance(size, int) else dict(size) if hasattr(size, "keys") else tuple(size))
    if set(sides) != {"height", "width"}:
        raise DataError(f"size is {size!r}; expected a number, or height and width")
    return sides["height"], sides["width"]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise DataError for an option that would change frames in an unsupported way."""
    refused = [name for name in _UNSUPPORTED if options.get(name)]
    if refused:
        raise DataError(
            f"MPlugOwl3ImageProcessor does not support {', '.join(refused)}: whole frames are resized to a square; "
            "crop or pad images before"
        )
    if options.get("resample") not in (None, _BICUBIC):
        raise DataError(f"resample is {options['resample']!r}; frames are resized bicubically, which is {_BICUBIC}")
    if options.get("data_format") not in (None, "channels_first"):
        raise DataError(f"data_format is {options['data_format']!r}; the model takes 'channels_first'")


def best_grid(height: int, width: int, size: int) -> Grid:
    """Return the grid of tiles of side `size` that fits best: the closest shape first, then the closest resolution.

    The published code computes in float32 and in whole pixels, which matters for near ties. This function does so too.
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
    """Resize images (F, 3, H, W) to (F, 3, height, width) of the same dtype."""
    if frames.shape[2:] == (height, width):
        return frames
    if frames.is_floating_point():
        return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True).clamp(0, 1)
    if frames.device.type == "cpu" and (pillow := _pillow()) is not None:
        images = (pillow.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames)
        small = (image.resize((width, height), pillow.Resampling.BICUBIC) for image in images)
        return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in small])
    levels = frames.float()
    for size in ((frames.shape[2], width), (height, width)):  # Pillow rounds to whole levels after each pass
        levels = F.interpolate(levels, size=size, mode="bicubic", antialias=True).clamp(0, 255).round()
    return levels.to(frames.dtype)


@cache
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image
