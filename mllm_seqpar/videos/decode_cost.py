"""What reading costs: how many frames are decoded, and how many a core decodes in a second."""

import tempfile
import time
from bisect import bisect_right
from operator import itemgetter
from pathlib import Path

import numpy as np

from .container import index_of, open_video
from .frame_choice import plan_frames
from .reader import read_frames
from .video import FramePlan, probe
from .video_writer import write_video

_HEIGHT, _WIDTH, _FRAMES, _RATE = 720, 1280, 90, 30
"""The video that `decode_rate` measures."""


def frames_to_decode(plan: FramePlan) -> int:
    """Return how many frames of the file the reader decodes for all entries of a plan, at most.

    It decodes from the keyframe before an entry, or continues from its position. Frames that no other frame refers to
    are counted, although they are decoded only if they are used. Nothing is decoded here; a file without an index is
    read.
    """
    if plan.numbers is not None:
        return plan.numbers[-1] + 1
    with open_video(plan.path) as (container, stream):
        frames = [(entry.timestamp, entry.is_keyframe) for entry in index_of(stream)]
        delay = 0
        packets = container.demux(stream)
        if frames:
            first = next(packets, None)
            if first is not None and first.pts is not None and first.dts is not None:
                delay = first.pts - first.dts
        else:
            times = ((packet.pts if packet.pts is not None else packet.dts, packet) for packet in packets)
            frames = [(when, packet.is_keyframe) for when, packet in times if when is not None and packet.size]
    frames.sort()
    keys = [number for number, (_, is_key) in enumerate(frames) if is_key] or [0]
    decoded, position = 0, -1
    for tick in plan.ticks:
        shown = max(0, bisect_right(frames, tick - delay, key=itemgetter(0)) - 1)
        key = keys[max(0, bisect_right(keys, shown) - 1)]
        decoded += max(0, shown + 1 - max(key, position + 1))
        position = max(position, shown)
    return decoded


def decode_rate() -> float:
    """Measure how many frames per second one core decodes: H.264 in 720p of 30 frames/s, written here for it."""
    noise = np.random.default_rng(0).integers(0, 24, (_HEIGHT, _WIDTH, 3), dtype=np.uint8)
    rows, columns = np.mgrid[:_HEIGHT, :_WIDTH]
    pattern = np.stack([rows % 256, columns % 232, (rows + columns) % 232], -1).clip(0, 231).astype(np.uint8)
    moving = (np.roll(pattern, 8 * number, 1) + np.roll(noise, 37 * number, 0) for number in range(_FRAMES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.mp4"
        write_video(path, moving, rate=_RATE, options={"preset": "veryfast"})
        plan = plan_frames(probe(path), fps=_RATE / 15)
        for _ in read_frames(plan, threads=1):  # the file is in memory, and libraries are loaded
            pass
        begin = time.thread_time()
        for _ in read_frames(plan, threads=1):
            pass
        return frames_to_decode(plan) / (time.thread_time() - begin)
