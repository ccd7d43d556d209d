"""What is known about the attention to one set of keys before its tensors exist, and what is derived from it.

All ranks resolve a `CallSpec` once for each shape of q and k. The layers of a pass share it, and so do later passes
over the same text length or with the same mask of cached frames. What follows from it is made by the first layer: the
schedule, the rows of each transfer, and the mask of each block with the block kernels that compute it (`MaskLayer`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.kernels import BlockKernel, KernelOption, choose_kernel
from mllm_seqpar.masks import BlockMask, BlockMasks, Intervals
from mllm_seqpar.masks.intervals import block_mask, part_of_mask
from mllm_seqpar.schedules import AttentionBlock, Axis, OverlapRatios, Schedule, Step, Transfer, schedule_for
from mllm_seqpar.schedules.bytes_sent import Problem, mesh_axis_bytes, overlap_ratios_by_bytes
from mllm_seqpar.schedules.mesh import mesh_ranks
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec

T = TypeVar("T")

Placement = Literal["sharded", "replicated"]
"""Whether each rank has its shard of the rows, or of the keys, or all of them."""

GRADIENT_BYTES = 64 << 20
"""The size of the dk and dv of a block that exist beside their sums. A block with more keys is computed in parts."""

CUDA_GRADIENT_BYTES = 512 << 20
"""The same on a GPU, which needs more keys to be efficient."""


@dataclass(frozen=True)
class CallSpec:
    """Everything about the attention to one set of keys that is known before its tensors.

    If rows and keys are sharded, it describes the group, and is the same on every rank. Otherwise it describes this
    rank alone, as a group of one, with this rank's masks and number of keys (`alone`).

    Attributes:
        mesh_shape: (a, b), the number of Q shards and of KV shards that one rank computes with. (n, 1) sends Q shards,
            (1, n) sends KV shards, other shapes send both. With (1, 1) each rank computes its own block only.
        masks: the mask of every block.
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

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make()` returned for the first layer; `key` names what it is, and all that it depends on."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @cached_property
    def alone(self) -> bool:
        """True if it describes this rank alone. Its mesh shape is (1, 1), as is that of plain Ulysses over a group."""
        return len(self.key_lengths) == 1

    @cached_property
    def direct(self) -> bool:
        """True if Q shards are sent point to point: by choice, or because the mask makes (row, rank) pairs empty."""
        return self.mesh_shape[0] > 1 and self.mesh_shape[1] == 1 and (self.all_pairs or self.masks.prunes)

    def result_dtype(self, axis: Axis, inputs: torch.dtype) -> torch.dtype:
        """Return the dtype in which results for the shards of an axis are sent, for inputs of a dtype.

        Each rank adds its result to the results that pass through it, so many hops would round 16 bits many times.
        Results that go straight to their owner are rounded once, and accumulated there in `accumulate_dtype`.
        """
        q_shards, kv_shards = self.mesh_shape
        shards = q_shards if axis == "q" else kv_shards
        goes_directly = shards == 2 or (axis == "q" and self.direct)
        return inputs if goes_directly and self.round_results else self.accumulate_dtype

    def direct_result_dtype(self, inputs: torch.dtype) -> torch.dtype:
        """Return the dtype in which results that go straight to their owner are sent, for inputs of a dtype."""
        return inputs if self.round_results else self.accumulate_dtype

    @cached_property
    def folded(self) -> CallSpec:
        """The spec for queries whose batch is folded into their rows (`kernels.base.fold_batch`)."""
        return replace(self, masks=self.masks.folded())

    def head_groups(self, comm: Communicator) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that shard the heads; they share nodes. The first use is collective."""
        ring = comm.ring if self.head_degree < comm.size else tuple(range(comm.size))
        return tuple(ring[i : i + self.head_degree] for i in range(0, comm.size, self.head_degree))

    def steps(self, comm: Communicator, q: Tensor, k: Tensor, kernel: KernelOption, *, backward: bool) -> Schedule:
        """Return the schedule of this rank for shards of the shapes of q and k, filled in on first use.

        The first use is collective.
        """
        shape = self.mesh_shape
        rank, group = (0, None) if self.alone else (comm.rank, comm.identity)
        key = rank, group, q.shape, k.shape[:2], q.dtype, q.device, kernel, backward
        schedule: Schedule | None = self._made.get(key)  # `once`, without a call
        if schedule is None:
            ranks = None if shape == (1, 1) else comm.ring
            if 1 not in shape:
                problem = problem_of(q.shape, k.shape, self.key_lengths, q.dtype, self.accumulate_dtype)
                sent = mesh_axis_bytes(problem, shape, backward=backward)
                ranks = mesh_ranks(comm.ring, comm.nodes, shape, *sent)
            ratios = self.overlap_ratios[backward]
            schedule = schedule_for(
                shape, rank, backward=backward, ranks=ranks, direct=self.direct, overlap_ratios=ratios
            )
            schedule = self._made[key] = self._filled_in(schedule, rank, q, k, kernel, backward)
        return schedule

    def _filled_in(
        self, schedule: Schedule, rank: int, q: Tensor, k: Tensor, kernel: KernelOption, backward: bool
    ) -> Schedule:
        """Return the schedule with what depends on the call: see `Transfer` and `AttentionBlock`."""
        steps = []
        for step in schedule:
            transfers = tuple([self._resolved(transfer, rank, q) for transfer in step.transfers])
            blocks = tuple([replace(b, layers=self._layers(b, q, k, kernel, backward)) for b in step.blocks])
            steps.append(Step(transfers, blocks, step.released))
        return tuple(steps)

    def _resolved(self, transfer: Transfer, rank: int, q: Tensor) -> Transfer:
        """Return a transfer with its rows, lengths and dtype.

        Both ends of a transfer have all masks, so both select the same rows.
        """
        rows, device = q.shape[2], q.device
        if transfer.kind == "result":
            transfer = replace(transfer, dtype=self.result_dtype(transfer.axis, q.dtype))
        if transfer.axis == "kv":
            return replace(transfer, recv_length=self.key_lengths[transfer.recv_shard])
        if not self.direct:
            return replace(transfer, recv_length=rows)
        is_input = transfer.kind == "input"
        received = self.masks.visible_rows(transfer.recv_shard, rank if is_input else transfer.src)
        sent = self.masks.visible_rows(transfer.send_shard, transfer.dst) if is_input else None
        return replace(
            transfer,
            send_rows=None if sent is None else sent.index_on(device),
            recv_rows=None if received is None or is_input else received.index_on(device),
            recv_length=rows if received is None else received.count,
        )

    def _layers(
        self, block: AttentionBlock, q: Tensor, k: Tensor, kernel: KernelOption, backward: bool
    ) -> tuple[MaskLayer, ...]:
        """Return the mask of the part of a block's query rows that the schedule asks for, with its kernels."""
        mask = self.masks.block(block.q_shard, block.kv_shard, pruned=self.direct and block.q_shard != block.kv_shard)
        rows = None
        if block.parts > 1:
            count = q.shape[2]
            rows = slice(count * block.part // block.parts, count * (block.part + 1) // block.parts)
            mask = part_of_mask(mask, rows)
        layers, length = with_kernels(mask, q, k, kernel, rows), self.key_lengths[block.kv_shard]
        if backward and self.mesh_shape[0] > 1:  # the dk and dv of several blocks are added up
            limit = CUDA_GRADIENT_BYTES if k.device.type == "cuda" else GRADIENT_BYTES
            most = limit // (2 * k.shape[0] * k.shape[1] * k.shape[3] * self.accumulate_dtype.itemsize)
            layers = tuple([part for layer in layers for part in layer.parts(length, max(1, most), q, k, kernel)])
        return layers


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
        direct_element=dtype.itemsize if accumulate_dtype == "auto" else None,
    )


def call_spec_for(
    spec: ParallelSpec,
    masks: BlockMasks,
    problem: Problem,
    accumulate_dtype: torch.dtype,
    overlap: bool = True,
) -> CallSpec:
    """Return the call spec of a strategy, which `parallel_spec` resolves.

    `problem` is that of `problem_of`; it also says in how many bytes results are sent.
    """
    shape, ratios = spec.mesh_shape, spec.overlap_ratios
    if ratios is None and 1 not in shape:
        forward, backward = (overlap_ratios_by_bytes(problem, backward=b) for b in (False, True))
        ratios = forward, backward
    ratios = ratios or (OverlapRatios(), OverlapRatios())
    rounded = problem.direct_element is not None and problem.direct_element < accumulate_dtype.itemsize
    degree, all_pairs = spec.head_degree, spec.all_pairs
    return CallSpec(shape, masks, problem.keys, accumulate_dtype, overlap, degree, ratios, rounded, all_pairs)


class MaskLayer(NamedTuple):
    """A layer of the mask of a block, and the kernel that computes it for tensors of one dtype, device and head dim.

    Attributes:
        kernel: the block kernel.
        intervals: the keys of `keys` that each row of `rows` attends to; None: all.
        rows, keys: the query rows and the keys of the layer, outside of which nothing is visible; None: all.
    """

    kernel: BlockKernel
    intervals: Intervals | None = None
    rows: slice | None = None
    keys: slice | None = None

    def parts(self, length: int, most: int, q: Tensor, k: Tensor, kernel: KernelOption) -> Sequence[MaskLayer]:
        """Return layers of at most `most` keys that together are this one, of a block of `length` keys.

        Further arguments are those of `with_kernels`.
        """
        first, stop = (0, length) if self.keys is None else (self.keys.start, self.keys.stop)
        if stop - first <= most:
            return (self,)
        layers, step = list[MaskLayer](), -(-(stop - first) // -(-(stop - first) // most))
        for start in range(first, stop, step):
            keys = slice(start, min(start + step, stop))
            if self.intervals is None:
                layers.append(self._replace(keys=keys))
                continue
            mask = block_mask([self.intervals.part(keys=(keys.start - first, keys.stop - first))])
            for part in with_kernels(mask, q, k, kernel, self.rows):
                own = slice(0, keys.stop - start) if part.keys is None else part.keys
                layers.append(part._replace(rows=part.rows or self.rows, keys=_shifted(own, start)))
        return layers


def with_kernels(
    mask: BlockMask, q: Tensor, k: Tensor, kernel: KernelOption, rows: slice | None = None
) -> tuple[MaskLayer, ...]:
    """Return the layers of the mask of a block, or of some of its rows, with their kernels.

    They are for blocks with the dtype, device and head dim of q and k.
    """
    if mask is None:
        return (MaskLayer(choose_kernel(kernel, q, k)[0], rows=rows),)
    if len(mask) > 2 and (entries := choose_kernel(kernel, q, k, mask[0])[0].call_entries):
        joined = Intervals.joined(mask)
        calls = sum(layer.runs_of_rows for layer in mask)
        if joined.low.numel() * joined.keys < joined.visible + entries * calls:
            mask = (joined,)
    layers, first = list[MaskLayer](), 0 if rows is None else rows.start
    for layer in mask:
        intervals, some, keys = layer.narrowed()
        of_rows = None if rows is None and some == slice(0, layer.low.shape[1]) else _shifted(some, first)
        of_keys = None if keys == slice(0, layer.keys) else keys
        layers.append(MaskLayer(choose_kernel(kernel, q, k, intervals)[0], intervals, of_rows, of_keys))
    return tuple(layers)


def _shifted(rows: slice, first: int) -> slice:
    return slice(rows.start + first, rows.stop + first)
