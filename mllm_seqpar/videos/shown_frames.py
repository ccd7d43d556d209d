"""The frames that a decoder shows if it reads a file from its start, in its order, and their times."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from mllm_seqpar.errors import reason

from .container import demuxed, open_video, require_av, warn_once
from .images import animation_frames, is_animated_webp

_BACK = 8
"""Frames by which times may run back within one recording; times that run back further begin again."""

_LONGEST_GAP = 10
"""Seconds between frames of a broadcast format, above which FFmpeg's programs assume that its clock was set."""

_TS_DISCONT = 0x0200
"""FFmpeg's flag of formats whose clock may be set to another time: transport and program streams, Ogg."""


def shown_frames(path: str, threads: int) -> Generator[Any, None, None]:
    """Yield the frames of a video that a decoder shows, from its start, in its order.

    Packets that cannot be decoded are skipped, as by FFmpeg's programs. Which frames a decoder with several threads
    returns beside an error depends on their number, so one thread decodes such a file again.

    Args:
        path: of the file.
        threads: of the decoder; 0 leaves the number to FFmpeg.
    """
    if is_animated_webp(path):
        for start, duration, image in animation_frames(path):
            frame = require_av().VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.duration = start, duration
            yield frame
        return
    done, errors = 0, list[Exception]()
    if threads != 1:
        with suppress(_Incomplete):
            for frame in decoded(path, threads, errors):
                yield frame
                done += 1
            return
    yield from islice(decoded(path, 1, errors), done, None)
    if errors:
        warn_once("%s: %d of its packets cannot be decoded (%s)", path, len(errors), reason(errors[0]))


class _Incomplete(Exception):
    """A decoder with several threads may not have returned all frames."""


def decoded(path: str, threads: int, errors: list[Exception]) -> Iterator[Any]:
    """Yield all frames of a file. One thread skips what cannot be decoded, and appends the error to `errors`.

    Several threads stop there. PyAV does not show an error at the end of a file, and loses the frames after it, so they
    raise _Incomplete too if there are fewer frames than packets.
    """
    missing = 0
    with open_video(path) as (container, stream):
        codec = stream.codec_context
        codec.thread_count, codec.thread_type = threads, "SLICE" if threads == 1 else "AUTO"
        for packet in chain(demuxed(container, stream), [None]):  # None asks for the frames that the decoder still has
            try:
                frames = codec.decode(packet)
            except MemoryError:
                raise
            except Exception as error:
                if threads != 1:
                    raise _Incomplete from error
                errors.append(error)
                frames = []
            missing += (packet is not None and not packet.is_discard) - len(frames)
            yield from frames
        if threads != 1 and missing > 0:
            raise _Incomplete


class BestEffort:
    """FFmpeg's best-effort times of decoded frames, which PyAV does not have (`guess_correct_pts` of libavcodec).

    A frame's presentation time is used while it runs back less often than its decoding time.
    """

    def __init__(self) -> None:
        self._last = {"pts": -math.inf, "dts": -math.inf}
        self._faults = {"pts": 0, "dts": 0}

    def __call__(self, pts: int | None, dts: int | None) -> int | None:
        """Return the time of the next frame, None if it has none."""
        for name, time, other in (("dts", dts, pts), ("pts", pts, dts)):
            if time is not None:
                self._faults[name] += time <= self._last[name]
                self._last[name] = time
            elif other is not None:
                self._last[name] = other
        return pts if dts is None or (pts is not None and self._faults["pts"] <= self._faults["dts"]) else dts


def ascending(times: Sequence[int | None], step: int, longest_gap: float) -> tuple[int, ...]:
    """Return times in the order of the frames, each after the one before.

    Args:
        times: of the frames; None is `step` after the frame before.
        step: the usual ticks between two frames.
        longest_gap: ticks above which a later time belongs to another clock. A time that is more than a few frames
            earlier does too (joined recordings). Times of another clock continue those before.
    """
    ticks: list[int] = []
    shift = 0
    for time in times:
        if not ticks:
            ticks.append(time or 0)
            continue
        last = ticks[-1]
        now = last + step if time is None else time + shift
        if now <= last - _BACK * step or now > last + longest_gap:
            shift += last + step - now
            now = last + step
        ticks.append(max(now, last + 1))
    return tuple(ticks)


def longest_gap(container: Any, stream: Any) -> float:
    """Return the ticks between two frames above which the clock of a stream was set to another time."""
    return _LONGEST_GAP / stream.time_base if container.format.flags & _TS_DISCONT else math.inf


def usual_step(stream: Any) -> int:
    """Return the usual number of ticks between two frames of a stream, at least 1."""
    rate = stream.average_rate or stream.guessed_rate or 25
    return max(1, round(1 / (rate * stream.time_base)))
