"""Decode exactly the planned frames of a video: seek to a keyframe before the frame, then decode forward.

If the plan has the numbers of the frames (`FramePlan.numbers`), the file is decoded from its start and frames are
counted, because the times of its packets cannot be trusted. The rest of this text is about plans without them.

The frame of a tick is the one with the greatest presentation time not after it. This depends on the file only, so a
rank that reads a part of a plan gets the same pixels as a rank that reads all of it. A seek may land after its target
(mp4 seeks by decoding time, which B-frames run ahead of; MPEG-TS lands on any packet). A seek is therefore accepted
only if the keyframe it finds is not after the wanted tick. Otherwise the target moves further back, in the end to the
start of the file. Frames that the decoder emits before that keyframe (leading pictures of an open GOP) are dropped
because their reference frames are missing. If the decoder does not begin with a frame of that keyframe which refers to
no other (an intra refresh, or a container that calls every frame a keyframe), the file is read without seeking.

Three things make this fast, and none changes a pixel. First, packets are read before they are decoded, so it is known
which frames are wanted. A frame that no other frame refers to is decoded only if it is wanted, and nothing is decoded
after a wanted frame if a seek leads to the next one. Second, all cores of a rank are used. If the index of the file
says where groups of pictures begin, threads decode different groups. Otherwise, or if most frames of a group are
wanted, the decoder itself runs on several threads. Third, the thread that converts a frame writes it into the tensor
that is returned.
"""

import os
import struct
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._compat import REFORMAT_THREADS, optional_import
from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import PASSED, ConfigError, VideoError, reading, translated

from .container import index_of, open_video, require_av
from .images import image_size, is_animated_webp
from .prefetch import FrameBatches, read_ahead
from .shown_frames import shown_frames
from .video import FramePlan, plan_frames, probe, write_video

DECODERS = ("pyav", "torchcodec")
"""The decoders of videos: PyAV, or torchcodec (the extra "torchcodec"), which can also decode on a GPU."""

_FORWARD_SECONDS = 2
"""Without an index, a jump shorter than this, or than the longest GOP so far, decodes the frames in between instead of
seeking."""

_MOST_AHEAD = 64
"""Packets read to find the frame that is shown next; no codec orders frames over as many."""

_AHEAD_BYTES = 256 << 20
"""Limit on the bytes of decoded frames that several threads hold; one frame per thread is always allowed."""

_TORCHCODEC_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""FFmpeg's names of the containers in which torchcodec 0.13 finds every frame by its time."""

_P, _B = 2, 3
"""FFmpeg's numbers of the types of pictures that refer to others."""

_MATRICES = {(a, 0, 0, d) for a in (1, -1) for d in (1, -1)} | {(0, b, c, 0) for b in (1, -1) for c in (1, -1)}
"""The display matrices that turn by quarters or mirror."""

_HEIGHT, _WIDTH, _FRAMES, _RATE = 720, 1280, 90, 30
"""The video that `decode_rate` measures."""

_log = get_logger(__name__)


def read_frames(
    plan: FramePlan,
    start: int = 0,
    stop: int | None = None,
    *,
    size: tuple[int, int] | None = None,
    batch: int = 16,
    threads: int | None = None,
    decoder: str = "pyav",
    device: torch.device | str = "cpu",
    ranges: Sequence[range] | None = None,
) -> Iterator[Tensor]:
    """Decode entries start <= i < stop of a plan, skipping as much of the file as possible.

    Args:
        plan: from `plan_frames`.
        start, stop: the range of entries; `stop=None` is the end of the plan.
        size: (height, width) to scale to (bicubic); None keeps the video's size.
        batch: frames per tensor, which bounds the memory used.
        threads: number of decoding threads; None: `decode_threads()`. The frames do not depend on it.
        decoder: one of `DECODERS`. Frames of torchcodec equal those of PyAV, except that they are scaled by PyTorch's
            antialiased bicubic filter, and that NVDEC uses its own colour conversion. PyAV reads the videos of which
            torchcodec would give other frames: all but mp4, mov, mkv and webm, those whose frames are counted, and
            those with several video streams, edit lists, intra refresh, mirrors, or more than 8 bits.
        device: where torchcodec decodes: "cpu", or "cuda" for NVDEC (not run on a GPU yet). The frames stay there.
        ranges: several ranges of entries in ascending order, instead of `start` and `stop`. The same decoders
            decode all of them.

    Yields:
        uint8 tensors (up to `batch`, 3, H, W), RGB, in the plan's order.

    Raises:
        ConfigError: a range outside the plan, `batch` or `threads` below 1, a decoder that is unknown or not
            installed, or PyAV with a device other than the CPU.
        VideoError: a frame cannot be decoded; names its number and time.
    """
    stop = len(plan) if stop is None else stop
    threads = decode_threads() if threads is None else threads
    ranges = [range(start, stop)] if ranges is None else ranges
    for entries in ranges:
        check_range(entries.start, entries.stop, len(plan), batch)
    _check_choice(threads, decoder, "")
    if decoder == "pyav" and torch.device(device).type != "cpu":
        raise ConfigError(f"decoder 'pyav' decodes on the CPU only, got device {device}; use decoder='torchcodec'")
    ranges = [entries for entries in ranges if entries]
    if not ranges:
        return
    if decoder == "torchcodec":
        yield from _read_with_torchcodec(plan, ranges, size, batch, threads, device)
        return
    with (
        reading(f"{plan.path}: cannot be decoded", "replace or convert it", VideoError),
        ExitStack() as resources,
        closing(_Reader(plan, size, resources).batches(ranges, threads, batch)) as batches,
    ):
        yield from batches


def _read_with_torchcodec(
    plan: FramePlan,
    ranges: Sequence[range],
    size: tuple[int, int] | None,
    batch: int,
    threads: int,
    device: torch.device | str,
) -> Iterator[Tensor]:
    """`read_frames` with torchcodec."""
    decoders = import_torchcodec("decoder='torchcodec'")
    version = os.stat(plan.path).st_mtime_ns
    index = None if plan.numbers else _stream_for_torchcodec(plan.only(len(plan) - 1), version)
    if index is None:
        for frames in read_frames(plan, size=size, batch=batch, threads=threads, ranges=ranges):
            yield frames.to(device)
        return
    entries = [*chain(*ranges)]
    first = entries[0]
    with translated(lambda why: _undecodable(plan, first, why)):
        video = decoders.VideoDecoder(plan.path, stream_index=index, num_ffmpeg_threads=threads, device=device)
        begin, end, last = video.metadata.begin_stream_seconds, video.metadata.end_stream_seconds, len(video) - 1
        for done in range(0, len(entries), batch):
            first = entries[done]
            ticks = [plan.ticks[entry] for entry in entries[done : done + batch]]
            # Presentation times are whole ticks, so half a tick later the same frame is shown, however floats round.
            times = [max(float((2 * tick + 1) * plan.time_base / 2), begin) for tick in ticks]
            inside = [time for time in times if time < end]
            images = [video.get_frame_at(last).data[None]] * (len(times) - len(inside))
            if inside:
                shown = video.get_frames_played_at(inside)
                if any(start > time for start, time in zip(shown.pts_seconds.tolist(), inside, strict=True)):
                    raise VideoError(f"{plan.path}: torchcodec finds other frames than PyAV; use the decoder pyav")
                images.insert(0, shown.data)
            batch_images = torch.cat(images)
            if size is not None and batch_images.shape[2:] != size:
                scaled = F.interpolate(batch_images.float(), size, mode="bicubic", antialias=True)
                batch_images = scaled.round().clamp(0, 255).to(torch.uint8)
            yield batch_images


@lru_cache(maxsize=4096)
def _stream_for_torchcodec(last: FramePlan, _version: int) -> int | None:
    """Return the number of the stream of which torchcodec gives the frames of PyAV; None if PyAV must read the video.

    torchcodec 0.13 finds other frames in other containers, after edit lists, and after keyframes at which decoding
    cannot begin (the last one is tried). It does not open some files with several streams, ignores mirrors, and
    converts colours of more than 8 bits in another way.

    Args:
        last: the last entry of a plan.
    """
    with open_video(last.path) as (container, stream):
        entries: Any = getattr(stream, "index_entries", ())
        hidden = any(entry.is_discard for entry in entries)
        if hidden or container.format.name not in _TORCHCODEC_CONTAINERS or len(container.streams.video) > 1:
            return None
        number, keys = int(stream.index), [entry.timestamp for entry in index_of(stream) if entry.is_keyframe]
        tick = keys[-1] + last.start - entries[0].timestamp if keys else last.ticks[0]
    try:
        with ExitStack() as resources:
            cursor = _Cursor(replace(last, ticks=(tick,)), resources.enter_context(ExitStack()))
            frame = cursor.first_after_seek(tick)
    except PASSED:
        raise
    except Exception:  # noqa: BLE001 - PyAV reads what is readable, and says what is not
        return None
    if frame is None:
        return None
    a, b, c, d = display_matrix(frame)
    deep = any(component.bits > 8 for component in frame.format.components)
    tilted = getattr(frame, "rotation", 0) % 90 != 0
    return None if deep or tilted or a * d - b * c < 0 else number


def check_range(start: int, stop: int, total: int, batch: int) -> None:
    if not 0 <= start <= stop <= total:
        raise ConfigError(
            f"frames {start} to {stop} requested from a source that has {total}; pass a range within them"
        )
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")


class _Reader:
    """Reads ranges of one plan, with one decoder or with several of them side by side."""

    def __init__(self, plan: FramePlan, size: tuple[int, int] | None, resources: ExitStack) -> None:
        self._plan, self._size, self._resources = plan, size, resources
        first = _cursor(plan, resources)
        self._index, self._coded_size = first.index, first.coded_size
        height, width = size or self._coded_size
        self._frame_bytes = max(1, 3 * height * width)
        self._idle: SimpleQueue[_Cursor | _Counter] = SimpleQueue()
        self._idle.put(first)
        self._converters = threading.local()

    def batches(self, ranges: Sequence[range], threads: int, batch: int) -> Generator[Tensor]:
        """Yield the frames of ranges of entries in order, decoded with a number of threads."""
        batches = FrameBatches(sum(map(len, ranges)), batch)
        segments = self._segments(ranges, threads)
        if len(segments) > 1:
            decoders = min(threads, len(segments))
            # With few segments, some decoders finish early. The others then need several threads.
            own_threads = 1 if len(segments) >= 4 * threads else min(threads, -(-2 * threads // decoders))
            positions = accumulate(map(len, segments), initial=0)

            def read(segment: tuple[int, range]) -> int:
                return sum(self._write(batches, shown) for shown in self._shown(*segment, own_threads))

            written = read_ahead(zip(positions, segments, strict=False), read, threads, threads)
        else:
            shown = self._shown(0, [*chain(*ranges)], threads)
            write = partial(self._write, batches)
            written = read_ahead(shown, write, threads, threads) if threads > 1 else (write(frame) for frame in shown)
        with closing(written):
            for count in written:
                yield from batches.finish(count)

    def _shown(self, position: int, entries: Sequence[int], threads: int) -> Iterator[tuple[int, Any, int]]:
        """Decode entries; yield each frame with the position and the number of the entries that show it."""
        try:
            cursor = self._idle.get_nowait()
        except Empty:
            cursor = _cursor(self._plan, self._resources, self._index)

        entry = entries[0]

        def frame(current: int, following: int | None) -> tuple[int, Any]:
            nonlocal entry
            entry = current  # for the message
            return cursor.frame(current, following)

        try:
            cursor.threads = threads
            with translated(lambda why: _undecodable(self._plan, entry, why)):
                for _, group in groupby(map(frame, entries, [*entries[1:], None]), key=itemgetter(0)):
                    (_, image), *others = group
                    yield position, image, 1 + len(others)
                    position += 1 + len(others)
        finally:
            self._idle.put(cursor)

    def _write(self, batches: FrameBatches, shown: tuple[int, Any, int]) -> int:
        """Convert a frame and write it to its positions; return their number."""
        position, frame, count = shown
        if not hasattr(self._converters, "own"):  # one in each thread
            self._converters.own = _Converter(self._size, self._coded_size)
        image = self._converters.own.image(frame)
        for repeat in range(count):
            batches.write(position + repeat, image)
        return count

    def _segments(self, ranges: Sequence[range], threads: int) -> list[range]:
        """Return ranges of entries to decode in parallel; none if one decoder with several threads is as fast.

        A segment begins where a group of pictures begins, so that no frame is decoded twice.
        """
        most = min(16, max(1, _AHEAD_BYTES // self._frame_bytes // (2 * threads)))
        usual = min(most, sum(map(len, ranges)) // (4 * threads))  # several segments for each thread
        index, ticks = self._index, self._plan.ticks
        if threads == 1 or not index.keys:
            return []
        segments: list[range] = []
        for entries in ranges:
            first = entry = entries.start
            while entry < entries.stop:
                # The first entry of a later group of pictures.
                group = bisect_right(index.keys, ticks[entry] - index.delay)
                following = entries.stop
                if group < len(index.keys):
                    following = bisect_left(ticks, index.keys[group] + index.delay, entry + 1, following)
                if following - entry > most:
                    return []
                if entry > first and following - first > usual:
                    segments.append(range(first, entry))
                    first = entry
                entry = following
            segments.append(range(first, entries.stop))
        return segments


@dataclass
class _Index:
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
    def of(cls, stream: Any, delay: int) -> "_Index":
        times = [(entry.timestamp, entry.is_keyframe) for entry in index_of(stream)]
        return cls(sorted(time for time, key in times if key), max((time for time, _ in times), default=None), delay)


class _Converter:
    """Converts decoded frames to upright RGB images of one size."""

    def __init__(self, size: tuple[int, int] | None, coded_size: tuple[int, int]) -> None:
        self._reformatter = require_av().video.reformatter.VideoReformatter()
        self._options: dict[str, Any] = {"interpolation": "BICUBIC"}
        if not REFORMAT_THREADS.applies():
            self._options["threads"] = 1  # frames are converted in parallel, not the parts of one frame
        self._size = size
        self._coded_size = coded_size  # applies to frames after a change of resolution too

    def image(self, frame: Any) -> np.ndarray:
        """Return a frame as an image (height, width, 3)."""
        matrix = display_matrix(frame)
        height, width = self._size or self._coded_size
        if self._size and not matrix[0]:
            height, width = width, height
        image = self._reformatter.reformat(frame, width, height, "rgb24", **self._options).to_ndarray()
        return upright(image, matrix)


def display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """Return the signs of a frame's display matrix (a, b, c, d): (x, y) of the file is shown at (ax + cy, bx + dy).

    Phones set it instead of turning the pixels. Only quarter turns and mirrors are known, of which two signs are 0; any
    other matrix counts as upright.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    least = 0.98 * max(map(abs, (a, b, c, d)))
    signs = tuple((value > 0) - (value < 0) if abs(value) >= least else 0 for value in (a, b, c, d))
    return signs if signs in _MATRICES else (1, 0, 0, 1)


def upright(image: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """Return an image (height, width, 3) as its display matrix says that it is shown, as FFmpeg's programs do."""
    a, b, c, d = matrix
    image = image if a else image.transpose(1, 0, 2)
    return image[:: b or d, :: a or c]


def _cursor(plan: FramePlan, resources: ExitStack, index: _Index | None = None) -> "_Cursor | _Counter":
    """Return a position in a video, which `resources` closes; `index` is that of other cursors of the file."""
    if plan.numbers is not None:
        return _Counter(plan, resources)
    return _Cursor(plan, resources.enter_context(ExitStack()), index)


class _Counter:
    """A position in a video whose frames are counted from its start."""

    threads: int  # of the decoder, set before the first frame

    def __init__(self, plan: FramePlan, resources: ExitStack) -> None:
        self._plan, self._resources = plan, resources
        self.index = _Index()
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


class _Cursor:
    """A position in a video that moves forward to the frame of each wanted tick with as little decoding as possible.

    Packets are read before they are decoded, until the time at which each frame gives way to the next one is known.
    """

    stream: Any
    index: _Index
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

    def __init__(self, plan: FramePlan, resources: ExitStack, index: _Index | None = None) -> None:
        self._plan, self._resources = plan, resources
        self._queue: deque[Any] = deque()  # packets that have been read and not decoded
        self._skips = True  # frames that are neither wanted nor referred to
        self._last: int | None = None  # the tick after whose frame nothing needs to be decoded before the next seek
        self._longest_gop = round(_FORWARD_SECONDS / plan.time_base)
        self._delay = 0  # the greatest difference of presentation and decoding time of a keyframe so far
        self._newest_key: int | None = None
        self._reopen()
        self.coded_size = self.stream.codec_context.height, self.stream.codec_context.width
        self.index = index or _Index.of(self.stream, self._delay)

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
        """Read a packet ahead of those that are decoded; return False at the end of the file."""
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


class _Damaged(Exception):
    """A frame of the plan cannot be decoded."""


def _undecodable(plan: FramePlan, number: int, why: str) -> VideoError:
    return VideoError(
        f"{plan.path}: frame {number} of {len(plan)} planned (at {plan.seconds(number):.3f} s) cannot be decoded: "
        f"{why}; replace the file"
    )


def _time(packet: Any) -> int:
    time = packet.pts if packet.pts is not None else packet.dts
    if time is None:
        raise _Damaged("a keyframe without presentation time")
    return time


def decode_threads() -> int:
    """Return the number of decoding threads of one rank: the cores of this process divided by the ranks of this host.

    The number of ranks is the variable LOCAL_WORLD_SIZE, which torchrun, accelerate and our own launcher set.
    """
    return max(1, available_cores() // _local_ranks())


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _local_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def check_decoding(threads: int | None, decoder: str) -> None:
    """Check the options --decode_threads and --decoder of a command, before anything is decoded.

    More threads than cores are allowed, with a warning that they are not faster.

    Raises:
        ConfigError: `threads` below 1, or a decoder that is unknown, not installed, or cannot be loaded.
    """
    _check_choice(threads, decoder, "--")
    if decoder == "torchcodec":
        import_torchcodec("--decoder torchcodec")
    cores, ranks = available_cores(), _local_ranks()
    if threads is not None and threads * ranks > max(cores, ranks) and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "--decode_threads %d on %d %s of this machine is more than its %d %s, which decodes no faster; leave it "
            "out for %d",
            *(threads, ranks, "rank" if ranks == 1 else "ranks", cores, "core" if cores == 1 else "cores"),
            decode_threads(),
        )


def _check_choice(threads: int | None, decoder: str, prefix: str) -> None:
    """Check the parameters of `read_frames`, or with the prefix "--" the options of a command."""
    if threads is not None and threads < 1:
        name = "--decode_threads" if prefix else "threads"
        raise ConfigError(f"{name}: {threads} is not allowed; give 1 or more")
    if decoder not in DECODERS:
        raise ConfigError(f"{prefix}decoder: {decoder!r} is not allowed; give one of {', '.join(DECODERS)}")


def import_torchcodec(wanted: str) -> Any:
    """Return the module torchcodec.decoders; ConfigError if it is not installed or cannot be loaded."""
    # An installed torchcodec may not find FFmpeg or the libraries of CUDA.
    with reading("torchcodec cannot be loaded", "install FFmpeg, or use the decoder pyav", ConfigError):
        return optional_import("torchcodec.decoders", extra="torchcodec", needed_for=wanted)


def frames_to_decode(plan: FramePlan) -> int:
    """Return how many frames of the file the reader decodes for all entries of a plan, at most.

    It decodes from the keyframe before an entry, or continues from its position. Frames that no other frame refers to
    are counted, although they are decoded only if they are used. Nothing is decoded here; a file without an index is
    read.
    """
    if plan.numbers is not None:
        return plan.numbers[-1] + 1
    with open_video(plan.path) as (container, stream):
        frames = [(entry.timestamp, entry.is_keyframe) for entry in index_of(stream)]
        delay = 0
        packets = container.demux(stream)
        if frames:
            first = next(packets, None)
            if first is not None and first.pts is not None and first.dts is not None:
                delay = first.pts - first.dts
        else:
            times = ((packet.pts if packet.pts is not None else packet.dts, packet) for packet in packets)
            frames = [(when, packet.is_keyframe) for when, packet in times if when is not None and packet.size]
    frames.sort()
    keys = [number for number, (_, is_key) in enumerate(frames) if is_key] or [0]
    decoded, position = 0, -1
    for tick in plan.ticks:
        shown = max(0, bisect_right(frames, tick - delay, key=itemgetter(0)) - 1)
        key = keys[max(0, bisect_right(keys, shown) - 1)]
        decoded += max(0, shown + 1 - max(key, position + 1))
        position = max(position, shown)
    return decoded


def decode_rate() -> float:
    """Measure how many frames per second one core decodes: H.264 in 720p of 30 frames/s, written here for it."""
    noise = np.random.default_rng(0).integers(0, 24, (_HEIGHT, _WIDTH, 3), dtype=np.uint8)
    rows, columns = np.mgrid[:_HEIGHT, :_WIDTH]
    pattern = np.stack([rows % 256, columns % 232, (rows + columns) % 232], -1).clip(0, 231).astype(np.uint8)
    moving = (np.roll(pattern, 8 * number, 1) + np.roll(noise, 37 * number, 0) for number in range(_FRAMES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.mp4"
        write_video(path, moving, rate=_RATE, options={"preset": "veryfast"})
        plan = plan_frames(probe(path), fps=_RATE / 15)
        for _ in read_frames(plan, threads=1):  # the file is in memory, and libraries are loaded
            pass
        begin = time.thread_time()
        for _ in read_frames(plan, threads=1):
            pass
        return frames_to_decode(plan) / (time.thread_time() - begin)
