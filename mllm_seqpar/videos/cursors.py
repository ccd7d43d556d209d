"""Positions in a video, which move forward to the frame of each entry of a plan.

`TimeCursor` finds frames by the times of packets: it seeks to a keyframe before the frame, then decodes forward. If the
plan has the numbers of the frames (`FramePlan.numbers`), the times of packets cannot be trusted, and `NumberCursor`
decodes the file from its start and counts. The rest of this text is about `TimeCursor`.

The frame of a tick is the one with the greatest presentation time not after it. This depends on the file only, so a
rank that reads a part of a plan gets the same pixels as a rank that reads all of it. A seek may land after its target
(mp4 seeks by decoding time, which B-frames run ahead of; MPEG-TS lands on any packet). A seek is therefore accepted
only if the keyframe it finds is not after the wanted tick. Otherwise the target moves further back, in the end to the
start of the file. Frames that the decoder emits before that keyframe (leading pictures of an open GOP) are dropped
because their reference frames are missing. If the decoder does not begin with a frame of that keyframe which refers to
no other (an intra refresh, or a container that calls every frame a keyframe), the file is read without seeking.

Packets are read before they are decoded, so it is known which frames are wanted. A frame that no other frame refers to
is decoded only if it is wanted, and nothing is decoded after a wanted frame if a seek leads to the next one.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf
from typing import Any

from mllm_seqpar.errors import PASSED, VideoError

from .container import index_of, open_video
from .images import image_size, is_animated_webp
from .shown_frames import shown_frames
from .video import FramePlan

_FORWARD_SECONDS = 2
"""Without an index, a jump shorter than this, or than the longest GOP so far, decodes the frames in between instead of
seeking."""

_MOST_AHEAD = 64
"""Packets read to find the frame that is shown next; no codec orders frames over as many."""

_P, _B = 2, 3
"""FFmpeg's numbers of the types of pictures that refer to others."""


@dataclass
class Index:
    """The contents of the container's index, which the cursors of a file share; empty without an index.

    Attributes:
        keys: the decoding times of the keyframes, ascending.
        end: the decoding time of the last frame.
        delay: the presentation time of the first keyframe minus its decoding time.
        seekable: False after a decoder that was given a keyframe did not begin with it.
    """

    keys: Sequence[int] = ()
    end: int | None = None
    delay: int = 0
    seekable: bool = True

    @classmethod
    def of(cls, stream: Any, delay: int) -> "Index":
        times = [(entry.timestamp, entry.is_keyframe) for entry in index_of(stream)]
        return cls(sorted(time for time, key in times if key), max((time for time, _ in times), default=None), delay)


class NumberCursor:
    """A position in a video whose frames are counted from its start."""

    threads: int  # of the decoder, set before the first frame

    def __init__(self, plan: FramePlan, resources: ExitStack) -> None:
        self._plan, self._resources = plan, resources
        self.index = Index()
        if is_animated_webp(plan.path):
            self.coded_size = image_size(plan.path)
        else:
            with open_video(plan.path) as (_, stream):
                self.coded_size = stream.codec_context.height, stream.codec_context.width
        self._frames: Iterator[Any] = iter(())
        self._number = inf  # of the frame at the position
        self._current: Any = None

    def frame(self, entry: int, following: int | None) -> tuple[int, Any]:
        """Return (number, frame) of an entry of the plan."""
        number = (self._plan.numbers or ())[entry]
        if number < self._number:
            frames = shown_frames(self._plan.path, self.threads)
            self._frames = self._resources.enter_context(closing(frames))
            self._number = -1
        while self._number < number:
            self._current = next(self._frames, None)
            self._number += 1
            if self._current is None:
                self._number = inf
                raise _Damaged("the file has fewer frames than when they were counted")
        if self._current.is_corrupt:
            raise _Damaged("the image is damaged")
        return number, self._current


class TimeCursor:
    """A position in a video that moves forward to the frame of each wanted tick with as little decoding as possible.

    Packets are read before they are decoded, until the time at which each frame gives way to the next one is known.
    """

    stream: Any
    index: Index
    coded_size: tuple[int, int]  # (height, width)
    threads: int  # of the decoder, set before the first frame
    _packets: Iterator[Any]  # of the file, from its position on
    _horizon: float  # packets that have not been read have at least this presentation time
    _times: list[int]  # the presentation times of the packets since the keyframe, ascending
    _frames: Iterator[tuple[int, Any]]
    _current: tuple[int, Any] | None  # (presentation time, frame) at the position
    _next: tuple[int, Any] | None  # the frame after it, if it has been decoded
    _ended: bool
    _drained: bool
    _from_start: bool

    def __init__(self, plan: FramePlan, resources: ExitStack, index: Index | None = None) -> None:
        self._plan = plan
        self._resources = resources.enter_context(ExitStack())  # of the file, which `_reopen` closes
        self._queue: deque[Any] = deque()  # packets that have been read and not decoded
        self._skips = True  # frames that are neither wanted nor referred to
        self._last: int | None = None  # the tick after whose frame nothing needs to be decoded before the next seek
        self._longest_gop = round(_FORWARD_SECONDS / plan.time_base)
        self._delay = 0  # the greatest difference of presentation and decoding time of a keyframe so far
        self._newest_key: int | None = None
        self._reopen()
        self.coded_size = self.stream.codec_context.height, self.stream.codec_context.width
        self.index = index or Index.of(self.stream, self._delay)

    def frame(self, entry: int, following: int | None) -> tuple[int, Any]:
        """Return (presentation time, frame) of an entry of the plan, after which `following` is asked for."""
        tick = self._plan.ticks[entry]
        if self._should_seek(tick):
            self._seek(tick)
        self._last = tick if following is None or self._is_jump(tick, self._plan.ticks[following]) else None
        self._advance(tick)
        if not self._from_start and (self._current is None or self._current[0] > tick):
            self.index.seekable = False
            self._reopen()  # the decoder returned no frame for the keyframe that the seek found
            self._advance(tick)
        if self._skips and not self._is_shown_at(tick):
            self._skips = False
            self._seek(tick)
            self._advance(tick)
        ended = self._following(self._current[0]) == inf if self._skips and self._current else self._ended
        if self._current is None:
            raise _Damaged("the file ends before its first decodable frame")
        if ended and self.index.end is not None and self._latest < self.index.end:
            seconds = self._plan.time(self._latest)
            raise _Damaged(f"the file ends at {seconds:.3f} s, before the end of its index")
        del self._times[: bisect_left(self._times, self._current[0])]
        return self._current

    def first_after_seek(self, tick: int) -> Any:
        """Return the frame of the keyframe before a tick; None if decoding cannot begin there."""
        self.threads, self._skips = 1, False
        self._seek(tick)
        first = next(self._frames, None)
        return None if first is None else first[1]

    def _advance(self, tick: int) -> None:
        while not self._ended and not (self._skips and self._is_shown_at(tick)):
            self._next = self._next or next(self._frames, None)
            self._ended = self._next is None
            if self._next is None or (self._current is not None and self._next[0] > tick):
                return
            self._current, self._next = self._next, None

    def _is_shown_at(self, tick: int) -> bool:
        """Return whether the current frame is shown at a tick that is not before the position."""
        return self._current is not None and tick < self._following(self._current[0])

    def _is_wanted(self, time: int) -> bool:
        """Return whether the frame of this time is shown at a planned tick."""
        ticks = self._plan.ticks
        tick = bisect_left(ticks, time)
        return tick < len(ticks) and ticks[tick] < self._following(time)

    def _following(self, time: int) -> float:
        """Return the time of the first frame after a time; infinity after the last frame of the file."""
        while True:
            found = bisect_right(self._times, time)
            known = found < len(self._times)
            if len(self._queue) > _MOST_AHEAD or (known and self._times[found] <= self._horizon) or not self._read():
                return self._times[found] if known else inf

    def _should_seek(self, tick: int) -> bool:
        if not self.index.seekable:
            return self._drained
        position = self._plan.start if self._current is None else self._current[0]
        if tick <= position or (self._skips and self._is_shown_at(tick)):
            return False
        return self._drained or self._is_jump(position, tick)

    def _is_jump(self, position: int, tick: int) -> bool:
        """Return whether less is decoded if a seek leads from a time to a later one."""
        if not self.index.seekable:
            return False
        if self.index.keys:
            key = bisect_right(self.index.keys, tick - self._delay)
            return key > 0 and self.index.keys[key - 1] > position
        return tick - position > self._longest_gop

    def _seek(self, tick: int) -> None:
        back = 0
        while self.index.seekable and tick - back > self._plan.start:
            try:
                self._container.seek(tick - back, stream=self.stream, backward=True)
            except PASSED:
                raise
            except Exception:  # noqa: BLE001 - a file that cannot seek is read from its start
                break
            if self._find_keyframe(from_start=False) and self._key <= tick:
                self._longest_gop = max(self._longest_gop, tick - self._key)
                return
            back = 4 * back or max(self._delay, round(1 / self._plan.time_base))
        self._reopen()

    def _reopen(self) -> None:
        self._resources.close()
        self._container, self.stream = self._resources.enter_context(open_video(self._plan.path))
        self._find_keyframe(from_start=True)

    def _find_keyframe(self, from_start: bool) -> bool:
        """Find the first keyframe at or after the file position and prepare to decode from it."""
        self._current = self._next = self._newest_key = None
        self._ended, self._drained, self._from_start = False, False, from_start
        self._times, self._horizon = [], -inf
        self._queue.clear()
        self._packets = self._container.demux(self.stream)
        for packet in self._packets:
            if packet.is_keyframe and packet.size:
                self._key = self._latest = _time(packet)
                self._begins_with_key = from_start or packet.is_discard  # otherwise, the decoder has yet to show it
                self._frames = self._decode()
                self._record(packet)
                return True
        self._key, self._latest, self._frames = self._plan.start, self._plan.start, iter(())
        return False

    def _decode(self) -> Iterator[tuple[int, Any]]:
        """Yield (presentation time, frame) of the frames from the keyframe on, in the order in which they are shown."""
        codec = self.stream.codec_context
        if not codec.is_open:
            if self.threads > 1:
                codec.thread_type = "AUTO"
            codec.thread_count = self.threads
            codec.open()  # before `skip_frame` is set, which dav1d reads only here
        latest = self._key - 1
        while self._queue or self._read():
            packet = self._queue.popleft()
            hidden = packet.is_discard
            skip = self._skips and packet.size and (hidden or not self._is_wanted(packet.pts))
            codec.skip_frame = "NONREF" if skip else "DEFAULT"
            frames = packet.decode()
            if self._skips and packet.size and self._last is not None and not hidden:
                self._drained = packet.pts <= self._last < self._following(packet.pts)
            if self._drained:
                frames += codec.decode(None)
            for frame in frames:
                pts = frame.pts if frame.pts is not None else frame.dts
                if pts is None or pts < self._key:
                    continue
                if not self._begins_with_key:
                    refers = not frame.key_frame and int(frame.pict_type) in (_P, _B)
                    self.index.seekable = self._begins_with_key = pts == self._key and not refers
                    if not self.index.seekable:
                        return
                if pts <= latest:
                    raise _Damaged(f"the frame at {self._plan.time(latest):.3f} s is followed by an earlier one")
                latest = pts
                if frame.is_corrupt:
                    raise _Damaged(f"the image at {self._plan.time(pts):.3f} s is damaged")
                yield pts, frame
            if self._drained:
                return

    def _read(self) -> bool:
        """Read one more packet, before it is decoded; return False at the end of the file."""
        packet = next(self._packets, None)
        if packet is None:
            self._horizon = inf
            return False
        self._record(packet)
        return True

    def _record(self, packet: Any) -> None:
        self._queue.append(packet)
        if not packet.size:
            return
        time = _time(packet)
        self._latest = max(self._latest, time)
        if packet.pts is None:
            self._skips = False  # it is not known when its frame is shown
        elif packet.pts >= self._key and not packet.is_discard:
            insort(self._times, packet.pts)
        if packet.dts is not None:
            self._horizon = packet.dts
        if packet.is_keyframe:
            if packet.dts is not None:
                self._delay = max(self._delay, time - packet.dts)
            if self._newest_key is not None:
                self._longest_gop = max(self._longest_gop, time - self._newest_key)
            self._newest_key = time


Cursor = TimeCursor | NumberCursor


def open_cursor(plan: FramePlan, resources: ExitStack, index: Index | None = None) -> Cursor:
    """Return a position in a video, which `resources` closes; `index` is that of other cursors of the file."""
    return TimeCursor(plan, resources, index) if plan.numbers is None else NumberCursor(plan, resources)


class _Damaged(Exception):
    """A frame of the plan cannot be decoded."""


def undecodable(plan: FramePlan, number: int, why: str) -> VideoError:
    return VideoError(
        f"{plan.path}: frame {number} of {len(plan)} planned (at {plan.seconds(number):.3f} s) cannot be decoded: "
        f"{why}; replace the file"
    )


def _time(packet: Any) -> int:
    time = packet.pts if packet.pts is not None else packet.dts
    if time is None:
        raise _Damaged("a keyframe without presentation time")
    return time
