"""The spec of an attention call, which all ranks resolve before its tensors exist, and the steps planned from it.

A `CallSpec` is made once per forward pass and shape. All layers with that shape share it, and with it everything that
is derived from it on first use: the schedule, the mask rectangles of each block, the rows of each transfer, and the
block kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.kernels import BlockKernel
from mllm_seqpar.masks import BlockMasks, Rectangle, clip_rows
from mllm_seqpar.schedules import AttentionBlock, Axis, OverlapRatios, Schedule, Transfer, schedule_for
from mllm_seqpar.schedules.bytes_sent import Problem, mesh_axis_bytes, overlap_ratios_by_bytes
from mllm_seqpar.schedules.mesh_shapes import least_bytes_mesh_shape, resolve_tile
from mllm_seqpar.schedules.rank_order import RankOrder, by_node, rank_order, renumbered
from mllm_seqpar.schedules.steps import last_uses

from .block_math import PreparedRectangle, RowIndex, prepare

Placement = Literal["sharded", "replicated"]
"""Whether each rank has its shard of the keys, or all of them."""


class PlannedTransfer(NamedTuple):
    """One transfer of a schedule (`schedules.steps`), with the rows that are sent.

    Attributes:
        is_input: whether a shard is sent for later blocks; otherwise results return to the owner of the shard.
        axis: the axis of the shard, Q or KV.
        send_shard, dst: the owner of the shard that this rank sends, and the receiving rank.
        recv_shard, src: the owner of the shard that this rank receives, and the sending rank.
        send_rows: the rows of the input shard to send; None: all.
        recv_rows: the rows of this rank's shard that received results belong to; None: all.
        recv_length: the number of rows or keys received.
    """

    is_input: bool
    axis: Axis
    send_shard: int
    dst: int
    recv_shard: int
    src: int
    send_rows: RowIndex | None
    recv_rows: RowIndex | None
    recv_length: int


class PlannedBlock(NamedTuple):
    """The attention block of the Q shard of rank `q_shard` and the KV shard of rank `kv_shard`."""

    q_shard: int
    kv_shard: int
    rectangles: tuple[PreparedRectangle, ...]


class PlannedStep(NamedTuple):
    """Transfers to post, blocks to compute meanwhile, and received shards that no later step uses."""

    transfers: tuple[PlannedTransfer, ...]
    blocks: tuple[PlannedBlock, ...]
    released: tuple[tuple[Axis, int], ...]


@dataclass(frozen=True)
class CallSpec:
    """Everything about the attention to one set of keys that is known before its tensors; the same on every rank.

    It describes the group if rows and keys are sharded. Otherwise it describes this rank alone, as a group of one.

    Attributes:
        mesh_shape: (a, b), the number of Q shards and of KV shards that one rank computes with. (n, 1) sends Q shards,
            (1, n) sends KV shards, other shapes send both. With (1, 1) each rank computes its own block only.
        masks: the mask rectangles of every block.
        key_lengths: the number of keys on each rank.
        accumulate_dtype: dtype in which O, dQ, dK and dV are accumulated, and sent unless `round_results`.
        overlap: whether transfers run during computation.
        head_degree: the number of ranks that shard the heads among themselves first (Ulysses);
            `mesh_shape` then describes the n / head_degree ranks that hold the same heads.
        overlap_ratios: the ratios that a mesh orders its steps by, forward and backward.
        round_results: whether results that go straight to their owner are sent in the dtype of the inputs, see
            `result_dtype`.
        all_pairs: whether Q shards are sent point to point even if the mask makes no (row, rank) pair empty; for
            (n, 1) only.
        placement: where the keys are.
        visible_keys: the keys that all rows attend to, if no row attends to others and torch may choose the kernel.
    """

    mesh_shape: tuple[int, int]
    masks: BlockMasks
    key_lengths: tuple[int, ...]
    accumulate_dtype: torch.dtype
    overlap: bool = True
    head_degree: int = 1
    overlap_ratios: tuple[OverlapRatios, OverlapRatios] = (OverlapRatios(), OverlapRatios())
    round_results: bool = False
    all_pairs: bool = False
    placement: Placement = "sharded"
    visible_keys: slice | None = None

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """Results derived from this spec (steps, head-sharding layouts), by the arguments they depend on."""
        return {}

    @property
    def direct(self) -> bool:
        """True if Q shards are sent point to point: by choice, or because the mask makes (row, rank) pairs empty."""
        return self.mesh_shape[0] > 1 and self.mesh_shape[1] == 1 and (self.all_pairs or self.masks.prunes)

    def result_dtype(self, axis: Axis, inputs: torch.dtype) -> torch.dtype:
        """Return the dtype in which results for the shards of an axis are sent, for inputs of a dtype.

        Each rank adds its result to the results that pass through it, so many hops would round 16 bits many times.
        Results that go straight to their owner are rounded once, and accumulated there in `accumulate_dtype`.
        """
        straight = self.mesh_shape[axis == "kv"] == 2 or (axis == "q" and self.direct)
        return self.straight_dtype(inputs) if straight else self.accumulate_dtype

    def straight_dtype(self, inputs: torch.dtype) -> torch.dtype:
        return inputs if self.round_results else self.accumulate_dtype

    @cached_property
    def folded(self) -> CallSpec:
        """The spec for queries whose batch is folded into their rows (`block_math.fold`)."""
        return replace(self, masks=self.masks.folded())

    def order(self, comm: Communicator, q: Tensor, k: Tensor, *, backward: bool) -> RankOrder | None:
        """Return the order of the ranks of `comm` for this schedule (`rank_order`); the first use is collective."""
        if self.mesh_shape == (1, 1):
            return None
        if 1 in self.mesh_shape:
            return rank_order(comm.nodes, self.mesh_shape)
        problem = problem_of(q.shape, k.shape, self.key_lengths, q.dtype, self.accumulate_dtype)
        return rank_order(comm.nodes, self.mesh_shape, *mesh_axis_bytes(problem, self.mesh_shape, backward=backward))

    def head_groups(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that shard the heads; they share nodes. The first use is collective."""
        order = by_node(comm.nodes) if self.head_degree < comm.size else tuple(range(comm.size))
        return tuple(order[i : i + self.head_degree] for i in range(0, comm.size, self.head_degree))

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        return schedule_for(
            self.mesh_shape, rank, backward=backward, direct=self.direct, overlap_ratios=self.overlap_ratios[backward]
        )

    def steps(
        self, comm: Communicator, q: Tensor, k: Tensor, kernel: str, *, backward: bool
    ) -> tuple[PlannedStep, ...]:
        """Return the steps of this rank, planned on first use, for shards of the shapes of q and k.

        `kernel` is the name of a block kernel, or "auto".
        """
        key = comm.rank, comm.identity, q.shape, k.shape[:2], q.dtype, q.device, kernel, backward
        found: tuple[PlannedStep, ...] | None = self.derived.get(key)
        if found is None:
            order = self.order(comm, q, k, backward=backward)
            position = comm.rank if order is None else order.index(comm.rank)
            schedule = self.schedule(position, backward=backward)
            schedule = schedule if order is None else renumbered(schedule, order)
            found = self.derived[key] = self._plan_steps(schedule, comm.rank, q, k, kernel)
        return found

    def _plan_steps(self, schedule: Schedule, rank: int, q: Tensor, k: Tensor, kernel: str) -> tuple[PlannedStep, ...]:
        uses, rows, steps = last_uses(schedule), q.shape[2], []
        kernels: dict[str, BlockKernel] = {}
        for index, step in enumerate(schedule):
            transfers = [self._plan_transfer(transfer, rank, rows, q.device) for transfer in step.transfers]
            blocks = []
            for b in step.blocks:
                rectangles = prepare(self._rectangles(b, rows), q, k, kernel, kernels)
                blocks.append(PlannedBlock(b.q_shard, b.kv_shard, rectangles))
            released = [shard for shard, last in uses.items() if last == index and shard[1] != rank]
            steps.append(PlannedStep(tuple(transfers), tuple(blocks), tuple(released)))
        return tuple(steps)

    def _plan_transfer(self, transfer: Transfer, rank: int, rows: int, device: torch.device) -> PlannedTransfer:
        """Both ends of a transfer know all masks, so both select the same rows."""
        is_input, length = transfer.kind == "input", rows
        send_rows = recv_rows = None
        if transfer.axis == "kv":
            length = self.key_lengths[transfer.recv_shard]
        elif self.direct:
            received = self.masks.visible_rows(transfer.recv_shard, rank if is_input else transfer.src)
            sent = self.masks.visible_rows(transfer.send_shard, transfer.dst) if is_input else None
            length = rows if received is None else received.count
            send_rows = None if sent is None else sent.index_on(device)
            recv_rows = None if received is None or is_input else received.index_on(device)
        return PlannedTransfer(
            is_input,
            transfer.axis,
            transfer.send_shard,
            transfer.dst,
            transfer.recv_shard,
            transfer.src,
            send_rows,
            recv_rows,
            length,
        )

    def _rectangles(self, block: AttentionBlock, rows: int) -> Sequence[Rectangle]:
        """Return the rectangles of a block, clipped to the part of its query rows that the schedule asks for."""
        if self.direct and block.q_shard != block.kv_shard:
            return self.masks.pruned_rectangles(block.q_shard, block.kv_shard)
        rectangles = self.masks.rectangles(block.q_shard, block.kv_shard)
        if block.parts == 1:
            return rectangles
        start, stop = rows * block.part // block.parts, rows * (block.part + 1) // block.parts
        return tuple(part for rectangle in rectangles for part in clip_rows(rectangle, start, stop))


AccumulateDtype = torch.dtype | Literal["auto"] | None
"""The option `accumulate_dtype`; see `SeqParConfig`."""


def accumulation(dtype: AccumulateDtype, input_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results: the wider of the two; None: `input_dtype`; "auto": as float32."""
    if dtype == "auto":
        dtype = torch.float32
    return input_dtype if dtype is None else torch.promote_types(dtype, input_dtype)


def problem_of(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    key_lengths: tuple[int, ...],
    dtype: torch.dtype,
    accumulate_dtype: AccumulateDtype,
) -> Problem:
    """Return the sizes of a call with q (B, H, s, D) and k (B or 1, G, ...) that the byte formulas need."""
    batch, heads, rows, dim = q_shape
    return Problem(
        rows=rows,
        keys=key_lengths,
        heads=heads,
        kv_heads=k_shape[1],
        dim=dim,
        batch=batch,
        key_batch=k_shape[0],
        element=dtype.itemsize,
        accumulated=accumulation(accumulate_dtype, dtype).itemsize,
        straight=dtype.itemsize if accumulate_dtype == "auto" else None,
    )


def call_spec_for(
    strategy: str,
    mesh_shape: tuple[int, int] | None,
    masks: BlockMasks,
    problem: Problem,
    accumulate_dtype: torch.dtype,
    overlap: bool = True,
    overlap_ratios: tuple[OverlapRatios, OverlapRatios] | None = None,
    all_pairs: bool = False,
) -> CallSpec:
    """Return the call spec of a strategy.

    Args:
        mesh_shape: for "mesh" and "ulysses"; a mesh without one takes the shape that sends the fewest bytes.
        problem: as `problem_of` returns it; it also says in how many bytes results are sent.
        overlap_ratios: forward and backward, for the order of a mesh's steps; None: by the bytes of its transfers.
        all_pairs: for "lv-xattn", see `CallSpec`.

    Raises:
        ConfigError: the mesh shape does not fit the number of ranks.
    """
    shape, head_degree = resolve_tile(strategy, mesh_shape, problem.ranks)
    if shape is None:
        shape = least_bytes_mesh_shape(problem)
    if overlap_ratios is None and 1 not in shape:
        forward, backward = (overlap_ratios_by_bytes(problem, backward=b) for b in (False, True))
        overlap_ratios = forward, backward
    ratios = overlap_ratios or (OverlapRatios(), OverlapRatios())
    rounded = problem.straight is not None and problem.straight < accumulate_dtype.itemsize
    return CallSpec(shape, masks, problem.keys, accumulate_dtype, overlap, head_degree, ratios, rounded, all_pairs)
