"""Distributed attention over one set of keys: what the executor moves and computes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import BlockMasks, Rectangle, RowSubset, clip_rows
from mllm_seqpar.schedules import AttentionBlock, Axis, OverlapRatios, Schedule, Transfer, schedule_for

from .block_math import BlockMath, GradientAccumulator, PartialResult, Places, fold, unfold
from .executor import Bundle, run_schedule


@dataclass(frozen=True)
class CallSpec:
    """All that is known about one set of keys before its tensors are: the same on every rank.

    Attributes:
        tile: (a, b), how many ranks' rows and columns a rank computes with: (n, 1) moves rows, (1, n) columns, others
            both; (1, 1): every rank computes its own rows with its own columns, and nothing moves.
        blocks: the visible tiles of every block.
        key_lengths: keys that each rank holds.
        accumulate_dtype: what O, dQ, dK, dV are summed in and travel in.
        overlap: transfers under computation.
        heads: how many consecutive ranks deal the heads among themselves first (`attention.heads`); the tile is then
            one of n / heads ranks.
        hides: what a mesh's order of steps is worked out for, forward and backward.
    """

    tile: tuple[int, int]
    blocks: BlockMasks
    key_lengths: tuple[int, ...]
    accumulate_dtype: torch.dtype
    overlap: bool = True
    heads: int = 1
    overlap_ratios: tuple[OverlapRatios, OverlapRatios] = (OverlapRatios(), OverlapRatios())

    @property
    def direct(self) -> bool:
        """Whether rows go straight to the ranks whose keys they see: where they move, and the mask spares any."""
        return self.tile[0] > 1 and self.tile[1] == 1 and self.blocks.prunes

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        """What a rank does at each step."""
        return schedule_for(
            self.tile, rank, backward=backward, direct=self.direct, overlap_ratios=self.overlap_ratios[backward]
        )

    def folded(self) -> CallSpec:
        """The same for queries whose batch is folded into their rows (`block.fold`)."""
        return replace(self, blocks=self.blocks.folded())


class _Travelling:
    """Which part of a piece travels between two ranks, and the tiles of the blocks that come out.

    Where the mask prunes, rows go straight to each rank, and of them only those that see any of its keys; results are
    of just those rows. Masks are known to all ranks, so both ends of a transfer cut the same rows.
    """

    def __init__(self, plan: CallSpec, math: BlockMath, rank: int, home: Mapping[Axis, Bundle]) -> None:
        self.plan, self.math, self.rank, self.home = plan, math, rank, home

    def leaving(self, move: Transfer, piece: Bundle) -> Bundle:
        rows = self._rows(move.send_shard, move.dst)
        return piece if rows is None else {name: rows.select(x) for name, x in piece.items()}

    def shape(self, move: Transfer, like: Tensor) -> tuple[int, ...]:
        if move.axis == "kv":
            length = self.plan.key_lengths[move.recv_shard]
        else:
            rows = self._rows(move.recv_shard, self.rank if move.kind == "input" else move.src)
            length = self.home["q"]["q"].shape[2] if rows is None else rows.count
        return (*like.shape[:2], length, *like.shape[3:])

    def places(self, move: Transfer, device: torch.device) -> Places:
        """The rows of the piece at home that a result is for, which `move` brought."""
        rows = self._rows(move.recv_shard, move.src) if move.axis == "q" else None
        return slice(None) if rows is None else rows.index_on(device)

    def tiles(self, block: AttentionBlock) -> Sequence[Rectangle]:
        """The tiles of a block, cut to the part of its query rows that the schedule asks for."""
        if self.plan.direct and block.q_shard != block.kv_shard:
            return self.plan.blocks.pruned_rectangles(block.q_shard, block.kv_shard)
        tiles = self.plan.blocks.rectangles(block.q_shard, block.kv_shard)
        if block.parts == 1:
            return tiles
        rows = self.home["q"]["q"].shape[2]
        start, stop = rows * block.part // block.parts, rows * (block.part + 1) // block.parts
        return [part for tile in tiles for part in clip_rows(tile, start, stop)]

    def _rows(self, row: int, column: int) -> RowSubset | None:
        return self.plan.blocks.visible_rows(row, column) if self.plan.direct else None


class _Forward(_Travelling):
    """Rows carry q ahead and (o, lse) behind; columns carry k and v ahead."""

    def __init__(self, plan: CallSpec, math: BlockMath, rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(plan, math, rank, {"q": {"q": q}, "kv": {"k": k, "v": v}})
        self._partials: dict[int, PartialResult] = {}

    def partial(self, row: int, q: Tensor) -> PartialResult:
        if row not in self._partials:
            self._partials[row] = PartialResult(q, self.plan.accumulate_dtype)
        return self._partials[row]

    def compute(self, block: AttentionBlock, rows: Bundle, columns: Bundle) -> None:
        out = self.partial(block.q_shard, rows["q"])
        self.math.forward(rows["q"], columns["k"], columns["v"], self.tiles(block), out)

    def result(self, axis: Axis, owner: int) -> Bundle:
        o, lse = self._partials.pop(owner).value
        return {"o": o, "lse": lse}

    def arrived(self, move: Transfer, bundle: Bundle) -> None:
        partial = self._partials[move.recv_shard]
        partial.value  # noqa: B018 - what arrived is a buffer to be used again: merged into ours, never adopted
        partial.add(bundle["o"], bundle["lse"], rows=self.places(move, bundle["o"].device))


class _Backward(_Travelling):
    """Rows carry q, o, do, lse ahead and dq behind; columns carry k, v ahead and dk, dv behind."""

    def __init__(
        self,
        plan: CallSpec,
        math: BlockMath,
        rank: int,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
    ) -> None:
        rows: Bundle = dict(zip(("q", "o", "lse", "do"), saved, strict=True))
        super().__init__(plan, math, rank, {"q": rows, "kv": {"k": k, "v": v}})
        self._sums: dict[tuple[str, int], GradientAccumulator] = {}

    def total(self, name: str, owner: int, like: Tensor) -> GradientAccumulator:
        if (name, owner) not in self._sums:
            self._sums[name, owner] = GradientAccumulator(like, self.plan.accumulate_dtype)
        return self._sums[name, owner]

    def compute(self, block: AttentionBlock, rows: Bundle, columns: Bundle) -> None:
        q, k, v = rows["q"], columns["k"], columns["v"]
        grads = (
            self.total("dq", block.q_shard, q),
            self.total("dk", block.kv_shard, k),
            self.total("dv", block.kv_shard, v),
        )
        self.math.backward(grads, rows["do"], q, k, v, rows["o"], rows["lse"], self.tiles(block))

    def result(self, axis: Axis, owner: int) -> Bundle:
        names = ("dq",) if axis == "q" else ("dk", "dv")
        return {name: self._sums.pop((name, owner)).value for name in names}

    def arrived(self, move: Transfer, bundle: Bundle) -> None:
        for name, tensor in bundle.items():
            total = self._sums[name, move.recv_shard]
            total.value  # noqa: B018 - as above: added to ours, never adopted
            total.add(tensor, rows=self.places(move, tensor.device))


def distributed_forward(
    comm: Communicator, plan: CallSpec, math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This rank's q, k, v, contiguous -> (o in plan.accumulate_dtype, lse) of its rows over all ranks' keys.

    Where k and v have a batch of 1 and q has not, its batch is folded into its rows for as long as this takes.
    """
    if k.shape[0] < q.shape[0]:
        o, lse = distributed_forward(comm, plan.folded(), math, fold(q), k, v)
        return unfold(o, q.shape[0]), unfold(lse, q.shape[0])
    work = _Forward(plan, math, comm.rank, q, k, v)
    run_schedule(plan.schedule(comm.rank, backward=False), comm, work, overlap=plan.overlap)
    return work.partial(comm.rank, q).value


def distributed_backward(
    comm: Communicator,
    plan: CallSpec,
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
    work = _Backward(plan, math, comm.rank, saved, k, v)
    run_schedule(plan.schedule(comm.rank, backward=True), comm, work, overlap=plan.overlap)
    pieces = (("dq", q), ("dk", k), ("dv", v))
    dq, dk, dv = (work.total(name, comm.rank, like).value for name, like in pieces)
    return dq, dk, dv
