"""Image files, read with Pillow: their sizes, their pixels, and frames as JPEG for the frame store and for previews.

Pillow also reads formats that run other programs (EPS). `IMAGE_FORMATS` excludes them, because a file may come from
anyone. The format is determined by the content, never by the name of the file.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mllm_seqpar._compat import optional_import
from mllm_seqpar.errors import PASSED, VideoError, translated

from .media_files import file_version, require_content

IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "AVIF", "HEIF")
"""The image formats that are read, by Pillow's names."""

_ORIENTATION = 0x0112
"""The tag of EXIF and TIFF."""

_NUMERIC = _WIDTH, _HEIGHT, _BITS, _INTERPRETATION, _SAMPLE_FORMAT = 0x0100, 0x0101, 0x0102, 0x0106, 0x0153
"""Tags of TIFF: size, bits of a sample, whether zero is white (0), and whether samples are unsigned (1)."""

_TRANSPOSITIONS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's transposition that makes an image of this orientation upright; other orientations are ignored."""

_SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose images of mode I have 16 bits; Pillow scales a PGM of fewer to them, and reads a PNG so before 10.3."""


def is_image_file(name: str) -> bool:
    """Return whether a file is one image, by its content; animations count as videos."""
    try:
        with _open_image(name) as (file, _):
            return getattr(file, "n_frames", 1) == 1 or file.format in ("JPEG", "MPO", "TIFF", "ICO")
    except VideoError:
        return False


def is_animated_webp(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is an animated WebP, which FFmpeg does not read."""
    try:
        with open(path, "rb") as file:
            head = file.read(21)
    except OSError:  # `open_video` says what is wrong
        return False
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) == 21 and bool(head[20] & 2)


def image_size(name: str) -> tuple[int, int]:
    """Return (height, width) of the upright image, from the header."""
    return _image_size(name, file_version(name))


@lru_cache(maxsize=65_536)
def _image_size(name: str, _version: tuple[int, ...]) -> tuple[int, int]:
    with _open_image(name) as (file, _):
        width, height = file.size
        if file.format == "TIFF":  # newer versions of Pillow exchange them when they open the file, others later
            width, height = int(file.tag_v2[_WIDTH]), int(file.tag_v2[_HEIGHT])
        return (width, height) if _orientation(file) >= 5 else (height, width)


def _orientation(file: Any) -> int:
    """Return the EXIF orientation of an image; 1, upright, if it has none, or a value that is not defined."""
    try:
        value = file.getexif().get(_ORIENTATION, 1)
        return int(value) if value in _TRANSPOSITIONS else 1
    except PASSED:
        raise
    except Exception:  # noqa: BLE001 - of damaged metadata; the image is readable without them
        return 1


@contextmanager
def _open_image(name: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Open an image file; yield it and the module PIL.Image. What Pillow raises becomes a VideoError with its name."""
    image = optional_import("PIL.Image", extra="video", needed_for="reading images")
    image.init()
    require_content(name, "an image file")

    def unreadable(why: str) -> VideoError:
        why = why.partition(f" {name!r}")[0]  # without the path, which the message begins with
        return VideoError(f"{name}: not a readable image ({why}); replace or convert it")

    with (
        translated(unreadable),
        image.open(name, formats=[kind for kind in IMAGE_FORMATS if kind in image.OPEN]) as file,
    ):
        yield file, image


def read_image(name: str, size: tuple[int, int] | None) -> Tensor:
    """Return the upright image (3, height, width), uint8, scaled to `size` (height, width) if it is given."""
    with _open_image(name) as (file, module):
        turn = None if file.format == "TIFF" else _TRANSPOSITIONS.get(_orientation(file))  # Pillow turns a TIFF itself
        file.load()
        image = _eight_bits(file, module)
        if turn is not None:
            image = image.transpose(turn)
        if size is not None:
            image = image.resize((size[1], size[0]), resample=3)  # bicubic
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def animation_frames(name: str | os.PathLike[str]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, duration, image) of each frame of an animation: milliseconds, upright RGB (height, width, 3)."""
    start = 0
    with _open_image(name) as (file, _):
        turn = _TRANSPOSITIONS.get(_orientation(file))
        for number in range(file.n_frames):
            file.seek(number)
            file.load()
            duration = file.info.get("duration") or 100  # as browsers do
            image = file.convert("RGB")
            yield start, duration, np.array(image if turn is None else image.transpose(turn))
            start += duration


def _eight_bits(file: Any, image: Any) -> Any:
    """Return an image as RGB. A greyscale image of more bits keeps its shades; Pillow would cut values above 255.

    White is the greatest value that the format can store. Where that is not known (floats, and integers of 32 bits), it
    is the least of 1 (of floats), 255 and 65535 that no value exceeds, or the greatest value, and black is 0 or the
    least value if that is negative.
    """
    if file.mode not in ("I", "F") and not file.mode.startswith("I;"):
        return file.convert("RGB")
    tags = {tag: np.ravel(value)[0] for tag, value in getattr(file, "tag_v2", {}).items() if tag in _NUMERIC}
    values, low, high = np.asarray(file), 0.0, None
    if file.mode.startswith("I;"):
        high = 2 ** int(tags.get(_BITS, 16)) - 1
    elif file.mode == "I" and file.format in _SIXTEEN_BITS:
        high = 65535
    elif file.mode == "I" and tags.get(_SAMPLE_FORMAT) == 1:
        values = values.view(np.uint32)  # Pillow makes them signed
    real = file.mode == "F"
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    if high is None:
        low, most = min(float(values.min()), 0.0), float(values.max())
        high = next((white for white in (1, 255, 65535)[not real :] if most <= white), most)
    if tags.get(_INTERPRETATION) == 0:  # white is zero
        values = low + high - values
    # Integers have 256 equal ranges, so that 16 bits become their upper 8.
    shades = np.rint(255 * (values - low) / (high - low)) if real else 256 * (values - low) // (high - low + 1)
    return image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB")


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
