"""Which frames of a video are used: one class for data, commands and requests, and the order in which they apply.

Priority: request or command options, then values in the data, then `DEFAULT_FRAMES`:

    FrameChoice.of(options).over(FrameChoice.of(part)).over(DEFAULT_FRAMES)

docs/guides/data.md states the order for users.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from mllm_seqpar.errors import ConfigError

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
