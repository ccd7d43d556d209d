"""Real video files, and the sequential decode that the reader is compared with."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor


def write_clip(
    path: Path,
    *,
    codec: str = "libx264",
    frames: int = 60,
    times: list[int] | None = None,
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    rotation: int = 0,
) -> Path:
    """Write noise, so that any two frames differ, by default with B-frames and a keyframe every 12; `times` in ms."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w", options=container or {}) as out:
        stream = out.add_stream(codec, rate=25, options={"g": "12", "bf": "2", **(options or {})})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def decode_all(path: Path) -> list[tuple[int, Tensor]]:
    """Return (presentation time, image) of every frame, decoded in order without seeking."""
    with av.open(str(path)) as file:
        return [
            (frame.pts, torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1))
            for frame in file.decode(video=0)
        ]


def shown_at(decoded: list[tuple[int, Tensor]], tick: int) -> Tensor:
    """Return the image at a tick: the last frame that starts at or before it."""
    return next((image for pts, image in reversed(decoded) if pts <= tick), decoded[0][1])
