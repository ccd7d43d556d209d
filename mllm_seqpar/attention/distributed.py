"""Distributed attention over one set of keys: what the executor moves and computes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm import Communicator
from ..masks import Blocks, Tile, clip_rows
from .block import BlockMath, Partial, Sum, fold, unfold
from .executor import Bundle, run_schedule
from .schedule import Axis, Block, schedule_for


@dataclass(frozen=True)
class Plan:
    """All that is known about one set of keys before its tensors are: the same on every rank.

    Attributes:
        tile: (a, b), how many ranks' rows and columns a rank computes with: (n, 1) moves rows, (1, n) columns.
        blocks: the visible tiles of every block.
        key_lengths: keys that each rank holds.
        accumulate_dtype: what O, dQ, dK, dV are summed in and travel in.
        overlap: transfers under computation.
    """

    tile: tuple[int, int]
    blocks: Blocks
    key_lengths: tuple[int, ...]
    accumulate_dtype: torch.dtype
    overlap: bool = True

    def folded(self) -> Plan:
        """The same for queries whose batch is folded into their rows (`block.fold`)."""
        return replace(self, blocks=self.blocks.folded())


def block_tiles(blocks: Blocks, block: Block, rows: int) -> list[Tile]:
    """The tiles of a block, cut to the part of its query rows that the schedule asks for."""
    tiles = blocks.tiles(block.row, block.column)
    if block.parts == 1:
        return list(tiles)
    start, stop = rows * block.part // block.parts, rows * (block.part + 1) // block.parts
    return [part for tile in tiles for part in clip_rows(tile, start, stop)]


class _Forward:
    """Rows carry q ahead and (o, lse) behind; columns carry k and v ahead."""

    def __init__(self, plan: Plan, math: BlockMath, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.plan, self.math, self.q = plan, math, q
        self.home: Mapping[Axis, Bundle] = {"rows": {"q": q}, "columns": {"k": k, "v": v}}
        self._partials: dict[int, Partial] = {}

    def shape(self, axis: Axis, owner: int, like: Tensor) -> tuple[int, ...]:
        return _shape(axis, owner, like, self.plan)

    def partial(self, row: int) -> Partial:
        if row not in self._partials:
            self._partials[row] = Partial(self.q, self.plan.accumulate_dtype)
        return self._partials[row]

    def compute(self, block: Block, rows: Bundle, columns: Bundle) -> None:
        tiles = block_tiles(self.plan.blocks, block, rows["q"].shape[2])
        self.math.forward(rows["q"], columns["k"], columns["v"], tiles, self.partial(block.row))

    def result(self, axis: Axis, owner: int) -> Bundle:
        o, lse = self.partial(owner).value
        del self._partials[owner]
        return {"o": o, "lse": lse}

    def arrived(self, axis: Axis, owner: int, bundle: Bundle) -> None:
        partial = self.partial(owner)
        partial.value  # noqa: B018 - what arrived is a buffer to be used again: merged into ours, never adopted
        partial.add(bundle["o"], bundle["lse"])


class _Backward:
    """Rows carry q, o, do, lse ahead and dq behind; columns carry k, v ahead and dk, dv behind."""

    def __init__(
        self,
        plan: Plan,
        math: BlockMath,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
    ) -> None:
        q, o, lse, do = saved
        self.plan, self.math = plan, math
        self.home: Mapping[Axis, Bundle] = {
            "rows": {"q": q, "o": o, "do": do, "lse": lse},
            "columns": {"k": k, "v": v},
        }
        self._sums: dict[tuple[str, int], Sum] = {}

    def shape(self, axis: Axis, owner: int, like: Tensor) -> tuple[int, ...]:
        return _shape(axis, owner, like, self.plan)

    def total(self, name: str, owner: int, like: Tensor) -> Sum:
        if (name, owner) not in self._sums:
            self._sums[name, owner] = Sum(like, self.plan.accumulate_dtype)
        return self._sums[name, owner]

    def compute(self, block: Block, rows: Bundle, columns: Bundle) -> None:
        q, k, v = rows["q"], columns["k"], columns["v"]
        grads = (
            self.total("dq", block.row, q),
            self.total("dk", block.column, k),
            self.total("dv", block.column, v),
        )
        tiles = block_tiles(self.plan.blocks, block, q.shape[2])
        self.math.backward(grads, rows["do"], q, k, v, rows["o"], rows["lse"], tiles)

    def result(self, axis: Axis, owner: int) -> Bundle:
        names = ("dq",) if axis == "rows" else ("dk", "dv")
        return {name: self._sums.pop((name, owner)).value for name in names}

    def arrived(self, axis: Axis, owner: int, bundle: Bundle) -> None:
        for name, tensor in bundle.items():
            total = self._sums[name, owner]
            total.value.add_(tensor)


def _shape(axis: Axis, owner: int, like: Tensor, plan: Plan) -> tuple[int, ...]:
    """Rows are as long on every rank; a rank's columns are as long as it has keys."""
    return tuple(like.shape) if axis == "rows" else (*like.shape[:2], plan.key_lengths[owner], *like.shape[3:])


def distributed_forward(
    comm: Communicator, plan: Plan, math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This rank's q, k, v, contiguous -> (o in plan.accumulate_dtype, lse) of its rows over all ranks' keys.

    Where k and v have a batch of 1 and q has not, its batch is folded into its rows for as long as this takes.
    """
    if k.shape[0] < q.shape[0]:
        o, lse = distributed_forward(comm, plan.folded(), math, fold(q), k, v)
        return unfold(o, q.shape[0]), unfold(lse, q.shape[0])
    work = _Forward(plan, math, q, k, v)
    run_schedule(schedule_for(plan.tile, comm.rank, backward=False), comm, work, overlap=plan.overlap)
    return work.partial(comm.rank).value


def distributed_backward(
    comm: Communicator,
    plan: Plan,
    math: BlockMath,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, o, lse, do) of this rank's rows, final, and its k, v -> dq of its rows, dk and dv of its keys, in float32."""
    q, o, lse, do = saved
    if k.shape[0] < q.shape[0]:
        folded = fold(q), fold(o), fold(lse), fold(do)
        dq, dk, dv = distributed_backward(comm, plan.folded(), math, folded, k, v)
        return unfold(dq, q.shape[0]), dk, dv
    work = _Backward(plan, math, saved, k, v)
    run_schedule(schedule_for(plan.tile, comm.rank, backward=True), comm, work, overlap=plan.overlap)
    pieces = (("dq", q), ("dk", k), ("dv", v))
    dq, dk, dv = (work.total(name, comm.rank, like).value for name, like in pieces)
    return dq, dk, dv
