"""The work of decoding: the frames of a file that a plan needs, and the decoding rate of a core."""

import tempfile
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from .reader import read_frames
from .video import FramePlan, index_of, open_video, plan_frames, probe, require_av

_HEIGHT, _WIDTH, _FRAMES, _RATE = 720, 1280, 90, 30


def frames_to_decode(plan: FramePlan) -> int:
    """Return how many frames of the file the reader decodes for all entries of a plan, at most.

    It decodes from the keyframe before an entry, or continues from its position. Frames that no other frame refers to
    are counted, although they are decoded only if they are used. Nothing is decoded here; a file without an index is
    read.
    """
    with open_video(plan.path) as (container, stream):
        found = [(entry.timestamp, entry.is_keyframe) for entry in index_of(stream)]
        delay = 0
        packets = container.demux(stream)
        if found:
            first = next(packets, None)
            if first is not None and first.pts is not None and first.dts is not None:
                delay = first.pts - first.dts
        else:
            times = ((packet.pts if packet.pts is not None else packet.dts, packet) for packet in packets)
            found = [(when, packet.is_keyframe) for when, packet in times if when is not None and packet.size]
    found.sort()
    times_of_all = [when for when, _ in found]
    keys = [number for number, (_, is_key) in enumerate(found) if is_key] or [0]
    decoded, position = 0, -1
    for tick in plan.ticks:
        wanted = max(0, bisect_right(times_of_all, tick - delay) - 1)
        key = keys[max(0, bisect_right(keys, wanted) - 1)]
        decoded += max(0, wanted + 1 - max(key, position + 1))
        position = max(position, wanted)
    return decoded


def decode_rate() -> float:
    """Measure how many frames per second one core decodes: H.264 in 720p of 30 frames/s, written here for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.mp4"
        _write(path)
        plan = plan_frames(probe(path), fps=_RATE / 15)
        for _ in read_frames(plan, threads=1):  # the file is in memory, and libraries are loaded
            pass
        begin = time.thread_time()
        for _ in read_frames(plan, threads=1):
            pass
        return frames_to_decode(plan) / (time.thread_time() - begin)


def _write(path: Path) -> None:
    """Write a moving pattern with noise."""
    av: Any = require_av()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 24, (_HEIGHT, _WIDTH, 3), dtype=np.uint8)
    rows, columns = np.mgrid[:_HEIGHT, :_WIDTH]
    pattern = np.stack([rows % 256, columns % 232, (rows + columns) % 232], -1).clip(0, 231).astype(np.uint8)
    codec = "libx264"
    try:
        av.codec.Codec(codec, "w")
    except ValueError:  # This build has no x264; every build has mpeg4.
        codec = "mpeg4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=_RATE, options={"preset": "veryfast"} if codec == "libx264" else {})
        stream.height, stream.width, stream.pix_fmt = _HEIGHT, _WIDTH, "yuv420p"
        for number in range(_FRAMES):
            image = np.roll(pattern, 8 * number, 1) + np.roll(noise, 37 * number, 0)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode())
