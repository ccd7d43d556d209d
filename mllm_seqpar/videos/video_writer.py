"""Writing of the videos that this package makes: those of the needle data set, and the one that measures decoding."""

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .container import require_av


def write_video(
    path: str | os.PathLike[str],
    frames: Iterable[Any],
    *,
    rate: int,
    options: Mapping[str, str],
    fallback: Mapping[str, str] = MappingProxyType({}),
    threads: int = 0,
) -> None:
    """Write images (height, width, 3), uint8, as H.264, or as MPEG-4 if this build of PyAV has no x264.

    Args:
        options, fallback: of the encoder of H.264, and of that of MPEG-4.
        threads: of the encoder; 0 leaves the number to it.
    """
    av = require_av()
    codec, chosen = "libx264", options
    try:
        av.codec.Codec(codec, "w")
    except ValueError:
        codec, chosen = "mpeg4", fallback  # which every build has
    with av.open(os.fspath(path), "w") as file:
        stream = file.add_stream(codec, rate=rate, options=dict(chosen))
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", threads
        for number, image in enumerate(frames):
            if not number:
                stream.height, stream.width = image.shape[:2]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode())
