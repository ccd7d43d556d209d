"""Which frames a video shows, and at which times; and plans, which name some of them.

The frames of a video are those that a decoder shows if it reads the file from its start, in its order, each once.
There are three ways to their number and times, and `probe` takes the first that is known to give them:

1. the container's index, if it lists every frame;
2. a scan of the packets (demultiplexing only), unless `reasons_to_distrust` finds why packets are not the frames;
3. counting: all frames are decoded in order. Their times are FFmpeg's best-effort times, made ascending.

Every rank computes the same plan from the same file. Times are integer ticks of the stream's time base, so ranks cannot
round differently. A planned tick stands for the frame with the greatest presentation time not after it, or for the
first frame if there is none. `reader.read_frames` decodes the plan: by time, or by number if the frames were counted.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mllm_seqpar.digests import digest_of, file_digest
from mllm_seqpar.errors import ConfigError, VideoError

from .container import demuxed, has_fragments, index_of, open_video, require_av, warn_once
from .images import is_animated_webp
from .media_files import file_version, media_size
from .packets import READ_TO_KNOW, SMALLEST_FRAME, Packet, packet_facts, reasons_to_distrust
from .shown_frames import BestEffort, ascending, longest_gap, shown_frames, usual_step

_PREFIX = 64
"""Packets at the start of a file whose index is complete, whose times are compared with the codec's order."""


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """Metadata of a video: the number, times and size of the frames that a decoder shows.

    Attributes:
        width, height: pixels of a coded frame, before a phone's rotation is applied.
        start, length: presentation time of the first frame, and `duration`, in ticks of `time_base` seconds.
        ticks: presentation time of every frame, ascending; None if they were not needed to know the other facts.
        distrust: why packets do not tell which frames are shown when, so that frames were decoded and counted, and are
            read in order from the start; None if frames are found by their times.
    """

    path: str
    frames: int
    width: int
    height: int
    start: int
    length: int
    time_base: Fraction
    ticks: tuple[int, ...] | None = field(default=None, repr=False)
    distrust: str | None = None

    @property
    def fps(self) -> float:
        """The average number of frames per second."""
        return float(self.frames / (self.length * self.time_base))

    @property
    def duration(self) -> float:
        """Seconds from the start of the first frame to the end of the last."""
        return float(self.length * self.time_base)

    def plan(self, ticks: Iterable[int]) -> "FramePlan":
        ticks, numbers, times = tuple(ticks), None, self.ticks
        if self.distrust is not None and times is not None:
            numbers = tuple(max(0, bisect_right(times, tick) - 1) for tick in ticks)
        return FramePlan(self.path, ticks, self.time_base, self.start, numbers)


@dataclass(frozen=True)
class FramePlan:
    """The frames to use of one video: entry i is the frame shown at `ticks[i]`.

    `ticks` are in units of `time_base` seconds on the stream's own clock, on which the first frame has time `start`.
    `numbers` counts the frame of each entry among all that are shown, from 0, if the times of packets cannot find it
    (`VideoInfo.distrust`); otherwise it is None.
    """

    path: str
    ticks: tuple[int, ...] = field(repr=False)
    time_base: Fraction
    start: int
    numbers: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.ticks or any(b < a for a, b in zip(self.ticks, self.ticks[1:], strict=False)):
            raise ConfigError(f"{self.path}: a plan needs at least one tick, in ascending order; got {self.ticks[:8]}")

    def __len__(self) -> int:
        return len(self.ticks)

    def only(self, entry: int) -> "FramePlan":
        """Return a plan of one entry."""
        numbers = None if self.numbers is None else self.numbers[entry : entry + 1]
        return replace(self, ticks=self.ticks[entry : entry + 1], numbers=numbers)

    def seconds(self, index: int) -> float:
        return self.time(self.ticks[index])

    def time(self, tick: int) -> float:
        """Return the time of a tick in seconds after the first frame."""
        return float((tick - self.start) * self.time_base)


def source_meta(plan: FramePlan) -> dict[str, Any]:
    """Return metadata that identifies the frames of a plan: path, size, mtime and digest of the file; the times."""
    times = digest_of(repr((plan.ticks, plan.time_base)))
    return {
        "source_path": os.path.abspath(plan.path),
        "source_size": media_size(plan.path),
        "source_mtime": int(os.stat(plan.path).st_mtime),
        "source_digest": file_digest(plan.path),
        "frames": len(plan),
        "frame_times": times,
    }


def probe(path: str | os.PathLike[str]) -> VideoInfo:
    """Return the metadata of a video, by the cheapest of the three ways of this module that is right for the file.

    A VideoError says that the file is missing, corrupt, empty or without video.
    """
    if not is_animated_webp(path):
        with open_video(path) as (container, stream):
            if not _is_indexed(path, stream):
                return _scanned(path, container, stream)
            if _begins_in_order(path, container, stream):
                return VideoInfo(
                    path=os.fspath(path),
                    frames=stream.frames,
                    width=stream.codec_context.width,
                    height=stream.codec_context.height,
                    start=stream.start_time,
                    length=stream.duration,
                    time_base=stream.time_base,
                )
    return scan(path)


def scan(path: str | os.PathLike[str]) -> VideoInfo:
    """Return the metadata of a video with the times of all frames, `ticks`; otherwise like `probe`."""
    if is_animated_webp(path):
        return _count(path, "it is an animated WebP")
    with open_video(path) as (container, stream):
        return _scanned(path, container, stream)


def _is_indexed(path: Any, stream: Any) -> bool:
    """Return whether the index and the header of a file list all frames, and none that is not shown."""
    entries, codec = index_of(stream), stream.codec_context.name
    if not entries or not stream.duration or stream.start_time is None or codec in READ_TO_KNOW:
        return False
    smallest, times = SMALLEST_FRAME if codec == "mpeg4" else 1, []
    for entry in entries:
        if entry.is_discard or entry.size < smallest:
            return False
        times.append(entry.timestamp)
    ascending = all(earlier < later for earlier, later in pairwise(times))
    return ascending and stream.duration > times[-1] - times[0] and not has_fragments(path)


def _begins_in_order(path: Any, container: Any, stream: Any) -> bool:
    """Return whether the first packets of a file have trustworthy presentation times; an index has decoding times."""
    codec, packets = stream.codec_context, list[Packet]()
    for packet in demuxed(container, stream):
        if packet.is_corrupt:  # an index that lists more than the file has is an error where that is read
            break
        packets.append(packet_facts(codec.name, packet))
        may_reorder = codec.codec.reorder and codec.has_b_frames
        if not may_reorder or packet.pts is None or packet.pts < (packets[-2:][0].pts or 0) or len(packets) == _PREFIX:
            break
    if not packets or packets[0].pts != stream.start_time:
        return False
    return next(reasons_to_distrust(os.fspath(path), container, stream, packets), None) is None


def _scanned(path: str | os.PathLike[str], container: Any, stream: Any) -> VideoInfo:
    """Return the metadata of a video from its packets, or, if they cannot be trusted, from decoding it."""
    codec = stream.codec_context
    packets = [packet_facts(codec.name, packet) for packet in demuxed(container, stream)]
    if not packets:
        raise VideoError(f"{path}: its video stream has no frames; was the recording interrupted?")
    why = next(reasons_to_distrust(os.fspath(path), container, stream, packets), None)
    if why is not None:
        return _count(path, why)
    shown = sorted((packet.pts or 0, packet.duration) for packet in packets if packet.shown)
    return _timed(path, container, stream, [time for time, _ in shown], shown[-1][1])


def _count(path: str | os.PathLike[str], why: str) -> VideoInfo:
    """Return the metadata of a video from decoding it. A file that has not changed is counted once."""
    return _counted(os.fspath(path), why, file_version(path))


@lru_cache(maxsize=64)
def _counted(path: str, why: str, _version: tuple[int, ...]) -> VideoInfo:
    best_effort, times, last = BestEffort(), list[int | None](), None
    for last in shown_frames(path, threads=0):
        times.append(best_effort(last.pts, last.dts))
    if last is None:
        raise VideoError(f"{path}: none of its frames can be decoded; replace the file")
    if is_animated_webp(path):
        return VideoInfo(
            path=path,
            frames=len(times),
            width=last.width,
            height=last.height,
            start=0,
            length=last.pts + last.duration,
            time_base=Fraction(1, 1000),
            ticks=ascending(times, 1, math.inf),
            distrust=why,
        )
    with open_video(path) as (container, stream):
        ticks = ascending(times, usual_step(stream), longest_gap(container, stream))
        return _timed(path, container, stream, ticks, usual_step(stream), why)


def _timed(
    path: Any, container: Any, stream: Any, ticks: Sequence[int], tail: int, why: str | None = None
) -> VideoInfo:
    """Return the metadata of a video with frames at these times, the last of which is shown for `tail` ticks.

    If the container does not state how long the last frame is shown, it is an average frame.
    """
    if not tail:
        tail = (ticks[-1] - ticks[0]) // (len(ticks) - 1) if len(ticks) > 1 else usual_step(stream)
    codec = stream.codec_context
    info = VideoInfo(
        path=os.fspath(path),
        frames=len(ticks),
        width=codec.width,
        height=codec.height,
        start=ticks[0],
        length=ticks[-1] + max(tail, 1) - ticks[0],
        time_base=stream.time_base,
        ticks=tuple(ticks),
        distrust=why,
    )
    stated = (container.duration or 0) / require_av().time_base
    if info.duration < 0.9 * stated:
        warn_once("%s: its video ends at %.1f s of the %.1f s that the file states", path, info.duration, stated)
    return info
