"""Image files, read with Pillow: their sizes, their pixels, and frames as JPEG for the frame store and for previews.

Pillow also reads formats that run other programs (EPS). `IMAGE_FORMATS` excludes them, because a file may come from
anyone. The format is determined by the content, never by the name of the file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mllm_seqpar._compat import optional_import
from mllm_seqpar.errors import VideoError

from .media_files import media_size

IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "AVIF", "HEIF")
"""The image formats that are read, by Pillow's names."""

_ORIENTATION = 0x0112
"""The EXIF tag; values of 5 and above rotate the image by 90 degrees."""


def is_image_file(name: str) -> bool:
    """Return whether a file is one image, by its content; animations count as videos."""
    try:
        with _open_image(name) as (file, _):
            return getattr(file, "n_frames", 1) == 1 or file.format in ("JPEG", "MPO", "TIFF", "ICO")
    except VideoError:
        return False


@lru_cache(maxsize=65_536)
def image_size(name: str) -> tuple[int, int]:
    with _open_image(name) as (file, _):
        width, height = file.size
        turned = file.getexif().get(_ORIENTATION, 1) >= 5
    return (width, height) if turned else (height, width)


@contextmanager
def _open_image(name: str) -> Iterator[tuple[Any, Any]]:
    """Open an image file; yield it and the module PIL.ImageOps."""
    image, ops = (
        optional_import(f"PIL.{part}", extra="video", needed_for="reading images") for part in ("Image", "ImageOps")
    )
    image.init()
    try:
        known = [name for name in IMAGE_FORMATS if name in image.OPEN]
        with image.open(name, formats=known) as file:
            yield file, ops
    # Pillow raises any of these for broken files, and the last one for more pixels than Image.MAX_IMAGE_PIXELS allows.
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        if media_size(name) == 0:
            raise VideoError(f"{name}: the file is empty (0 bytes); was the download interrupted?") from error
        reason = str(error).partition(f" {name!r}")[0]  # without the path, which the message begins with
        raise VideoError(f"{name}: not a readable image ({reason}); replace or convert it") from error


def read_image(name: str, size: tuple[int, int] | None) -> Tensor:
    with _open_image(name) as (file, ops):
        image: Any = ops.exif_transpose(file)
        # Pillow would make all values above 255 white. Before 10.3, it reads a PNG of 16 bits in the mode I.
        if image.mode.startswith("I;16") or (image.mode == "I" and file.format == "PNG"):
            image = ops.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("RGB")
    if size is not None:
        image = image.resize((size[1], size[0]), resample=3)  # bicubic
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def to_pil_images(frames: Tensor) -> list[Any]:
    """Convert (n, 3, H, W) uint8 to PIL images, which image processors of every backend treat in the same way."""
    pillow = optional_import("PIL.Image", extra="video", needed_for="images of Pillow")
    return [pillow.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]


def jpeg_of(frame: Tensor, width: int | None = None, quality: int = 80) -> bytes:
    """Return a frame (3, H, W), uint8, as a JPEG, reduced to this width if it is wider.

    Raises:
        ConfigError: Pillow is not installed.
    """
    (image,) = to_pil_images(frame[None].cpu())
    if width is not None and image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
