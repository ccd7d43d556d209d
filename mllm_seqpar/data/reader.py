"""Decode exactly the planned frames of a video: seek to a keyframe before the frame, then decode forward.

The frame of a tick is the one with the greatest presentation time not after it. This depends on the file only, so a
rank that reads a part of a plan gets the same pixels as a rank that reads all of it. A seek may land after its target
(mp4 seeks by decoding time, which B-frames run ahead of; MPEG-TS lands on any packet). A seek is therefore accepted
only if the keyframe it finds is not after the wanted tick. Otherwise the target moves further back, finally to the
start of the file. Frames that the decoder emits before that keyframe (leading pictures of an open GOP) are dropped
because their reference frames are missing.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, VideoError

from .video import FramePlan, index_of, open_video, reason, require_av

_FORWARD_SECONDS = 2
"""Without an index, a jump shorter than this, or than the longest GOP so far, is decoded instead of sought."""


def read_frames(
    plan: FramePlan,
    start: int = 0,
    stop: int | None = None,
    *,
    size: tuple[int, int] | None = None,
    batch: int = 16,
    threads: int = 1,
) -> Iterator[Tensor]:
    """Decode entries start <= i < stop of a plan, and skip as much of the file as possible.

    Args:
        plan: from `plan_frames`.
        start, stop: the range of entries; `stop=None` is the end of the plan.
        size: (height, width) to scale to (bicubic); None keeps the video's size.
        batch: frames per tensor, which bounds the memory used.

    Yields:
        uint8 tensors (up to `batch`, 3, H, W), RGB, in the plan's order.

    Raises:
        ConfigError: a range outside the plan, or `batch` below 1.
        VideoError: a frame cannot be decoded; names its number and time.
    """
    stop = len(plan) if stop is None else stop
    check_range(start, stop, len(plan), batch)
    if start == stop:
        return
    with ExitStack() as resources:
        cursor = _Cursor(plan, threads, resources)
        converter = _Converter(size, cursor.stream.codec_context)
        images: list[Tensor] = []
        for number in range(start, stop):
            images.append(converter.tensor(*cursor.frame(number)))
            if len(images) == batch or number == stop - 1:
                yield torch.stack(images)
                images = []


def check_range(start: int, stop: int, total: int, batch: int) -> None:
    if not 0 <= start <= stop <= total:
        raise ConfigError(
            f"frames {start} to {stop} requested from a source that has {total}; pass a range within them"
        )
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")


class _Converter:
    """Converts decoded frames to upright RGB tensors of one size."""

    def __init__(self, size: tuple[int, int] | None, codec: Any) -> None:
        self._reformatter = require_av().video.reformatter.VideoReformatter()
        self._size = size
        self._coded_size = (codec.height, codec.width)  # applies to frames after a change of resolution too
        self._last: tuple[int, Tensor] | None = None

    def tensor(self, pts: int, frame: Any) -> Tensor:
        if self._last is not None and self._last[0] == pts:  # one frame at several planned ticks
            return self._last[1]
        turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise quarter turns, set by phones
        height, width = self._size or self._coded_size
        if self._size and turns % 2:
            height, width = width, height
        rgb = self._reformatter.reformat(frame, width, height, "rgb24", interpolation="BICUBIC").to_ndarray()
        image = torch.from_numpy(rgb).permute(2, 0, 1)
        self._last = pts, torch.rot90(image, turns, (1, 2)) if turns else image
        return self._last[1]


class _Cursor:
    """A position in a video that moves forward to the frame of each wanted tick with as little decoding as possible."""

    stream: Any
    _current: tuple[int, Any] | None  # (presentation time, frame) at the position
    _next: tuple[int, Any] | None  # the frame after it, if it has been decoded
    _frames: Iterator[tuple[int, Any]]
    _ended: bool
    _from_start: bool

    def __init__(self, plan: FramePlan, threads: int, resources: ExitStack) -> None:
        self._plan, self._threads, self._resources = plan, threads, resources
        self._errors = require_av().error.FFmpegError
        self._longest_gop = round(_FORWARD_SECONDS / plan.time_base)
        self._delay = 0  # the greatest difference of presentation and decoding time of a keyframe so far
        self._newest_key: int | None = None
        self._reopen()
        index = index_of(self.stream)
        self._keys = sorted(entry.timestamp for entry in index if entry.is_keyframe)
        self._end = max((entry.timestamp for entry in index), default=None)

    def frame(self, number: int) -> tuple[int, Any]:
        """Return (presentation time, frame) of entry `number` of the plan."""
        tick = self._plan.ticks[number]
        try:
            if self._should_seek(tick):
                self._seek(tick)
            self._advance(tick)
            if not self._from_start and (self._current is None or self._current[0] > tick):
                self._reopen()  # the decoder returned no frame for the keyframe that the seek found
                self._advance(tick)
        except (self._errors, _Damaged) as error:
            raise self._undecodable(number, reason(error)) from error
        if self._current is None:
            raise self._undecodable(number, "the file ends before its first decodable frame")
        if self._ended and self._end is not None and self._latest < self._end:
            seconds = self._plan.time(self._latest)
            raise self._undecodable(number, f"the file ends at {seconds:.3f} s, its index does not")
        return self._current

    def _advance(self, tick: int) -> None:
        while not self._ended:
            self._next = self._next or next(self._frames, None)
            self._ended = self._next is None
            if self._next is None or (self._current is not None and self._next[0] > tick):
                return
            self._current, self._next = self._next, None

    def _should_seek(self, tick: int) -> bool:
        position = self._plan.start if self._current is None else self._current[0]
        if tick <= position:  # only before the first frame, since ticks ascend
            return False
        if self._keys:
            key = bisect_right(self._keys, tick - self._delay)
            return key > 0 and self._keys[key - 1] > position
        return tick - position > self._longest_gop

    def _seek(self, tick: int) -> None:
        back = 0
        while tick - back > self._plan.start:
            try:
                self._container.seek(tick - back, stream=self.stream, backward=True)
            except self._errors:
                break  # A file that cannot seek is read from its start.
            if self._find_keyframe(from_start=False) and self._key <= tick:
                return
            back = 4 * back or max(self._delay, round(1 / self._plan.time_base))
        self._reopen()

    def _reopen(self) -> None:
        self._resources.close()
        self._container, self.stream = self._resources.enter_context(open_video(self._plan.path))
        if self._threads > 1:
            self.stream.thread_type = "AUTO"
        self.stream.codec_context.thread_count = self._threads
        self._find_keyframe(from_start=True)

    def _find_keyframe(self, from_start: bool) -> bool:
        """Find the first keyframe at or after the file position and prepare to decode from it."""
        self._current = self._next = None
        self._ended, self._from_start = False, from_start
        packets = self._container.demux(self.stream)
        for packet in packets:
            if packet.is_keyframe and packet.size:
                self._key = self._latest = _time(packet)
                self._newest_key = None
                self._record(packet)
                self._frames = self._decode(chain([packet], packets), self._key)
                return True
        self._key, self._latest, self._frames = self._plan.start, self._plan.start, iter(())
        return False

    def _decode(self, packets: Iterator[Any], key: int) -> Iterator[tuple[int, Any]]:
        for packet in packets:
            if packet.size:
                self._record(packet)
            for frame in packet.decode():
                pts = frame.pts if frame.pts is not None else frame.dts
                if pts is not None and pts >= key:
                    if frame.is_corrupt:
                        raise _Damaged(f"the picture at {self._plan.time(pts):.3f} s is damaged")
                    yield pts, frame

    def _record(self, packet: Any) -> None:
        time = _time(packet)
        self._latest = max(self._latest, time)
        if packet.is_keyframe:
            if packet.dts is not None:
                self._delay = max(self._delay, time - packet.dts)
            if self._newest_key is not None:
                self._longest_gop = max(self._longest_gop, time - self._newest_key)
            self._newest_key = time

    def _undecodable(self, number: int, why: str) -> VideoError:
        return VideoError(
            f"{self._plan.path}: frame {number} of {len(self._plan)} planned (at {self._plan.seconds(number):.3f} s) "
            f"cannot be decoded: {why}; replace the file, or re-encode its readable part"
        )


class _Damaged(Exception):
    """The decoder reports a damaged picture."""


def _time(packet: Any) -> int:
    time = packet.pts if packet.pts is not None else packet.dts
    if time is None:
        raise _Damaged("a keyframe without presentation time")
    return time
