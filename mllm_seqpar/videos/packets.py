"""What packets say about the frames of a video before they are decoded, and whether it can be trusted."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from .shown_frames import decoded, longest_gap

_TIMELESS = ("avi",)
"""FFmpeg's names of containers that store no presentation times; FFmpeg then makes them from the decoding order."""

READ_TO_KNOW = ("vp8", "vp9")
"""Codecs whose packets say in their first bits whether their frame is shown."""

_MAY_HIDE = (*READ_TO_KNOW, "mpeg4")

SMALLEST_FRAME = 20
"""Bytes below which a packet of MPEG-4 may be the place of a frame that was not coded."""

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
        first = [-math.inf if frame.pts is None else frame.pts for frame in islice(decoded(path, 1, []), _FIRST)]
        if any(later <= earlier for earlier, later in pairwise(first)):
            yield "its times are those of decoding, and its frames are shown in another order"


def _has_fields(codec: Any, stream: Any, decoding: Sequence[int]) -> bool:
    """Return whether packets of an interlaced stream may have one field each, so that two make a frame."""
    interlaced = getattr(codec, "field_order", 0) > 1
    if not interlaced or not codec.framerate or len(decoding) < 2 or decoding[-1] <= decoding[0]:
        return False
    rate = (len(decoding) - 1) / ((decoding[-1] - decoding[0]) * stream.time_base)
    return codec.name in ("h264", "hevc") and bool(rate > 1.1 * codec.framerate)
