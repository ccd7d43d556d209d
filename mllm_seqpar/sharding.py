"""Which rank owns which frames and text tokens: tokens in one of three layouts, frames in one of two or over a cache.

The functions are pure index arithmetic, the same on every rank; `shard_sequence` and `unshard_sequence` apply it to
tensors. The objective is the sum of all ranks' losses: the adjoint of a slice pads with zeros, and the adjoint of an
all-gather sums over ranks. The average of parameter gradients over the group is then the gradient of one loss.
"""

from __future__ import annotations

import itertools
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .comm import Communicator, Group, as_communicator
from .comm.agreement import agree
from .comm.autograd import gather_shards
from .errors import ConfigError, ShapeError

LAYOUTS = ("zigzag", "striped", "contiguous")

FRAME_LAYOUTS = ("contiguous", "zigzag")
"""Zigzag balances the load of cross-attention if rows attend only to earlier frames."""

APPENDED = "appended"
"""The layout of frames that follow others in a cache: contiguous, and balanced together with those (`FrameSizes`)."""

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges (start, stop) of frames, in the order in which a rank stores them."""


@dataclass(frozen=True)
class FrameShard:
    """The frames of `total` that a caller passes, if it passes only this rank's shard: one range, or several.

    ``FrameShard(start, stop, total)`` has the frames ``start <= f < stop``, those of `frame_range(total, group)`.
    ``FrameShard.of(total, group, layout, sizes)`` has those of `frame_ranges(total, group, layout, sizes)`.

    Attributes:
        start, stop: the first range.
        total: the number of frames of all ranks.
        more: further ranges (start, stop). All ranges are in ascending order.
    """

    start: int
    stop: int
    total: int
    more: Spans = ()

    def __post_init__(self) -> None:
        given = (self.start, self.stop, *itertools.chain(*self.more), self.total)
        named = f"FrameShard: start={self.start!r}, stop={self.stop!r}, total={self.total!r}"
        named += f", more={self.more!r}" if self.more else ""
        if not all(map(_is_count, given)):
            raise ShapeError(f"{named}; expected ints")
        if list(given) != sorted(given) or self.start < 0:
            raise ShapeError(f"{named}; needs 0 <= start <= stop <= total, and ranges in ascending order")

    @classmethod
    def of(
        cls,
        total: int,
        group: Group = None,
        layout: str = "contiguous",
        sizes: Tensor | Sequence[int] | None = None,
        held: Sequence[int] | None = None,
    ) -> FrameShard:
        """Return this rank's shard of `total` frames in a layout; see `frame_ranges`.

        `held` has the tokens of the frames that each rank holds already, if the frames are appended to those: together
        they are balanced, and the layout is contiguous.
        """
        spans = _spans_of_rank("FrameShard.of", total, group, layout, sizes, held)
        (start, stop), *more = spans or ((total, total),)
        return cls(start, stop, total, tuple(more))

    @property
    def spans(self) -> Spans:
        """The ranges (start, stop), none of them empty."""
        return join_spans(((self.start, self.stop), *self.more))

    @property
    def ranges(self) -> tuple[range, ...]:
        """The numbers of the frames, as ranges in ascending order."""
        return tuple(range(*span) for span in self.spans)

    def __len__(self) -> int:
        """Return the number of frames of this shard."""
        return span_length(self.spans)

    def __bool__(self) -> bool:
        return True  # also without frames

    def layout(self, rank: int, size: int, sizes: FrameSizes | None = None) -> str | None:
        """Return the layout in which this is the shard of `rank`; None if there is none. `sizes`: None, all equal."""
        sizes = FrameSizes(self.total) if sizes is None else sizes
        return next(iter(self.layouts(rank, size, sizes)), None)

    def layouts(self, rank: int, size: int, sizes: FrameSizes) -> list[str]:
        """Return all layouts in which this is the shard of `rank`; other ranks may have only one of them."""
        known = FRAME_LAYOUTS if sizes.held is None else (APPENDED, *FRAME_LAYOUTS)
        return [x for x in known if sizes.spans(size, x)[rank] == self.spans]


class HostFrames:
    """Frames, or visual features, that stay in host memory until the patched model moves this rank's, some at a time.

    FSDP2, DDP, accelerate and `Trainer` move the tensors among the arguments of a model to its device, and the root of
    FSDP2 casts them under a mixed-precision policy: all frames of a rank at once, and the whole of a mapped file. They
    pass on an object of this class as it is::

        model(**text, image_embeds=HostFrames(features), visual_shard=shard)

    `SeqParTrainer` makes them of the frames that the data collator returns.
    """

    # A dataclass, or a class with a method `to`, would be taken apart or moved.
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"HostFrames({self.tensor.dtype}, {tuple(self.tensor.shape)} on {self.tensor.device})"


def tensor_of(value: Any) -> Any:
    """Return the tensor of a `HostFrames`, and any other value unchanged."""
    return value.tensor if isinstance(value, HostFrames) else value


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def frame_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of every rank's frames: contiguous; the first ``total % size`` ranks hold one more."""
    base, extra = divmod(total, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


@lru_cache(maxsize=256)
def frame_spans(total: int, size: int, layout: str = "contiguous") -> tuple[Spans, ...]:
    """Return the ranges of every rank's frames in a layout, in ascending order; none for a rank without frames."""
    if layout == "contiguous":
        return tuple(join_spans((bounds,)) for bounds in frame_bounds(total, size))
    if layout != "zigzag":
        raise ConfigError(f"layout: {layout!r} is unknown; frames have one of {', '.join(FRAME_LAYOUTS)}")
    chunks = frame_bounds(total, 2 * size)
    return tuple(join_spans((chunks[rank], chunks[2 * size - 1 - rank])) for rank in range(size))


class FrameSizes:
    """How many units each of `total` frames has, and which frames each rank holds.

    A rank holds whole frames, balanced by their units. Units are what a call counts in: keys, image tiles.

    Attributes:
        total: the number of frames.
        per_frame: the units of one frame if all have as many, else (total,) int64 on the CPU.
        held: the units that each rank holds already of the frames that these follow; None if they follow none.
    """

    def __init__(
        self,
        total: int,
        per_frame: int | Tensor | Sequence[int] | None = None,
        held: Sequence[int] | None = None,
    ) -> None:
        """`per_frame` is one number or one for each frame; None: 1."""
        self._by_rank: dict[tuple[int, str], tuple[Spans, ...]] = {}
        per_frame = 1 if per_frame is None else per_frame
        if not isinstance(per_frame, int):
            per_frame = torch.as_tensor(per_frame).detach().long().cpu()
            if not total or bool((per_frame == per_frame[0]).all()):
                per_frame = int(per_frame[0]) if total else 1
        self.total, self.per_frame = total, per_frame
        self.held = None if held is None else tuple(held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrameSizes) or self.total != other.total:
            return False
        return torch.equal(torch.as_tensor(self.per_frame), torch.as_tensor(other.per_frame))

    __hash__ = None  # type: ignore[assignment]

    @property
    def fact(self) -> int | str:
        """What ranks compare: the units of one frame, or the sum and a checksum."""
        if not isinstance(self.per_frame, Tensor):
            return self.per_frame
        return f"{self.count()} in all, checksum {zlib.crc32(self.per_frame.numpy().tobytes()):08x}"

    def joined(self, frames: int) -> FrameSizes:
        """Return the sizes of frames that consist of so many of these."""
        own = self.per_frame
        joined = own.unflatten(0, (-1, frames)).sum(1) if isinstance(own, Tensor) else own * frames
        return FrameSizes(self.total // frames, joined)

    def followed_by(self, *others: FrameSizes) -> FrameSizes:
        """Return the sizes of these frames and of those after them."""
        every = self, *others
        counts = torch.cat([torch.as_tensor(x.per_frame).expand(x.total) for x in every])
        return FrameSizes(sum(x.total for x in every), counts)

    @cached_property
    def _offsets(self) -> list[int]:
        """The units before each frame, and those of all frames."""
        if not isinstance(self.per_frame, Tensor):
            return list(range(0, self.total * self.per_frame + 1, self.per_frame))
        return [0, *self.per_frame.cumsum(0).tolist()]

    def of(self, frames: Tensor) -> int | Tensor:
        """Return the units of each of the frames with these numbers, or one number for all."""
        return self.per_frame[frames] if isinstance(self.per_frame, Tensor) else self.per_frame

    def count(self, frames: Spans | None = None) -> int:
        """Return how many units these frames have together; None: all frames."""
        frames = ((0, self.total),) if frames is None else frames
        if isinstance(self.per_frame, Tensor):
            frames = self.units(frames)
        return span_length(frames) * (self.per_frame if isinstance(self.per_frame, int) else 1)

    def units(self, frames: Spans) -> Spans:
        """Return the numbers of the units of these frames."""
        if isinstance(self.per_frame, Tensor):
            return tuple((self._offsets[start], self._offsets[stop]) for start, stop in frames)
        if self.per_frame == 1:
            return frames
        return tuple([(start * self.per_frame, stop * self.per_frame) for start, stop in frames])

    def spans(self, size: int, layout: str = "contiguous") -> tuple[Spans, ...]:
        """Return the frames of every rank in a layout, as `frame_spans`, balanced by units; `APPENDED`, with `held`."""
        appended = layout == APPENDED and self.held is not None
        if not isinstance(self.per_frame, Tensor) and not appended:
            return frame_spans(self.total, size, layout)
        if (size, layout) not in self._by_rank:
            if layout not in FRAME_LAYOUTS and not appended:
                frame_spans(self.total, size, layout)  # raises
            held = self.held if appended else None
            self._by_rank[size, layout] = balanced_spans(self._offsets, size, layout == "zigzag", held)
        return self._by_rank[size, layout]


def balanced_spans(
    offsets: Sequence[int], size: int, two_ended: bool, held: Sequence[int] | None = None
) -> tuple[Spans, ...]:
    """Return the frames of every rank: whole frames, so that the rank with the most units has as few as possible.

    Each rank takes frames from the front of those that are left or, `two_ended` (zigzag), half of its units from the
    front and the others from the back. It takes about an equal share of what is left, or more where the ranks after it
    could not take the rest within the smallest limit that suffices.

    Args:
        offsets: the units before each frame, and those of all.
        size: the number of ranks.
        two_ended: as above.
        held: the units that each rank holds already, which count for the balance; None: no rank holds any.
    """
    held = [0] * size if held is None else held
    some_held, sizes = any(held), [b - a for a, b in itertools.pairwise(offsets)]
    # If no rank holds units, every limit that is tried admits the largest frame, so each rank can take one or more.
    one_each = not some_held and min(sizes, default=0) > 0

    def taken(first: int, last: int, goal: int, limit: int) -> tuple[int, int]:
        """Return what is left of the frames first to last when a rank has taken about `goal` units, at most `limit`."""
        front, back = first, last
        if two_ended:
            front = _nearest(offsets, first, last, offsets[first] + goal // 2, offsets[first] + limit)
            rest = offsets[last] - (goal - (offsets[front] - offsets[first]))
            least = offsets[last] - (limit - (offsets[front] - offsets[first]))
            back = max(front, _nearest(offsets, front, last, rest, offsets[last], least))
        used = offsets[front] - offsets[first] + offsets[last] - offsets[back]
        front = _nearest(offsets, front, back, offsets[front] + goal - used, offsets[front] + limit - used)
        return front, back

    def fits(first: int, last: int, ranks: int, limit: int) -> bool:
        if one_each and ranks >= last - first:
            return True
        for rank in range(size - ranks, size):
            if first == last:
                break
            first, last = taken(first, last, max(0, limit - held[rank]), max(0, limit - held[rank]))
        return first == last

    low, high = max(-(-(offsets[-1] + sum(held)) // size), min(held) + max(sizes, default=0)), max(held) + offsets[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(0, len(offsets) - 1, size, middle) else (middle + 1, high)
    by_rank, first, last = list[Spans](), 0, len(offsets) - 1
    for ranks in range(size, 0, -1):
        if first == last:  # a plan may have many more ranks than frames
            return (*by_rank, *[()] * ranks)
        own, room = held[size - ranks], max(0, low - held[size - ranks])
        level = -(-(offsets[last] - offsets[first]) // ranks)
        if some_held:  # what a rank has, rounded up, if the units that are left are added where the fewest are held
            fewest = itertools.accumulate(sorted(held[size - ranks :]), initial=offsets[last] - offsets[first])
            level = min([-(-total // count) for count, total in enumerate(fewest) if count])
        after = taken(first, last, min(room, max(0, level - own)), room)
        if not fits(*after, ranks - 1, low):
            after = taken(first, last, room, room)
        by_rank.append(join_spans(((first, after[0]), (after[1], last))))
        first, last = after
    return tuple(by_rank)


def _nearest(offsets: Sequence[int], first: int, last: int, goal: int, most: int, least: int = 0) -> int:
    """Return the frame in first to last before which about `goal` units are, at most `most` and at least `least`."""
    place = min(max(bisect_left(offsets, goal), first), last)
    if place > first and goal - offsets[place - 1] < offsets[place] - goal:
        place -= 1
    while place > first and offsets[place] > most:
        place -= 1
    while place < last and offsets[place] < least:
        place += 1
    return place


def join_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the same numbers in the same order, in ranges that are not empty and not adjacent."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def span_length(spans: Spans) -> int:
    """Return how many numbers ranges have together."""
    length = 0
    for start, stop in spans:
        length += stop - start
    return length


def numbers_of_spans(spans: Spans) -> Tensor:
    """Return the numbers in ranges, (n,) int64."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans] or [torch.arange(0)])


def describe_spans(spans: Spans) -> str:
    """Return ranges as a part of a message."""
    return " and ".join(f"{start} to {stop}" for start, stop in spans) or "none"


def take_spans(x: Tensor, spans: Spans, dim: int = 0) -> Tensor:
    """Return the entries of x in these ranges along `dim`; a view if it is one range."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in spans]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)


def in_frame_order(parts: Sequence[Tensor], by_rank: Sequence[Spans], dim: int = 0) -> Tensor:
    """Return the frames of all ranks in their order: the inverse of `take_spans`. Parts may have padding at the end."""
    by_start: dict[int, Tensor] = {}
    for part, spans in zip(parts, by_rank, strict=True):
        done = 0
        for start, stop in spans:
            by_start[start] = part.narrow(dim, done, stop - start)
            done += stop - start
    return torch.cat([by_start[start] for start in sorted(by_start)] or [parts[0].narrow(dim, 0, 0)], dim)


def part_of_spans(spans: Spans, start: int, stop: int) -> Spans:
    """Return the ranges of the numbers that are at the places ``start <= i < stop`` among those of `spans`."""
    parts, done = [], 0
    for first, last in spans:
        parts.append((first + max(0, start - done), min(last, first + stop - done)))
        done += last - first
    return join_spans(span for span in parts if span[0] < span[1])


def frame_range(total: int, group: Group = None, sizes: Tensor | Sequence[int] | None = None) -> range:
    """Return the global numbers of this rank's frames out of `total`, in one range, which may be empty.

    `sizes` (total,) are the tokens of each frame, which whole frames on each rank then balance; None: all are equal.
    """
    spans = _spans_of_rank("frame_range", total, group, "contiguous", sizes)
    if spans:
        return range(*spans[0])
    comm = as_communicator(group)
    return range(0) if sizes is not None else range(*frame_bounds(total, comm.size)[comm.rank])


def frame_ranges(
    total: int, group: Group = None, layout: str = "contiguous", sizes: Tensor | Sequence[int] | None = None
) -> tuple[range, ...]:
    """Return the global numbers of this rank's frames out of `total` in a layout: ascending ranges, none empty.

    contiguous: the range of `frame_range`. zigzag: chunks `rank` and ``2 * size - 1 - rank`` of ``2 * size`` chunks,
    the first of which have one frame more if the frames do not divide. The two chunks of the last rank are one range.
    With `sizes` (total,), the tokens of each frame, frames are balanced by tokens: rank 0 takes the first and the last
    frames, half of its tokens from each end, rank 1 those next to them, and so on.
    """
    return tuple(range(*span) for span in _spans_of_rank("frame_ranges", total, group, layout, sizes))


def _spans_of_rank(
    where: str,
    total: int,
    group: Group,
    layout: str,
    sizes: Tensor | Sequence[int] | None,
    held: Sequence[int] | None = None,
) -> Spans:
    if not _is_count(total) or total < 0:
        raise ShapeError(f"{where}: total={total!r}; expected the number of frames, an int of 0 or more")
    comm = as_communicator(group)
    if held is not None:
        layout = APPENDED
        if len(held) != comm.size:
            raise ShapeError(f"{where}: held has {len(held)} numbers; expected one for each of the {comm.size} ranks")
    if sizes is None:
        return FrameSizes(total, held=held).spans(comm.size, layout)[comm.rank]
    counts = torch.as_tensor(sizes)
    counts = counts if counts.numel() else counts.long()  # torch reads an empty list as float32
    if counts.shape != (total,) or counts.is_floating_point() or counts.dtype is torch.bool:
        raise ShapeError(f"{where}: sizes is {tuple(counts.shape)} {counts.dtype}; expected ({total},) integers")
    if total and int(counts.min()) < 1:
        raise ShapeError(f"{where}: sizes has a frame of {int(counts.min())} tokens; every frame needs at least 1")
    return FrameSizes(total, counts, held).spans(comm.size, layout)[comm.rank]


def shard_multiple(size: int, layout: str) -> int:
    """Return the number that the length of a sequence must be a multiple of, to be sharded over `size` ranks."""
    if layout not in LAYOUTS:
        raise ConfigError(f"text_layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    return size if size == 1 or layout != "zigzag" else 2 * size


def padded_length(total: int, size: int, layout: str) -> int:
    """Return the smallest positive length from `total` on that can be sharded over `size` ranks."""
    step = shard_multiple(size, layout)
    return max(step, (total + step - 1) // step * step)


@lru_cache(maxsize=256)
def sequence_positions(total: int, rank: int, size: int, layout: str) -> Tensor:
    """Return the global positions of the tokens of `rank`, ascending, (total / size,) int64 on the CPU.

    zigzag: chunks `rank` and ``2 * size - 1 - rank`` of ``2 * size`` equal chunks; striped: every size-th token from
    `rank` on; contiguous: the rank-th of `size` equal chunks. Zigzag and striped balance causal attention.
    """
    positions = torch.arange(total)
    return torch.cat([positions[span] for span in token_slices(total, rank, size, layout)])


def token_slices(total: int, rank: int, size: int, layout: str) -> list[slice]:
    """Return the tokens of `rank`. Slices, unlike indices, need no tensor that is copied to the device."""
    step = shard_multiple(size, layout)
    if total % step:
        raise ShapeError(
            f"a sequence of {total} tokens cannot be sharded over {size} ranks in the {layout} layout; pad it to a "
            f"multiple of {step}, for example to {padded_length(total, size, layout)}"
        )
    if layout == "striped":
        return [slice(rank, total, size)]
    chunks, numbers = (2 * size, (rank, 2 * size - 1 - rank)) if layout == "zigzag" and size > 1 else (size, (rank,))
    length = total // chunks
    return [slice(number * length, (number + 1) * length) for number in numbers]


def shard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """(..., S, ...), the same on every rank -> this rank's (..., S / n, ...) along `dim`. No communication.

    Raises:
        ShapeError: S is not a multiple of `shard_multiple(n, layout)`.
    """
    comm = as_communicator(group)
    if comm.size == 1:
        shard_multiple(1, layout)  # checks the name of the layout
        return x
    return take_slices(x, dim, token_slices(x.shape[dim], comm.rank, comm.size, layout))


def take_slices(x: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Return the entries of x in these slices along `dim`, a copy."""
    before = (slice(None),) * (dim % x.dim())
    return torch.cat([x[*before, part] for part in slices], dim)


def unshard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """This rank's (..., s, ...) -> (..., n * s, ...) on every rank, in the original order, by one all-gather.

    The inverse of `shard_sequence`. Differentiable: backward sums the ranks' gradients of each token.

    Raises:
        ShapeError, ConfigError: the shard has a length that the layout does not allow, or the layout is unknown; on the
            rank that passes them.
        AgreementError: on every rank if the ranks disagree; on the other ranks if one passes invalid arguments.
    """
    comm = as_communicator(group)

    def check() -> dict[str, object]:
        if not -x.dim() <= dim < x.dim():
            raise ShapeError(f"unshard_sequence: dim={dim}; x has {x.dim()} dimensions, shape {tuple(x.shape)}")
        token_slices(x.shape[dim] * comm.size, comm.rank, comm.size, layout)
        facts = {"shape": tuple(x.shape), "dtype": x.dtype, "dim": dim % x.dim(), "layout": layout}
        return facts | {"gradients": torch.is_grad_enabled() and x.requires_grad}

    agree(comm, "unshard_sequence", check, dict)
    return gather_sequence(x, dim, comm, layout)


def gather_sequence(x: Tensor, dim: int, comm: Communicator, layout: str) -> Tensor:
    """Compute `unshard_sequence` of arguments that are valid, and the same on all ranks."""
    if comm.size == 1:
        return x
    length = x.shape[dim]
    gathered = gather_shards(x, comm)
    if layout == "striped":
        return torch.stack(gathered, dim % x.dim() + 1).flatten(dim % x.dim(), dim % x.dim() + 1)
    if layout == "contiguous":
        return torch.cat(gathered, dim)
    halves = [shard.split(length // 2, dim) for shard in gathered]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)
