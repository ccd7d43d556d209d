"""Small JPEG images of frames."""

from __future__ import annotations

import io

from torch import Tensor


def jpeg_of(frame: Tensor, width: int = 160) -> bytes:
    """Return a frame (3, H, W), uint8, as a JPEG of this width, or of its own width if that is smaller.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Writing images needs Pillow: pip install 'mllm-seqpar[video]'") from error
    picture = Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    if picture.width > width:
        picture = picture.resize((width, max(1, round(picture.height * width / picture.width))))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
