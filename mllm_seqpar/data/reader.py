"""Decodes exactly the planned frames of a video: seek to the keyframe before, then forward.

The frame of a tick is the one with the greatest presentation time not after it. That is a property of the file, not
of the way there, so any rank that reads any part of a plan gets the same pixels as one that reads it all. Seeking
cannot be trusted to land where it should (mp4 seeks by decoding time, which B-frames run ahead of; MPEG-TS lands on
any packet), so a landing counts only when its keyframe is not after the wanted tick; otherwise we go further back, at
last to the start. Frames that a decoder emits before that keyframe (leading pictures of an open GOP) are dropped:
their references are missing.
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

_FORWARD_SECONDS = 2  # without an index: a jump shorter than this (or than the longest GOP seen) is decoded through


def read_frames(
    plan: FramePlan,
    start: int = 0,
    stop: int | None = None,
    *,
    size: tuple[int, int] | None = None,
    batch: int = 16,
    threads: int = 1,
) -> Iterator[Tensor]:
    """Decodes entries start <= i < stop of a plan and nothing else that can be skipped.

    Args:
        plan: from `plan_frames`.
        start, stop: the range of entries; `stop` None means to the end.
        size: (height, width) to scale to (bicubic); None keeps the video's own.
        batch: frames per tensor: it bounds the memory held.
        threads: decoder threads.

    Yields:
        uint8 tensors (up to `batch`, 3, H, W), RGB, in the plan's order.

    Raises:
        VideoError: a frame cannot be decoded, with its number and time.
    """
    stop = len(plan) if stop is None else stop
    check_range(start, stop, len(plan), batch)
    if start == stop:
        return
    with ExitStack() as resources:
        cursor = _Cursor(plan, threads, resources)
        picture = _Picture(size, cursor.stream.codec_context)
        images: list[Tensor] = []
        for number in range(start, stop):
            images.append(picture.tensor(*cursor.frame(number)))
            if len(images) == batch or number == stop - 1:
                yield torch.stack(images)
                images = []


def check_range(start: int, stop: int, total: int, batch: int) -> None:
    """Refuses a range outside [0, total] and an empty batch."""
    if not 0 <= start <= stop <= total:
        raise ConfigError(f"frames {start} to {stop} asked of a source that has {total}")
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")


class _Picture:
    """Turns decoded frames into RGB tensors of one size, upright."""

    def __init__(self, size: tuple[int, int] | None, codec: Any) -> None:
        self._reformatter = require_av().video.reformatter.VideoReformatter()
        self._size = size
        self._own = (codec.height, codec.width)  # also of frames after a change of resolution
        self._last: tuple[int, Tensor] | None = None

    def tensor(self, pts: int, frame: Any) -> Tensor:
        if self._last is not None and self._last[0] == pts:  # one frame shown at several planned times
            return self._last[1]
        turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise quarters, as phones record them
        height, width = self._size or self._own
        if self._size and turns % 2:
            height, width = width, height
        rgb = self._reformatter.reformat(
            frame, width=width, height=height, format="rgb24", interpolation="BICUBIC"
        ).to_ndarray()
        image = torch.from_numpy(rgb).permute(2, 0, 1)
        image = torch.rot90(image, turns, (1, 2)) if turns else image
        self._last = (pts, image)
        return image


class _Cursor:
    """A place in a video that moves to the frame of each wanted tick with as little decoding as it can."""

    stream: Any
    _here: tuple[int, Any] | None  # the frame shown now, and the one after it once it has been decoded
    _ahead: tuple[int, Any] | None
    _frames: Iterator[tuple[int, Any]]
    _ended: bool
    _from_start: bool

    def __init__(self, plan: FramePlan, threads: int, resources: ExitStack) -> None:
        self._plan, self._threads, self._resources = plan, threads, resources
        self._errors = require_av().error.FFmpegError
        self._longest_gop = round(_FORWARD_SECONDS / plan.time_base)
        self._delay = 0  # greatest presentation minus decoding time of a keyframe: how far an index runs ahead
        self._newest_key: int | None = None
        self._reopen()
        index = index_of(self.stream)
        self._keys = sorted(entry.timestamp for entry in index if entry.is_keyframe)
        self._end = max((entry.timestamp for entry in index), default=None)

    def frame(self, number: int) -> tuple[int, Any]:
        """(presentation time, frame) of entry `number` of the plan."""
        tick = self._plan.ticks[number]
        try:
            if self._worth_a_seek(tick):
                self._seek(tick)
            self._advance(tick)
            if not self._from_start and (self._here is None or self._here[0] > tick):
                self._reopen()  # the decoder gave nothing for the keyframe that we landed on
                self._advance(tick)
        except self._errors as error:
            raise self._broken(number, reason(error)) from error
        except _Damaged as error:
            raise self._broken(number, str(error)) from error
        if self._here is None:
            raise self._broken(number, "the file ends before its first decodable frame")
        if self._ended and self._end is not None and self._seen < self._end:
            raise self._broken(number, f"the file ends at {self._seconds(self._seen):.3f} s, its index goes on")
        return self._here

    def _advance(self, tick: int) -> None:
        while not self._ended:
            if self._ahead is None:
                self._ahead = next(self._frames, None)
                if self._ahead is None:
                    self._ended = True
                    return
            if self._here is not None and self._ahead[0] > tick:
                return
            self._here, self._ahead = self._ahead, None

    def _worth_a_seek(self, tick: int) -> bool:
        position = self._plan.start if self._here is None else self._here[0]
        if tick <= position:  # ticks ascend, so only before the first frame
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
                break  # a file that cannot seek is read from its start
            if self._land(from_start=False) and self._key <= tick:
                return
            back = 4 * back or max(self._delay, round(1 / self._plan.time_base))
        self._reopen()

    def _reopen(self) -> None:
        self._resources.close()
        self._container, self.stream = self._resources.enter_context(open_video(self._plan.path))
        if self._threads > 1:
            self.stream.thread_type = "AUTO"
        self.stream.codec_context.thread_count = self._threads
        self._land(from_start=True)

    def _land(self, from_start: bool) -> bool:
        """Finds the keyframe at or after the place in the file and gets ready to decode from it."""
        self._here = self._ahead = None
        self._ended, self._from_start = False, from_start
        packets = self._container.demux(self.stream)
        for packet in packets:
            if packet.is_keyframe and packet.size:
                self._key = self._seen = _time(packet)
                self._newest_key = None
                self._note(packet)
                self._frames = self._decode(chain([packet], packets), self._key)
                return True
        self._key, self._seen, self._frames = self._plan.start, self._plan.start, iter(())
        return False

    def _decode(self, packets: Iterator[Any], key: int) -> Iterator[tuple[int, Any]]:
        for packet in packets:
            if packet.size:
                self._note(packet)
            for frame in packet.decode():
                pts = frame.pts if frame.pts is not None else frame.dts
                if pts is None or pts < key:
                    continue
                if frame.is_corrupt:
                    raise _Damaged(f"the picture at {self._seconds(pts):.3f} s is damaged")
                yield pts, frame

    def _note(self, packet: Any) -> None:
        time = _time(packet)
        self._seen = max(self._seen, time)
        if packet.is_keyframe:
            if packet.dts is not None:
                self._delay = max(self._delay, time - packet.dts)
            if self._newest_key is not None:
                self._longest_gop = max(self._longest_gop, time - self._newest_key)
            self._newest_key = time

    def _seconds(self, tick: int) -> float:
        return float((tick - self._plan.start) * self._plan.time_base)

    def _broken(self, number: int, why: str) -> VideoError:
        return VideoError(
            f"{self._plan.path}: frame {number} of {len(self._plan)} planned (at {self._plan.seconds(number):.3f} s) "
            f"cannot be decoded: {why}; replace the file, or re-encode what is left of it"
        )


class _Damaged(Exception):
    """A picture that the decoder itself reports as broken."""


def _time(packet: Any) -> int:
    time = packet.pts if packet.pts is not None else packet.dts
    if time is None:
        raise _Damaged("a keyframe without presentation time")
    return time
