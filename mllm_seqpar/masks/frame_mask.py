"""FrameMask: which frames each query row sees, as an interval per row or as a table. Expanded per tile only."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import MaskError

from .dense import dense_rectangles
from .intervals import interval_rectangles
from .rectangles import Rectangle
from .row_subset import RowSubset


class FrameMask:
    """Rows of queries against whole frames of `tokens_per_frame` keys each, in global frame numbers.

    Build it with `from_intervals` or `from_dense`. The tensors live on the CPU: a mask is planned with on the host,
    once for all layers, and only the tiles that need one are expanded on the device.
    """

    def __init__(self, bounds: tuple[Tensor, Tensor] | None, visible: Tensor | None, tokens: int, total: int) -> None:
        self.bounds, self.visible = bounds, visible
        self.tokens_per_frame, self.total_frames = tokens, total
        self._by_group: dict[tuple[Hashable, tuple[tuple[int, int], ...]], tuple[int, FrameBlockMasks]] = {}
        self._tiles: dict[tuple[int, int], tuple[Rectangle, ...]] = {}
        self._folded: FrameMask | None = None

    @classmethod
    def from_intervals(cls, first: Tensor, stop: Tensor, tokens_per_frame: int, total_frames: int) -> FrameMask:
        """Row (b, r) sees the frames ``first[b, r] <= f < stop[b, r]``; with stop <= first it sees none.

        Args:
            first, stop: (B, s_q) integers, global frame numbers.
            tokens_per_frame: keys of one frame.
            total_frames: frames of all ranks together.

        Raises:
            MaskError: shapes or dtypes that do not fit, or a row that sees frames that do not exist.
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
        sees = stop > first
        if bool((sees & ((first < 0) | (stop > total_frames))).any()):
            raise MaskError(
                f"FrameMask.from_intervals: a row sees frames {int(first[sees].min())} to {int(stop[sees].max()) - 1}, "
                f"but there are {total_frames} frames, numbered from 0"
            )
        return cls((first.masked_fill(~sees, 0), stop.masked_fill(~sees, 0)), None, tokens_per_frame, total_frames)

    @classmethod
    def from_dense(cls, visible: Tensor, tokens_per_frame: int) -> FrameMask:
        """Row (b, r) sees frame f when ``visible[b, r, f]``; visible (B, s_q, F) bool, F all frames of all ranks."""
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

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, query rows)."""
        return self._table.shape[0], self._table.shape[1]

    def take(self, rows: Tensor) -> FrameMask:
        """The mask of the rows whose indices are given, (s,) int64, in that order."""
        return self._of(self._table[:, rows.cpu()])

    @staticmethod
    def joined(masks: Sequence[FrameMask]) -> FrameMask:
        """The mask of the rows of several, one after another; all of the same frames and form."""
        return masks[0]._of(torch.cat([mask._table for mask in masks], dim=1))

    def folded(self) -> FrameMask:
        """The same with the batch folded into the rows, item after item: (1, B * s_q)."""
        if self.shape[0] == 1:
            return self
        if self._folded is None:
            self._folded = self._of(self._table.flatten(0, 1).unsqueeze(0))
        return self._folded

    def _of(self, table: Tensor) -> FrameMask:
        """Other rows of the same frames, given as `_table` is."""
        bounds = (table[..., 0], table[..., 1]) if self.bounds is not None else None
        return FrameMask(bounds, None if bounds else table, self.tokens_per_frame, self.total_frames)

    def share_of(self, start: int, stop: int) -> float:
        """Of all rows and the frames start <= f < stop, the share of those that see each other."""
        if stop <= start or not self._table.numel():
            return 0.0
        if self.bounds is None:
            return float(self._table[..., start:stop].float().mean())
        seen = self.bounds[1].clamp(max=stop) - self.bounds[0].clamp(min=start)
        return float(seen.clamp(min=0).float().mean()) / (stop - start)

    def sees_any(self) -> Tensor:
        """(B, s_q) bool: rows that see at least one frame."""
        return self.sees(0, self.total_frames)

    def sees(self, start: int, stop: int) -> Tensor:
        """(B, s_q) bool: rows that see at least one of the frames start <= f < stop."""
        if self.bounds is not None:
            return self.bounds[0].clamp(min=start) < self.bounds[1].clamp(max=stop)
        if stop <= start:
            return self._table.new_zeros(self.shape)
        return self._table[..., start:stop].view(torch.uint8).amax(-1).bool()  # `any` takes 30 times as long

    def tiles(self, start: int, stop: int) -> tuple[Rectangle, ...]:
        """The tiles of all rows against the keys of the frames start <= f < stop; planned once, then kept."""
        if (start, stop) not in self._tiles:
            self._tiles[start, stop] = (
                dense_rectangles(self._table[..., start:stop], self.tokens_per_frame)
                if self.bounds is None
                else interval_rectangles(
                    self.bounds[0] - start, self.bounds[1] - start, stop - start, self.tokens_per_frame
                )
            )
        return self._tiles[start, stop]

    def known_as(self, comm: Communicator, frames: Sequence[tuple[int, int]]) -> int:
        """A number for the rows of all ranks that `blocks` keeps for these arguments; 0: none yet.

        Ranks whose numbers differ keep the rows of different calls: some used a mask again, and others another one.
        """
        kept = self._by_group.get((comm.identity, tuple(frames)))
        return 0 if kept is None else kept[0]

    def blocks(self, comm: Communicator, frames: Sequence[tuple[int, int]], *, anew: bool = False) -> FrameBlockMasks:
        """The tiles of every block, when this mask's rows are this rank's and rank j holds the frames frames[j].

        The other ranks' rows are gathered on the first call for a group and kept, for all layers. `anew` gathers them
        again: all ranks must gather when one of them has to, and only the caller can know that (`known_as`).
        """
        key = (comm.identity, tuple(frames))
        if anew or key not in self._by_group:
            table = self._table.to(comm.device)
            gathered = [part.cpu() for part in comm.all_gather(table, "mask")]
            number = 1
            for part in gathered:
                number = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, number)
            self._by_group[key] = max(number, 1), FrameBlockMasks([self._of(part) for part in gathered], frames)
        return self._by_group[key][1]


class FrameBlockMasks:
    """The tiles of every block: `masks[i]` are the rows of rank i, `frames[j]` the (start, stop) frames of rank j.

    Everything is planned on first use, then kept for the other layers and for the backward pass.
    """

    def __init__(self, masks: Sequence[FrameMask], frames: Sequence[tuple[int, int]]) -> None:
        self.masks, self.frames = list(masks), list(frames)
        self._rows: dict[tuple[int, int], RowSubset | None] = {}
        self._packed: dict[tuple[int, int], tuple[Rectangle, ...]] = {}
        self._folded: FrameBlockMasks | None = None
        self._merged: dict[int, tuple[Sequence[Tensor] | None, FrameBlockMasks]] = {}

    keys_are_rows = False

    @cached_property
    def prunes(self) -> bool:
        """Whether any row sees nothing of a rank that is not its own."""
        pairs = itertools.product(range(len(self.masks)), range(len(self.frames)))
        return any(i != j and self.rows(i, j) is not None for i, j in pairs)

    @cached_property
    def share(self) -> float:
        """Of all rows and frames, the share of those that see each other."""
        total = self.frames[-1][1]
        return sum(mask.share_of(0, total) for mask in self.masks) / len(self.masks)

    def shares(self) -> list[list[float]]:
        """[i][j]: of the rows of rank i and the frames of rank j, the share of those that see each other."""
        return [[mask.share_of(*frames) for frames in self.frames] for mask in self.masks]

    def counts(self) -> list[list[int]]:
        """[i][j]: how many rows of rank i, of all batch items, see a frame of rank j."""
        folded, ranks = self.folded(), range(len(self.masks))
        all_rows = folded.masks[0].shape[1]
        return [[all_rows if (rows := folded.rows(i, j)) is None else rows.count for j in ranks] for i in ranks]

    def tiles(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """Those of the mask of rank `row` against the frames of rank `column`."""
        return self.masks[row].tiles(*self.frames[column])

    def rows(self, row: int, column: int) -> RowSubset | None:
        """The rows of rank `row` that see a frame of rank `column` in any batch item; None: all of them."""
        if (row, column) not in self._rows:
            seen = self.masks[row].sees(*self.frames[column]).any(0)
            self._rows[row, column] = None if bool(seen.all()) else RowSubset(seen.nonzero().flatten())
        return self._rows[row, column]

    def packed(self, row: int, column: int) -> tuple[Rectangle, ...]:
        """The tiles of those rows alone: planned anew, since rows that were apart may now share a tile."""
        rows = self.rows(row, column)
        if rows is None:
            return self.tiles(row, column)
        if (row, column) not in self._packed:
            self._packed[row, column] = self.masks[row].take(rows.index).tiles(*self.frames[column])
        return self._packed[row, column]

    def folded(self) -> FrameBlockMasks:
        """With the batch of every rank's mask folded into its rows."""
        if self.masks[0].shape[0] == 1:
            return self
        if self._folded is None:
            self._folded = FrameBlockMasks([mask.folded() for mask in self.masks], self.frames)
        return self._folded

    def orders(self, size: int, device: torch.device) -> None:
        """Any order will do."""

    def merged(self, size: int, orders: Sequence[Tensor] | None) -> FrameBlockMasks:
        """The frames of consecutive ranks are consecutive; kept for the other layers."""
        if size not in self._merged or self._merged[size][0] is not orders:
            starts = range(0, len(self.masks), size)
            masks = [FrameMask.joined(self.masks[i : i + size]) for i in starts]
            if orders is not None:
                masks = [mask.take(order) for mask, order in zip(masks, orders, strict=True)]
            frames = [(self.frames[i][0], self.frames[i + size - 1][1]) for i in starts]
            self._merged[size] = orders, FrameBlockMasks(masks, frames)
        return self._merged[size][1]


def _check_counts(where: str, tokens: int, frames: int) -> None:
    whole = all(isinstance(count, int) and not isinstance(count, bool) for count in (tokens, frames))
    if not whole or tokens < 1 or frames < 0:
        raise MaskError(
            f"FrameMask.{where}: tokens_per_frame={tokens!r}, frames={frames!r}; both are ints, the least is 1 and 0"
        )
