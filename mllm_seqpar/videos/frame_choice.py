"""Which frames of a video are used: a choice by data, commands and requests, and the plan of frames that follows.

Priority: request or command options, then values in the data, then `DEFAULT_FRAMES`:

    FrameChoice.of(options).over(FrameChoice.of(part)).over(DEFAULT_FRAMES)

docs/guides/data.md states the order for users.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, TypeVar

from mllm_seqpar.errors import ConfigError, VideoError

from .video import FramePlan, VideoInfo, scan

_TIMED = ("fps", "start", "end")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class FrameChoice:
    """Which frames of a video, or of a list of images, are used. A field that is None is not set.

    Attributes:
        fps: frames per second.
        num_frames: number of frames, evenly spaced; not together with `fps`.
        max_frames: the largest number of frames, evenly spaced.
        start, end: seconds after the first frame at which the clip begins, and before which it ends.

    Raises:
        ConfigError: a value that is not allowed, or a contradiction. The text begins with the name of a field.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            number = isinstance(value, Real) and not isinstance(value, bool) and value <= sys.float_info.max
            if name in ("start", "end"):
                valid, allowed = number and value >= 0, "a number of seconds, 0 or more"
            elif name == "fps":
                valid, allowed = number and value > 0, "a number above 0"
            else:
                valid, allowed = number and value > 0 and isinstance(value, Integral), "a whole number above 0"
            if not valid:
                raise ConfigError(f"{name}: {value!r} is not allowed; give {allowed}")
        if self.fps is not None and self.num_frames is not None:
            raise ConfigError(f"fps: {self.fps:g}, but num_frames is {self.num_frames}; give one of them")
        if self.end is not None and self.end <= (self.start or 0):
            raise ConfigError(
                f"end: {self.end:g} is not after the start of the clip, {self.start or 0:g}; give a later time"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FrameChoice:
        """Return the choice in a part of a message or a set of options; other keys are ignored."""
        return cls(**{name: values[name] for name in FRAME_FIELDS if values.get(name) is not None})

    def given(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, default: FrameChoice) -> FrameChoice:
        """Return this choice, with the fields of `default` where it has none.

        `fps` and `num_frames` are mutually exclusive: setting either replaces both. Setting `start` or `end` also
        replaces both. The smaller `max_frames` applies.
        """
        sampling = default if self.fps is None and self.num_frames is None else self
        clip = default if self.start is None and self.end is None else self
        limits = [limit for limit in (self.max_frames, default.max_frames) if limit is not None]
        return FrameChoice(
            fps=sampling.fps,
            num_frames=sampling.num_frames,
            max_frames=min(limits, default=None),
            start=clip.start,
            end=clip.end,
        )

    def without_times(self) -> FrameChoice:
        """Return the fields of this choice that apply to a list of images, which have no times."""
        return FrameChoice(num_frames=self.num_frames, max_frames=self.max_frames)

    def sampled(self, images: Sequence[_T]) -> list[_T]:
        """Return the selected images of a list: all of them, or the middle ones of equal parts of the list.

        Raises:
            ConfigError: the choice states times.
        """
        if timed := [name for name in _TIMED if name in self.given()]:
            raise ConfigError(
                f"{timed[0]} of a list of images, which have no time; give num_frames or max_frames instead"
            )
        count = min(n for n in (self.num_frames, self.max_frames, len(images)) if n is not None)
        return [images[(2 * number + 1) * len(images) // (2 * count)] for number in range(count)]


FRAME_FIELDS = tuple(item.name for item in fields(FrameChoice))

DEFAULT_FRAMES = FrameChoice(fps=1.0)
"""The frames of a video if neither the data nor the caller sets a sampling."""


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
