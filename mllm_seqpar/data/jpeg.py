"""Frames are encoded as JPEG images, in full size for the frame store and reduced for previews."""

from __future__ import annotations

import io

from torch import Tensor

from mllm_seqpar._compat import optional_import


def jpeg_of(frame: Tensor, width: int | None = None, quality: int = 80) -> bytes:
    """Return a frame (3, H, W), uint8, as a JPEG, reduced to this width if it is wider.

    Raises:
        ConfigError: Pillow is not installed.
    """
    pillow = optional_import("PIL.Image", extra="video", needed_for="writing images")
    image = pillow.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    if width is not None and image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
