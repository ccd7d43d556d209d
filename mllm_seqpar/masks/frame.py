"""FrameMask: which frames each query row sees, as an interval per row or as a table. Expanded per tile only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..comm import Communicator
from ..errors import MaskError
from .dense import dense_tiles
from .intervals import interval_tiles
from .tiles import Tile


class FrameMask:
    """Rows of queries against whole frames of `tokens_per_frame` keys each, in global frame numbers.

    Build it with `from_intervals` or `from_dense`. The tensors live on the CPU: a mask is planned with on the host,
    once for all layers, and only the tiles that need one are expanded on the device.
    """

    def __init__(self, bounds: tuple[Tensor, Tensor] | None, visible: Tensor | None, tokens: int, total: int) -> None:
        self.bounds, self.visible = bounds, visible
        self.tokens_per_frame, self.total_frames = tokens, total
        self._by_group: dict[tuple[Hashable, tuple[tuple[int, int], ...]], FrameBlocks] = {}

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
        table = self._table[:, rows.cpu()]
        bounds = (table[..., 0], table[..., 1]) if self.bounds is not None else None
        return FrameMask(bounds, None if bounds else table, self.tokens_per_frame, self.total_frames)

    def sees_any(self) -> Tensor:
        """(B, s_q) bool: rows that see at least one frame."""
        return self.bounds[1] > self.bounds[0] if self.bounds is not None else self._table.any(-1)

    def tiles(self, start: int, stop: int) -> tuple[Tile, ...]:
        """The tiles of all rows of this mask against the keys of the frames start <= f < stop."""
        if self.bounds is not None:
            return interval_tiles(self.bounds[0] - start, self.bounds[1] - start, stop - start, self.tokens_per_frame)
        return dense_tiles(self._table[..., start:stop], self.tokens_per_frame)

    def has_blocks(self, comm: Communicator, frames: Sequence[tuple[int, int]]) -> bool:
        """Whether `blocks` was called with these arguments before and needs no transfer."""
        return (comm.identity, tuple(frames)) in self._by_group

    def blocks(self, comm: Communicator, frames: Sequence[tuple[int, int]], *, anew: bool = False) -> FrameBlocks:
        """The tiles of every block, when this mask's rows are this rank's and rank j holds the frames frames[j].

        The other ranks' rows are gathered on the first call for a group and kept, for all layers. `anew` gathers them
        again: all ranks must gather when one of them has to, and only the caller can know that (`has_blocks`).
        """
        key = (comm.identity, tuple(frames))
        if anew or key not in self._by_group:
            table = self._table.to(comm.device)
            gathered = [part.cpu() for part in comm.all_gather(table, "mask")]
            masks = [
                FrameMask((t[..., 0], t[..., 1]), None, self.tokens_per_frame, self.total_frames)
                if self.bounds is not None
                else FrameMask(None, t, self.tokens_per_frame, self.total_frames)
                for t in gathered
            ]
            self._by_group[key] = FrameBlocks(masks, frames)
        return self._by_group[key]


class FrameBlocks:
    """The tiles of every block: `masks[i]` are the rows of rank i, `frames[j]` the (start, stop) frames of rank j."""

    def __init__(self, masks: Sequence[FrameMask], frames: Sequence[tuple[int, int]]) -> None:
        self.masks, self.frames = list(masks), list(frames)
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def tiles(self, row: int, column: int) -> tuple[Tile, ...]:
        """Planned on first use, then kept for the other layers and for the backward pass."""
        if (row, column) not in self._tiles:
            self._tiles[row, column] = self.masks[row].tiles(*self.frames[column])
        return self._tiles[row, column]


def _check_counts(where: str, tokens: int, frames: int) -> None:
    if tokens < 1 or frames < 0:
        raise MaskError(f"FrameMask.{where}: tokens_per_frame={tokens}, frames={frames}; the least is 1 and 0")
