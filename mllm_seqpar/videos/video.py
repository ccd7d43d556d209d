"""Video metadata, and the plan of the frames to read.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from mllm_seqpar.digests import digest_of, file_digest
from mllm_seqpar.errors import ConfigError, VideoError

from .container import demuxed, has_fragments, index_of, open_video, require_av, warn_once
from .frame_choice import FrameChoice
from .images import is_animated_webp
from .media_files import media_size
from .shown_frames import (
    READ_TO_KNOW,
    SMALLEST_FRAME,
    BestEffort,
    Packet,
    ascending,
    longest_gap,
    packet_facts,
    reasons_to_distrust,
    shown_frames,
    usual_step,
)

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
    return _facts_of(path, by_index=True)


def scan(path: str | os.PathLike[str]) -> VideoInfo:
    """Return the metadata of a video with the times of all frames, `ticks`; otherwise like `probe`."""
    return _facts_of(path, by_index=False)


def _facts_of(path: str | os.PathLike[str], *, by_index: bool) -> VideoInfo:
    if is_animated_webp(path):
        return _count(path, "it is an animated WebP")
    with open_video(path) as (container, stream):
        codec = stream.codec_context
        if by_index and _is_indexed(path, stream):
            if _begins_in_order(path, container, stream):
                return VideoInfo(
                    path=os.fspath(path),
                    frames=stream.frames,
                    width=codec.width,
                    height=codec.height,
                    start=stream.start_time,
                    length=stream.duration,
                    time_base=stream.time_base,
                )
            return scan(path)
        packets = [packet_facts(codec.name, packet) for packet in demuxed(container, stream)]
        if not packets:
            raise VideoError(f"{path}: its video stream has no frames; was the recording interrupted?")
        why = next(reasons_to_distrust(os.fspath(path), container, stream, packets), None)
        if why is None:
            shown = sorted((packet.pts or 0, packet.duration) for packet in packets if packet.shown)
            return _scanned(path, container, stream, [time for time, _ in shown], shown[-1][1])
    return _count(path, why)


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


def _count(path: str | os.PathLike[str], why: str) -> VideoInfo:
    """Return the metadata of a video from decoding it. A file that has not changed is counted once."""
    facts = os.stat(path)
    return _counted(os.fspath(path), why, (facts.st_mtime_ns, facts.st_size, facts.st_ino))


@lru_cache(maxsize=64)
def _counted(path: str, why: str, _version: tuple[int, ...]) -> VideoInfo:
    if is_animated_webp(path):
        frames = list(shown_frames(path, threads=1))
        last = frames[-1]
        ticks = tuple(frame.pts for frame in frames)
        return VideoInfo(
            path=path,
            frames=len(ticks),
            width=last.width,
            height=last.height,
            start=0,
            length=last.pts + last.duration,
            time_base=Fraction(1, 1000),
            ticks=ticks,
            distrust=why,
        )
    best_effort, times = BestEffort(), list[int | None]()
    for frame in shown_frames(path, threads=0):
        times.append(best_effort(frame.pts, frame.dts))
    if not times:
        raise VideoError(f"{path}: none of its frames can be decoded; replace the file")
    with open_video(path) as (container, stream):
        ticks = ascending(times, usual_step(stream), longest_gap(container, stream))
        return _scanned(path, container, stream, ticks, usual_step(stream), why)


def _scanned(
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


def plan_frames(
    info: VideoInfo,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int | None = None,
    start: float | None = None,
    end: float | None = None,
) -> FramePlan:
    """Choose frames of a video or of a clip of it: `fps` per second, `num_frames` evenly spaced, or all of them.

    Args:
        fps: take frames at 0, 1/fps, 2/fps, ... seconds; every frame once if the video's rate is not higher.
        num_frames: take the frames in the middle of this many equal parts; every frame once if there are not more.
        max_frames: if `fps` (or all frames) gives more than this, take this many as by `num_frames`.
        start, end: seconds after the first frame at which the clip begins, and before which it ends; None: those of
            the video, which is not extended by an `end` after its own. Times of the plan remain those of the video.

    Raises:
        ConfigError: see `FrameChoice`.
        VideoError: the clip begins after the end of the video.
    """
    FrameChoice(fps=fps, num_frames=num_frames, max_frames=max_frames, start=start, end=end)  # checks them
    first, length = _clip(info, start, end)
    native = Fraction(info.frames) / (info.length * info.time_base)
    if fps is not None and fps < native:
        # Below half a millionth, the short fraction would be 0.
        rate = Fraction(fps).limit_denominator(1_000_000) or Fraction(fps)
        step = 1 / (rate * info.time_base)  # ticks between planned frames
        count = -(-length // step)  # ceil: all k with k * step < length
        if max_frames is None or count <= max_frames:
            # In a clip that ends before the video, rounding must not reach the frame at the end.
            last = math.ceil(first + length) - 1 if first + length < info.start + info.length else math.inf
            return info.plan(int(min(round(first + k * step), last)) for k in range(int(count)))
    frames = info.frames if length == info.length else math.ceil(native * length * info.time_base)
    limit = min(n for n in (num_frames, max_frames, math.inf) if n is not None)
    if limit >= frames:
        ticks = (info if info.ticks is not None else scan(info.path)).ticks or ()
        if length == info.length:
            return info.plan(ticks)
        ticks = tuple(tick for tick in ticks if first <= tick < first + length) or (int(first),)
        if len(ticks) <= limit:  # not if the clip has more frames a second than the video has on average
            return info.plan(ticks)
    step = length / Fraction(limit)
    return info.plan(int(first + (i + Fraction(1, 2)) * step) for i in range(int(limit)))


def _clip(info: VideoInfo, start: float | None, end: float | None) -> tuple[Fraction, Fraction]:
    """Return the first tick and the number of ticks of the clip from `start` to `end` seconds; see `plan_frames`."""
    begin = Fraction(start or 0).limit_denominator(1_000_000) / info.time_base
    if begin >= info.length:
        raise VideoError(f"{info.path}: the clip starts at {start:g} s, but the video has {info.duration:.3f} s")
    stop = info.length if end is None else Fraction(end).limit_denominator(1_000_000) / info.time_base
    return info.start + begin, min(Fraction(info.length), Fraction(stop)) - begin


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
