"""The frames that a decoder shows, in its order, and whether packets tell which they are before they are decoded."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

from .container import demuxed, open_video, reason, require_av, warn_once
from .images import animation_frames, is_animated_webp

_TIMELESS = ("avi",)
"""FFmpeg's names of containers that store no presentation times; FFmpeg then makes them from the decoding order."""

READ_TO_KNOW = ("vp8", "vp9")
"""Codecs whose packets say in their first bits whether their frame is shown."""

_MAY_HIDE = (*READ_TO_KNOW, "mpeg4")

SMALLEST_FRAME = 20
"""Bytes below which a packet of MPEG-4 may be the place of a frame that was not coded."""

_BACK = 8
"""Frames by which times may run back within one recording; times that run back further begin again."""

LONGEST_GAP = 10
"""Seconds between frames of a broadcast format, above which FFmpeg's programs assume that its clock was set."""

_TS_DISCONT = 0x0200
"""FFmpeg's flag of formats whose clock may be set to another time: transport and program streams, Ogg."""


_FIRST = 128
"""Frames that are decoded to see whether the order of the packets is that of the frames."""


class Packet(NamedTuple):
    """The facts of a packet that `reasons_to_distrust` judges.

    Attributes:
        shown: False if the file says that its frame is decoded but not shown (an edit list).
        hidden: whether it may be a frame that is never shown (VP8), or none (MPEG-4).
        damaged: whether the container found that its data are incomplete.
    """

    pts: int | None
    dts: int | None
    duration: int
    is_keyframe: bool
    shown: bool
    hidden: bool
    damaged: bool


def reasons_to_distrust(path: str, container: Any, stream: Any, packets: Sequence[Packet]) -> Iterator[str]:
    """Yield the reasons why packets do not tell which frames are shown at which times, if there are any.

    Args:
        path, container, stream: of the file.
        packets: all of the stream in decoding order, or those at its start; at least one.
    """
    codec = stream.codec_context
    times = [packet.pts for packet in packets if packet.pts is not None]
    decoding = [packet.dts for packet in packets if packet.dts is not None]
    hidden = [packet.pts for packet in packets if not packet.shown and packet.pts is not None]
    shown = [packet.pts for packet in packets if packet.shown and packet.pts is not None]
    reorders, gap = codec.codec.reorder, longest_gap(container, stream)
    if len(times) < len(packets):
        yield "some of its frames have no presentation time"
    if reorders and container.format.name in _TIMELESS:
        yield "its format has no presentation times"
    if len(set(times)) < len(times):
        yield "several of its frames have the same time"
    if any(later < earlier for earlier, later in pairwise(decoding)):
        yield "its times run back"
    if any(later > earlier + gap for earlier, later in pairwise(decoding)):
        yield "its clock was set to another time"
    if not packets[0].is_keyframe:
        yield "it begins inside a group of pictures"
    if shown and min(shown) < times[0]:
        yield "it begins with frames that refer to earlier ones"
    latest = accumulate(times, max, initial=times[0] - 1)
    if any(packet.is_keyframe and time <= before for packet, time, before in zip(packets, times, latest, strict=False)):
        yield "a keyframe is shown before frames that are decoded before it"
    if not shown or any(min(shown) < time < max(shown) for time in hidden):
        yield "its edit list hides frames between others"
    if any(packet.hidden for packet in packets):
        yield "some of its packets may have no frame that is shown"
    if any(packet.damaged for packet in packets):
        yield "some of its packets are damaged"
    if _has_fields(codec, stream, decoding):
        yield "some of its packets may be fields"
    if reorders and codec.has_b_frames and times == sorted(times):  # as if its codec did not reorder frames
        first = [-math.inf if frame.pts is None else frame.pts for frame in islice(_decoded(path, 1, []), _FIRST)]
        if any(later <= earlier for earlier, later in pairwise(first)):
            yield "its times are those of decoding, and its frames are shown in another order"


def longest_gap(container: Any, stream: Any) -> float:
    """Return the ticks between two frames above which the clock of a stream was set to another time."""
    return LONGEST_GAP / stream.time_base if container.format.flags & _TS_DISCONT else math.inf


def usual_step(stream: Any) -> int:
    """Return the usual number of ticks between two frames of a stream, at least 1."""
    rate = stream.average_rate or stream.guessed_rate or 25
    return max(1, round(1 / (rate * stream.time_base)))


def _has_fields(codec: Any, stream: Any, decoding: Sequence[int]) -> bool:
    """Return whether packets of an interlaced stream may have one field each, so that two make a frame."""
    interlaced = getattr(codec, "field_order", 0) > 1
    if not interlaced or not codec.framerate or len(decoding) < 2 or decoding[-1] <= decoding[0]:
        return False
    rate = (len(decoding) - 1) / ((decoding[-1] - decoding[0]) * stream.time_base)
    return codec.name in ("h264", "hevc") and bool(rate > 1.1 * codec.framerate)


def _is_hidden(codec: str, packet: Any) -> bool:
    """Return whether a packet of a codec of `_MAY_HIDE` may have no frame that is shown."""
    if codec == "mpeg4":
        return bool(packet.size < SMALLEST_FRAME)
    content = memoryview(packet)
    first, last = content[0], content[-1]
    if codec == "vp8":
        return not first >> 4 & 1  # show_frame
    if last & 0xE0 == 0xC0:  # a superframe, one of whose frames is shown
        return False
    first = first << 1 if first & 0x30 == 0x30 else first  # profile 3 has one more bit
    return not first >> 3 & 1 and not first >> 1 & 1  # show_existing_frame, show_frame


def packet_facts(codec: str, packet: Any) -> Packet:
    return Packet(
        packet.pts,
        packet.dts,
        packet.duration or 0,
        packet.is_keyframe,
        not packet.is_discard,
        codec in _MAY_HIDE and _is_hidden(codec, packet),
        packet.is_corrupt,
    )


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
            for frame in _decoded(path, threads, errors):
                yield frame
                done += 1
            return
    yield from islice(_decoded(path, 1, errors), done, None)
    if errors:
        warn_once("%s: %d of its packets cannot be decoded (%s)", path, len(errors), reason(errors[0]))


class _Incomplete(Exception):
    """A decoder with several threads may not have returned all frames."""


def _decoded(path: str, threads: int, errors: list[Exception]) -> Iterator[Any]:
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
