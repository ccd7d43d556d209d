"""Layer: one process. Image files of all formats: their upright size and pixels, their shades, and damaged ones."""

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, ImageSequence, features

from mllm_seqpar.data import ImageListSource, plan_frames, probe, read_frames
from mllm_seqpar.errors import VideoError
from mllm_seqpar.videos.images import image_size, is_animated_webp, is_image_file, read_image

SCENE = np.kron(np.random.default_rng(0).integers(0, 255, (6, 18, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
RAMP = np.linspace(0, 1, 256).reshape(16, 16)


def pixels(path: Path) -> np.ndarray:
    """Return the pixels (height, width, 3); the size that is stated must be theirs."""
    source = ImageListSource([path])
    (image,) = next(source.read(0, 1))
    assert source.sizes() == [tuple(image.shape[1:])]
    assert torch.equal(image, read_image(str(path), None))
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "avif"])
@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
def test_size_and_pixels_are_upright_in_every_format(tmp_path: Path, suffix: str, orientation: int) -> None:
    if suffix == "avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    image, exif, path = Image.fromarray(SCENE), Image.Exif(), tmp_path / f"a.{suffix}"
    exif[0x0112] = orientation
    if suffix == "tif":
        image.save(path, tiffinfo={0x0112: orientation})
    else:
        image.save(path, exif=exif, **({} if suffix in ("jpg", "avif") else {"lossless": True}))
    with Image.open(path) as file:
        expected = np.array(ImageOps.exif_transpose(file).convert("RGB"))
    assert np.array_equal(pixels(path), expected)


def test_image_that_is_written_again_has_its_new_size(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for second, size in enumerate([(40, 20), (20, 40)]):
        Image.new("RGB", size, "red").save(path)
        os.utime(path, (second, second))  # the clock of a file system may tick too slowly
        assert image_size(str(path)) == pixels(path).shape[:2] == size[::-1]


def jpeg_with_exif(path: Path, exif: bytes) -> None:
    buffer = io.BytesIO()
    Image.fromarray(SCENE).save(buffer, "JPEG")
    data, exif = buffer.getvalue(), b"Exif\0\0" + exif
    path.write_bytes(data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:])


@pytest.mark.parametrize(
    "exif",
    [
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHI4s", 0x112, 2, 2, b"6\0\0\0") + bytes(4),  # a text
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIf", 0x112, 11, 1, float("nan")) + bytes(4),
        b"II*\0\xff\xff\xff\xff",
        b"II",
        b"",
    ],
)
def test_an_orientation_that_is_no_number_is_ignored(tmp_path: Path, exif: bytes) -> None:
    jpeg_with_exif(tmp_path / "a.jpg", exif)
    assert pixels(tmp_path / "a.jpg").shape == SCENE.shape


def ramp(top: float, kind: Any) -> np.ndarray:
    """Return the ramp from 0 to `top`, rounded if it is of integers."""
    return (RAMP * top if np.issubdtype(kind, np.floating) else np.round(RAMP * top)).astype(kind)


def pillow(top: float, kind: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda path: Image.fromarray(ramp(top, kind)).save(path, **options)


def pgm(top: int) -> Callable[[Path], Any]:
    values = ramp(top, ">u2" if top > 255 else np.uint8)
    return lambda path: path.write_bytes(b"P5\n16 16\n%d\n" % top + values.tobytes())


def write_tiff(path: Path, values: np.ndarray, bits: int, sample_format: int = 1, zero_is_white: bool = False) -> None:
    """Write an uncompressed greyscale TIFF; Pillow does not write all that it reads."""
    content = values.tobytes()
    entries = [(256, 16), (257, 16), (258, bits), (259, 1), (262, 0 if zero_is_white else 1), (277, 1)]
    entries += [(278, 16), (279, len(content)), (339, sample_format)]
    start = 8 + 2 + 12 * (len(entries) + 1) + 4
    rows = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted([*entries, (273, start)])]
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(rows)) + b"".join(rows) + bytes(4) + content)


def packed_12_bits(values: np.ndarray) -> np.ndarray:
    first, second = values.reshape(-1, 2).T
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8)


DEEP: dict[str, Callable[[Path], Any]] = {
    "8.pgm": pgm(255),
    "12.pgm": pgm(4095),
    "16.pgm": pgm(65535),
    "16.png": pillow(65535, np.uint16),
    "16.tif": pillow(65535, np.uint16),
    "16_deflate.tif": pillow(65535, np.uint16, compression="tiff_adobe_deflate"),
    "16_zero_is_white.tif": lambda path: write_tiff(path, 65535 - ramp(65535, "<u2"), 16, zero_is_white=True),
    "12.tif": lambda path: write_tiff(path, packed_12_bits(ramp(4095, np.uint16)), 12),
    "16_signed.tif": lambda path: write_tiff(path, ramp(32767, "<i2"), 16, 2),
    "32.tif": pillow(2_000_000_000, np.int32),
    "32_unsigned.tif": lambda path: write_tiff(path, ramp(4_294_967_295, "<u4"), 32),
    "32_small.tif": pillow(255, np.int32),
    "32_of_16.tif": pillow(65535, np.int32),
    "float_of_1.tif": pillow(1, np.float32),
    "float_of_255.tif": pillow(255, np.float32),
    "float_of_65535.tif": pillow(65535, np.float32),
    "float_signed.tif": lambda path: Image.fromarray(ramp(2, np.float32) - 1).save(path),
    "float_large.tif": pillow(1e9, np.float32),
    "float.pfm": lambda path: path.write_bytes(b"Pf\n16 16\n-1.0\n" + ramp(1, "<f4")[::-1].tobytes()),
    "16.jp2": pillow(65535, np.uint16),
}


@pytest.mark.parametrize("name", DEEP)
def test_greyscale_of_many_bits_keeps_its_shades(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    DEEP[name](path)
    grey = pixels(path)
    assert np.array_equal(grey[..., 0], grey[..., 1]) and np.array_equal(grey[..., 0], grey[..., 2])
    expected = np.arange(256).reshape(16, 16)
    if name == "16_signed.tif":  # of the 16 bits, positive values use 15
        expected = expected // 2
    assert np.abs(grey[..., 0].astype(int) - expected).max() <= 1


def test_floats_that_are_not_numbers_are_black(tmp_path: Path) -> None:
    values = RAMP.astype(np.float32)
    values[0, 0], values[15, 15] = np.nan, np.inf
    Image.fromarray(values).save(tmp_path / "a.tif")
    grey = pixels(tmp_path / "a.tif")[..., 0]
    assert (grey[0, 0], grey[15, 15], grey[15, 14]) == (0, 0, 254)


@pytest.mark.parametrize("suffix", ["avif", "webp", "jpg", "png", "tif", "gif", "bmp", "jp2", "ico", "tga", "ppm"])
def test_whatever_pillow_raises_names_the_file(tmp_path: Path, suffix: str) -> None:
    if suffix == "avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    path = tmp_path / f"whole.{suffix}"
    Image.fromarray(SCENE).resize((64, 64)).save(path)
    data, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for number in range(16):
        damaged = bytearray(data)
        if number < 6:
            del damaged[len(data) * (number + 1) // 7 :]
        else:
            for place in rng.integers(4 if number % 2 else 12, len(data), 1 + number):
                damaged[place] = rng.integers(256)
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(damaged)
        try:
            source = ImageListSource([path])
            source.sizes()
            next(source.read(0, 1))
        except VideoError as error:
            refused += 1
            assert str(error).startswith(f"{path}: not a readable image (") and "\n" not in str(error)
    assert refused or suffix in ("bmp", "tga", "ppm", "jpg")


def test_memory_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(SCENE).save(tmp_path / "a.png")

    def exhausted(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        read_image(str(tmp_path / "a.png"), None)


@pytest.mark.parametrize("orientation", [1, 2, 6, 8, 9])
def test_frames_of_an_animated_webp_are_upright(tmp_path: Path, orientation: int) -> None:
    images, exif, path = [Image.fromarray(SCENE), Image.fromarray(255 - SCENE)], Image.Exif(), tmp_path / "a.webp"
    exif[0x0112] = orientation
    images[0].save(path, save_all=True, append_images=images[1:], exif=exif, lossless=True)
    with Image.open(path) as file:
        turned = [ImageOps.exif_transpose(image.convert("RGB")) for image in ImageSequence.Iterator(file)]
    info, (frames,) = probe(path), read_frames(plan_frames(probe(path)))
    assert (info.height, info.width) == frames.shape[2:]
    assert np.array_equal(frames.permute(0, 2, 3, 1).numpy(), np.stack(turned))


def test_animated_webp_is_known_by_its_content(tmp_path: Path) -> None:
    images = [Image.fromarray(SCENE + number) for number in range(3)]
    images[0].save(tmp_path / "animated", "WEBP", save_all=True, append_images=images[1:])
    images[0].save(tmp_path / "still.webp")
    found = [is_animated_webp(tmp_path / name) for name in ("animated", "still.webp", "missing")]
    assert found == [True, False, False]
    assert [is_image_file(str(tmp_path / name)) for name in ("animated", "still.webp")] == [False, True]
