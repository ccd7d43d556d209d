"""Decode exactly the planned frames of a video.

A cursor (module `cursors`) moves forward in the file to the frame of each entry. All cores of a rank are used: if the
index of the file says where groups of pictures begin, threads decode different groups, each with a cursor. Otherwise,
or if most frames of a group are wanted, the decoder itself runs on several threads. The thread that converts a frame
writes it into the tensor that is returned. None of this changes a pixel.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import accumulate, chain, groupby
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, VideoError, reading, translated

from .cursors import Cursor, open_cursor, undecodable
from .decode_options import check_choice, decode_threads, import_torchcodec
from .frame_batches import FrameBatches
from .prefetch import read_ahead
from .rgb import Converter
from .torchcodec_reader import read_with_torchcodec, stream_for_torchcodec
from .video import FramePlan

_AHEAD_BYTES = 256 << 20
"""Limit on the bytes of decoded frames that several threads hold; one frame per thread is always allowed."""


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
    check_choice(threads, decoder, "")
    if decoder == "pyav" and torch.device(device).type != "cpu":
        raise ConfigError(f"decoder 'pyav' decodes on the CPU only, got device {device}; use decoder='torchcodec'")
    ranges = [entries for entries in ranges if entries]
    if not ranges:
        return
    if decoder == "pyav":
        yield from _read_with_pyav(plan, ranges, size, batch, threads)
        return
    decoders = import_torchcodec("decoder='torchcodec'")
    stream = stream_for_torchcodec(plan)
    if stream is not None:
        yield from read_with_torchcodec(decoders, plan, stream, [*chain(*ranges)], size, batch, threads, device)
        return
    for frames in _read_with_pyav(plan, ranges, size, batch, threads):
        yield frames.to(device)


def _read_with_pyav(
    plan: FramePlan, ranges: Sequence[range], size: tuple[int, int] | None, batch: int, threads: int
) -> Iterator[Tensor]:
    with (
        reading(f"{plan.path}: cannot be decoded", "replace or convert it", VideoError),
        ExitStack() as resources,
        closing(_Reader(plan, size, resources).batches(ranges, threads, batch)) as batches,
    ):
        yield from batches


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
        first = open_cursor(plan, resources)
        self._index, self._coded_size = first.index, first.coded_size
        height, width = size or self._coded_size
        self._frame_bytes = max(1, 3 * height * width)
        self._idle: SimpleQueue[Cursor] = SimpleQueue()
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
            cursor = open_cursor(self._plan, self._resources, self._index)

        entry = entries[0]

        def frame(current: int, following: int | None) -> tuple[int, Any]:
            nonlocal entry
            entry = current  # for the message
            return cursor.frame(current, following)

        try:
            cursor.threads = threads
            with translated(lambda why: undecodable(self._plan, entry, why)):
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
            self._converters.own = Converter(self._size, self._coded_size)
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
