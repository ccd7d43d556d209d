"""Decoded frames as RGB images, upright as a phone's display matrix says, and of one size."""

import struct
from typing import Any

import numpy as np

from mllm_seqpar._compat import REFORMAT_THREADS

from .container import require_av

_MATRICES = {(a, 0, 0, d) for a in (1, -1) for d in (1, -1)} | {(0, b, c, 0) for b in (1, -1) for c in (1, -1)}
"""The display matrices that turn by quarters or mirror."""


class Converter:
    """Converts decoded frames to upright RGB images of one size."""

    def __init__(self, size: tuple[int, int] | None, coded_size: tuple[int, int]) -> None:
        self._reformatter = require_av().video.reformatter.VideoReformatter()
        self._options: dict[str, Any] = {"interpolation": "BICUBIC"}
        if not REFORMAT_THREADS.applies():
            self._options["threads"] = 1  # frames are converted in parallel, not the parts of one frame
        self._size = size
        self._coded_size = coded_size  # applies to frames after a change of resolution too

    def image(self, frame: Any) -> np.ndarray:
        """Return a frame as an image (height, width, 3)."""
        matrix = display_matrix(frame)
        height, width = self._size or self._coded_size
        if self._size and not matrix[0]:
            height, width = width, height
        image = self._reformatter.reformat(frame, width, height, "rgb24", **self._options).to_ndarray()
        return upright(image, matrix)


def display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """Return the signs of a frame's display matrix (a, b, c, d): (x, y) of the file is shown at (ax + cy, bx + dy).

    Phones set it instead of turning the pixels. Only quarter turns and mirrors are known, of which two signs are 0; any
    other matrix counts as upright.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    least = 0.98 * max(map(abs, (a, b, c, d)))
    signs = tuple((value > 0) - (value < 0) if abs(value) >= least else 0 for value in (a, b, c, d))
    return signs if signs in _MATRICES else (1, 0, 0, 1)


def upright(image: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """Return an image (height, width, 3) as its display matrix says that it is shown, as FFmpeg's programs do."""
    a, b, c, d = matrix
    image = image if a else image.transpose(1, 0, 2)
    return image[:: b or d, :: a or c]
