"""FrameMask: which frames each query row attends to, as one interval per row or as a table."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import MaskError
from mllm_seqpar.sharding import Spans, join_spans, span_length, take_spans

from .block_masks import BlockMasks, RankGroups, RowSubset
from .rectangles import Rectangle, dense_rectangles, interval_rectangles


class FrameMask:
    """Query rows against whole frames of `tokens_per_frame` keys each, in global frame numbers.

    In families whose frames have several mask units (image tiles), each unit counts as a frame here.

    Build it with `from_intervals` or `from_dense`. Its tensors live on the CPU, because rectangles are planned on the
    host, once for all layers. Only rectangles that need a mask are expanded on the device.
    """

    def __init__(self, bounds: tuple[Tensor, Tensor] | None, visible: Tensor | None, tokens: int, total: int) -> None:
        self.bounds, self.visible = bounds, visible
        self.tokens_per_frame, self.total_frames = tokens, total
        self._by_group: dict[tuple[Hashable, tuple[Spans, ...]], tuple[int, FrameBlockMasks]] = {}
        self._rectangles: dict[Spans, tuple[Rectangle, ...]] = {}
        self._folded: FrameMask | None = None

    @classmethod
    def from_intervals(cls, first: Tensor, stop: Tensor, tokens_per_frame: int, total_frames: int) -> FrameMask:
        """Create a mask in which row (b, r) attends to the frames ``first[b, r] <= f < stop[b, r]``.

        A row with stop <= first attends to no frame.

        Args:
            first, stop: (B, s_q) integers, global frame numbers.
            tokens_per_frame: keys of one frame.
            total_frames: frames of all ranks together.

        Raises:
            MaskError: wrong shapes or dtypes, or a row that attends to frames that do not exist.
        """
        if not (isinstance(first, Tensor) and isinstance(stop, Tensor)):
            raise MaskError(
                f"FrameMask.from_intervals: first is {type(first).__name__}, stop is {type(stop).__name__}; both must "
                "be tensors of integers"
            )
        if first.shape != stop.shape or first.dim() != 2 or first.is_floating_point() or stop.is_floating_point():
            raise MaskError(
                f"FrameMask.from_intervals: first is {tuple(first.shape)} {first.dtype}, stop is {tuple(stop.shape)} "
                f"{stop.dtype}; both must be integers of shape (batch, query rows)"
            )
        _check_counts("from_intervals", tokens_per_frame, total_frames)
        first, stop = first.detach().long().cpu(), stop.detach().long().cpu()
        visible = stop > first
        if bool((visible & ((first < 0) | (stop > total_frames))).any()):
            raise MaskError(
                f"FrameMask.from_intervals: a row attends to frames {int(first[visible].min())} to "
                f"{int(stop[visible].max()) - 1}, but there are {total_frames} frames, numbered from 0"
            )
        bounds = first.masked_fill(~visible, 0), stop.masked_fill(~visible, 0)
        return cls(bounds, None, tokens_per_frame, total_frames)

    @classmethod
    def from_dense(cls, visible: Tensor, tokens_per_frame: int) -> FrameMask:
        """Create a mask in which row (b, r) attends to frame f if ``visible[b, r, f]``.

        Args:
            visible: (B, s_q, F) bool, F = all frames of all ranks.
            tokens_per_frame: keys of one frame.

        Raises:
            MaskError: wrong shape or dtype.
        """
        if visible.dim() != 3 or visible.dtype is not torch.bool:
            raise MaskError(
                f"FrameMask.from_dense: visible is {tuple(visible.shape)} {visible.dtype}; "
                "it must be bool of shape (batch, query rows, frames of all ranks)"
            )
        _check_counts("from_dense", tokens_per_frame, visible.shape[-1])
        return cls(None, visible.detach().cpu(), tokens_per_frame, visible.shape[-1])

    @cached_property
    def _table(self) -> Tensor:
        table = torch.stack(self.bounds, -1) if self.bounds is not None else self.visible
        assert table is not None
        return table

    def _with_table(self, table: Tensor) -> FrameMask:
        """Return a mask of other rows of the same frames, given in the form of `_table`."""
        bounds = (table[..., 0], table[..., 1]) if self.bounds is not None else None
        return FrameMask(bounds, None if bounds else table, self.tokens_per_frame, self.total_frames)

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, query rows)."""
        return self._table.shape[0], self._table.shape[1]

    def equals(self, other: FrameMask) -> bool:
        """Return whether both masks have the same form and the same entries."""
        numbers = [(x.tokens_per_frame, x.total_frames, x.bounds is None) for x in (self, other)]
        return numbers[0] == numbers[1] and torch.equal(self._table, other._table)

    def take(self, rows: Tensor) -> FrameMask:
        """Return the mask of the rows with the given indices, (s,) int64, in that order."""
        return self._with_table(self._table[:, rows.cpu()])

    def take_frames(self, frames: Tensor) -> FrameMask:
        """Return the mask of the frames with the given numbers, (F,) int64, in that order."""
        if self.bounds is None:
            visible = self._table[..., frames]
        else:
            first, stop = (bound.unsqueeze(-1) for bound in self.bounds)
            visible = (first <= frames) & (frames < stop)
        return FrameMask(None, visible, self.tokens_per_frame, frames.numel())

    @staticmethod
    def cat(masks: Sequence[FrameMask]) -> FrameMask:
        """Concatenate the rows of masks that have the same frames and form."""
        return masks[0]._with_table(torch.cat([mask._table for mask in masks], dim=1))

    def folded(self) -> FrameMask:
        """Return the mask with the batch folded into the rows, item after item: (1, B * s_q)."""
        if self.shape[0] == 1:
            return self
        if self._folded is None:
            self._folded = self._with_table(self._table.flatten(0, 1).unsqueeze(0))
        return self._folded

    def visible_fraction(self, frames: Spans) -> float:
        """Return the fraction of the pairs of a row and one of these frames that are visible."""
        if not frames or not self._table.numel():
            return 0.0
        if self.bounds is None:
            return float(self._columns(frames).float().mean())
        first, stop = count_before(self._table, frames).unbind(-1)
        return float((stop - first).clamp(min=0).float().mean()) / span_length(frames)

    def any_frame_visible(self, frames: Spans | None = None) -> Tensor:
        """Return (B, s_q) bool: True for rows that attend to any of these frames (None: of all frames)."""
        frames = ((0, self.total_frames),) if frames is None else frames
        if self.bounds is not None:
            first, stop = count_before(self._table, frames).unbind(-1)
            return first < stop
        visible = self._table.new_zeros(self.shape)
        for begin, end in frames:
            if begin < end:  # `any` takes 30 times as long as `amax`
                visible |= self._table[..., begin:end].view(torch.uint8).amax(-1).bool()
        return visible

    def rectangles(self, frames: Spans) -> tuple[Rectangle, ...]:
        """Return the rectangles of all rows against the keys of these ranges of frames, one range after another."""
        if frames not in self._rectangles:
            if self.bounds is None:
                found = dense_rectangles(self._columns(frames), self.tokens_per_frame)
            else:
                found, units = (), 0
                for ascending in _ascending(frames):  # of these frames, a row attends to one interval too
                    low, high = count_before(self._table, ascending).unbind(-1)
                    count = span_length(ascending)
                    found += interval_rectangles(low, high, count, self.tokens_per_frame, first=units)
                    units += count
            self._rectangles[frames] = found
        return self._rectangles[frames]

    def _columns(self, frames: Spans) -> Tensor:
        """Return the table (B, s_q, f) of these frames; a view if they are one range."""
        return take_spans(self._table, frames, dim=-1)

    def gathered_digest(self, comm: Communicator, frames: Sequence[Spans]) -> int:
        """Return a checksum of the rows of all ranks that `blocks` keeps for these arguments; 0 if it keeps none.

        If the checksums of the ranks differ, the ranks keep rows of different calls: some ranks used a mask again,
        while others used a new one.
        """
        kept = self._by_group.get((comm.identity, tuple(frames)))
        return 0 if kept is None else kept[0]

    def blocks(self, comm: Communicator, frames: Sequence[Spans], *, refresh: bool = False) -> FrameBlockMasks:
        """Return the masks of every block. This mask has this rank's rows; rank j holds the frames ``frames[j]``.

        The first call for a group gathers the rows of the other ranks and keeps them for all layers. `refresh` gathers
        them again. All ranks must do so if one of them has to, which the caller finds by `gathered_digest`.
        """
        key = (comm.identity, tuple(frames))
        if refresh or key not in self._by_group:
            table = self._table.to(comm.control_device)
            gathered = [shard.cpu() for shard in comm.all_gather(table, "mask")]
            digest = 1
            for shard in gathered:
                digest = zlib.crc32(shard.contiguous().view(torch.uint8).numpy().data, digest)
            blocks = FrameBlockMasks([self._with_table(shard) for shard in gathered], frames)
            self._by_group[key] = max(digest, 1), blocks
        return self._by_group[key][1]


class FrameBlockMasks(BlockMasks):
    """The frame masks of every block: ``masks[i]`` has the rows of rank i, ``frames[j]`` the ranges of rank j."""

    def __init__(self, masks: Sequence[FrameMask], frames: Sequence[Spans]) -> None:
        self.masks, self.frames = list(masks), list(frames)
        self._visible_rows: dict[tuple[int, int], RowSubset | None] = {}
        self._pruned: dict[tuple[int, int], tuple[Rectangle, ...]] = {}
        self._folded: FrameBlockMasks | None = None
        self._merged: dict[RankGroups, tuple[Sequence[Tensor] | None, FrameBlockMasks]] = {}

    @cached_property
    def prunes(self) -> bool:
        pairs = itertools.product(range(len(self.masks)), range(len(self.frames)))
        return any(i != j and self.visible_rows(i, j) is not None for i, j in pairs)

    @cached_property
    def visible_fraction(self) -> float:
        """The fraction of all pairs of a row and a frame that are visible."""
        every = ((0, self.masks[0].total_frames),)
        return sum(mask.visible_fraction(every) for mask in self.masks) / len(self.masks)

    def visible_fractions(self) -> list[list[float]]:
        """Return [i][j]: the fraction of the pairs of a row of rank i and a frame of rank j that are visible."""
        return [[mask.visible_fraction(frames) for frames in self.frames] for mask in self.masks]

    def visible_row_counts(self) -> list[list[int]]:
        """Return [i][j]: how many rows of rank i, of all batch items, attend to any frame of rank j."""
        folded, ranks = self.folded(), range(len(self.masks))
        total = folded.masks[0].shape[1]
        return [[total if (rows := folded.visible_rows(i, j)) is None else rows.count for j in ranks] for i in ranks]

    def rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        return self.masks[q_shard].rectangles(self.frames[kv_shard])

    def visible_rows(self, q_shard: int, kv_shard: int) -> RowSubset | None:
        if (q_shard, kv_shard) not in self._visible_rows:
            visible = self.masks[q_shard].any_frame_visible(self.frames[kv_shard]).any(0)
            subset = None if bool(visible.all()) else RowSubset(visible.nonzero().flatten())
            self._visible_rows[q_shard, kv_shard] = subset
        return self._visible_rows[q_shard, kv_shard]

    def pruned_rectangles(self, q_shard: int, kv_shard: int) -> tuple[Rectangle, ...]:
        rows = self.visible_rows(q_shard, kv_shard)
        if rows is None:
            return self.rectangles(q_shard, kv_shard)
        if (q_shard, kv_shard) not in self._pruned:
            # Planned for the subset, because rows that were apart may now share a rectangle.
            pruned = self.masks[q_shard].take(rows.index)
            self._pruned[q_shard, kv_shard] = pruned.rectangles(self.frames[kv_shard])
        return self._pruned[q_shard, kv_shard]

    @cached_property
    def common_keys(self) -> slice | None:
        """The keys that every row of a group of one attends to, if no row attends to others; None otherwise."""
        folded = self.folded()
        found, rows = folded.rectangles(0, 0), folded.masks[0].shape[1]
        whole = [(r.batch, r.rows, r.kind, r.gathered) for r in found] == [((0, 1), (0, rows), "full", None)]
        return slice(*found[0].keys) if whole else None

    def folded(self) -> FrameBlockMasks:
        if self.masks[0].shape[0] == 1:
            return self
        if self._folded is None:
            self._folded = FrameBlockMasks([mask.folded() for mask in self.masks], self.frames)
        return self._folded

    def merged(self, groups: RankGroups, orders: Sequence[Tensor] | None) -> FrameBlockMasks:
        """Return the masks with each group of ranks as one rank, which has the frames of one rank after another."""
        if groups not in self._merged or self._merged[groups][0] is not orders:
            masks = [FrameMask.cat([self.masks[rank] for rank in group]) for group in groups]
            if orders is not None:
                masks = [mask.take(order) for mask, order in zip(masks, orders, strict=True)]
            frames = [join_spans(itertools.chain(*(self.frames[rank] for rank in group))) for group in groups]
            self._merged[groups] = orders, FrameBlockMasks(masks, frames)
        return self._merged[groups][1]


def count_before(numbers: Tensor, frames: Spans) -> Tensor:
    """Return how many of these frames, which are in ascending order, are before each frame number."""
    count: Tensor | None = None
    for start, stop in frames:
        before = (numbers - start).clamp(0, stop - start)
        count = before if count is None else count + before
    return torch.zeros_like(numbers) if count is None else count


def _ascending(frames: Spans) -> list[Spans]:
    """Return the frames as lists of ranges in ascending order, as long as possible."""
    runs: list[Spans] = []
    for span in frames:
        if runs and runs[-1][-1][1] <= span[0]:
            runs[-1] += (span,)
        else:
            runs.append((span,))
    return runs


def _check_counts(where: str, tokens: int, frames: int) -> None:
    integers = all(isinstance(count, int) and not isinstance(count, bool) for count in (tokens, frames))
    if not integers or tokens < 1 or frames < 0:
        raise MaskError(
            f"FrameMask.{where}: tokens_per_frame={tokens!r}, frames={frames!r}; expected integers of at least 1 and 0"
        )
