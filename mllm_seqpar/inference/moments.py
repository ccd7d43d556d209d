"""Moments of a video, and their text in answers and on pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Neighbouring frames that an answer attends to.

    Attributes:
        share: the sum of the shares of its frames, between 0 and 1.
        first, last, peak: numbers of the first and last frame, and of the one with the largest share.
        start, end: seconds in the video; None for frames without times.
        medium: the number of the video among the media of the conversation.
    """

    share: float
    first: int
    last: int
    peak: int
    start: float | None = None
    end: float | None = None
    medium: int = 0

    @property
    def span(self) -> str:
        """The times, or the frames if there are no times."""
        if self.start is not None and self.end is not None:
            return f"{clock(self.start)} to {clock(self.end)}"
        return f"frame {self.first}" if self.first == self.last else f"frames {self.first} to {self.last}"

    def __str__(self) -> str:
        frames = f"frame {self.first}" if self.first == self.last else f"frames {self.first} to {self.last}"
        where = "" if self.start is None else f"  {frames}"
        medium = f"  in video {self.medium + 1}" if self.medium else ""
        return f"{self.share:6.1%}  {self.span}{where}{medium}"


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, 1:02.5, or hours, minutes and seconds, 1:00:02.5."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    text = f"{minutes % 60 if minutes >= 60 else minutes:d}:{rest / 10:04.1f}"
    return f"{minutes // 60}:{text.zfill(7)}" if minutes >= 60 else text
