"""Distributed attention to one set of keys: the computation of a block, and the one executor of all schedules.

Each step posts its transfers as one grouped exchange, computes its blocks meanwhile, waits, and then stores the shards
and adds the results that it received. Receive buffers belong to the communicator and are reused over calls. Results of
a call never alias them: received shards are only read, and received results are added to this rank's. A block is
computed one layer of its mask at a time.

Shapes: q, o, do (B, H, S, D); k, v (B, G, T, D), G dividing H; lse (B, H, S) float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, Pending, Recv, Send
from mllm_seqpar.comm.receive_buffers import BufferLease
from mllm_seqpar.kernels import FinalRows, KernelOption
from mllm_seqpar.kernels.base import fold_batch, merge_, unfold_batch
from mllm_seqpar.schedules import AttentionBlock, Axis, Schedule, Step, Transfer

from .call_spec import CallSpec, MaskLayer

ALL = slice(None)

RowIndex = slice | Tensor
"""Rows of a tensor: a range, or distinct indices in ascending order."""


class PartialResult:
    """The attention of some query rows over the keys added so far.

    Args:
        q: the query rows, for shape and device.
        dtype: dtype in which o is accumulated.
    """

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = q, dtype
        self._value: tuple[Tensor, Tensor] | None = None
        self._stop = 0  # rows from here on have no result yet

    @property
    def value(self) -> tuple[Tensor, Tensor]:
        """(o, lse), contiguous. A row without keys so far has o = 0 and lse = -inf."""
        if self._value is None:
            o = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
            wide = torch.promote_types(torch.float32, self._like.dtype)  # lse is wide, as kernels return it
            self._value = o, torch.full(o.shape[:-1], float("-inf"), dtype=wide, device=o.device)
        return self._value

    def add(self, o: Tensor, lse: Tensor, rows: RowIndex | None = None, *, borrowed: bool = False) -> None:
        """Merge the result of some rows (None: all rows) over further keys.

        `borrowed` tensors are copied, because the caller reuses their memory; others may become part of this object.
        """
        # For rows without a result (o = 0, lse = -inf), a copy of the new one equals the merge, and takes less time. At
        # first, these are all rows; later, the second half of a block whose rows are computed in two halves, during two
        # transfers (`AttentionBlock.parts`).
        has_no_result = self._value is None
        if isinstance(rows, slice):
            has_no_result = has_no_result or rows.start >= self._stop
            self._stop = max(self._stop, rows.stop)
        else:
            self._stop = self._like.shape[2]
        if self._value is None and not borrowed and o.shape == self._like.shape:
            self._value = o.to(self._dtype).contiguous(), lse.contiguous()
            return
        whole_o, whole_lse = self._value or self.value
        if isinstance(rows, Tensor):
            if not has_no_result:
                some_o, some_lse = whole_o.index_select(2, rows), whole_lse.index_select(2, rows)
                merge_(some_o, some_lse, o, lse)
                o, lse = some_o, some_lse
            whole_o.index_copy_(2, rows, o.to(self._dtype))
            whole_lse.index_copy_(2, rows, lse)
            return
        some_o, some_lse = whole_o[:, :, rows or ALL], whole_lse[:, :, rows or ALL]
        if has_no_result:
            some_o.copy_(o)
            some_lse.copy_(lse)
        else:
            merge_(some_o, some_lse, o, lse)


class GradientAccumulator:
    """The sum in `dtype` of the gradients of a tensor like `like`, block by block."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = like.shape, like.device, dtype
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum so far; zeros before the first addition."""
        if self._value is None:
            self._value = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._value

    def add(self, x: Tensor, rows: RowIndex | None = None, *, borrowed: bool = False) -> None:
        """Add x to the given rows or keys (None: all); `borrowed` as in `PartialResult.add`."""
        if self._value is None and not borrowed and x.shape == self._shape:
            self._value = x.to(self._dtype)
        elif isinstance(rows, Tensor):  # indices are distinct, so no order of additions can change the result
            self.value.index_add_(2, rows, x.to(self._dtype))
        else:
            self.value[:, :, rows or ALL].add_(x)


class BlockMath(NamedTuple):
    """Attention of blocks by block kernels, as `choose_kernel` takes them, with the factor `scale` of q k^T."""

    kernel: KernelOption
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layers: Sequence[MaskLayer], out: PartialResult) -> None:
        """Merge the attention of q over the visible keys into `out`."""
        for kernel, intervals, rows, keys in layers:
            some = q if rows is None else q[:, :, rows]
            some_k, some_v = (k, v) if keys is None else (k[:, :, keys], v[:, :, keys])
            out.add(*kernel.forward(some, some_k, some_v, scale=self.scale, intervals=intervals), rows)

    def backward(
        self, grads: Sequence[GradientAccumulator], final: FinalRows, k: Tensor, v: Tensor, layers: Sequence[MaskLayer]
    ) -> None:
        """Add the block's dq, dk and dv to `grads`."""
        for kernel, intervals, rows, keys in layers:
            some = final if rows is None else final.part(rows)
            some_k, some_v = (k, v) if keys is None else (k[:, :, keys], v[:, :, keys])
            parts = kernel.backward(some, some_k, some_v, scale=self.scale, intervals=intervals)
            for total, part, place in zip(grads, parts, (rows, keys, keys), strict=True):
                total.add(part, place)


Bundle = dict[str, Tensor]
"""Named contiguous tensors that are sent together."""


class _Forward:
    """Q shards are sent with q and return (o, lse); KV shards are sent with k and v and return nothing.

    Attributes:
        local: this rank's Q shard and KV shard.
    """

    def __init__(self, spec: CallSpec, block_math: BlockMath, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.local: dict[Axis, Bundle] = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        self._math, self._dtype = block_math, spec.accumulate_dtype
        self.partials: dict[int, PartialResult] = {}

    def compute(self, block: AttentionBlock, rows: Bundle, keys: Bundle) -> None:
        """Compute a block and add it to the results for its Q shard and its KV shard."""
        partial = self.partials.get(block.q_shard)
        if partial is None:
            partial = self.partials[block.q_shard] = PartialResult(rows["q"], self._dtype)
        self._math.forward(rows["q"], keys["k"], keys["v"], block.layers, partial)

    def result(self, transfer: Transfer) -> Bundle:
        """Return, and drop, this rank's result for the shard that a transfer sends to its owner."""
        o, lse = self.partials.pop(transfer.send_shard).value
        return {"o": o.to(transfer.dtype), "lse": lse}

    def receive(self, transfer: Transfer, bundle: Bundle) -> None:
        """Add results from another rank to this rank's; the buffers of `bundle` are reused afterwards."""
        self.partials[transfer.recv_shard].add(bundle["o"], bundle["lse"], rows=transfer.recv_rows, borrowed=True)


class _Backward:
    """Q shards are sent with q, do, lse and delta and return dq; KV shards are sent with k and v and return dk and dv.

    It has the methods of `_Forward`. This rank's own rows keep their o, for kernels that take no delta.
    """

    def __init__(self, spec: CallSpec, block_math: BlockMath, rows: FinalRows, k: Tensor, v: Tensor) -> None:
        names = ("q", "do", "lse", "delta")
        sent = {name: x for name in names if (x := getattr(rows, name)) is not None}
        self.local: dict[Axis, Bundle] = {"q": sent, "kv": {"k": k, "v": v}}
        self._math, self._own_o, self._dtype = block_math, rows.o, spec.accumulate_dtype
        self._sums: dict[tuple[Axis, int], tuple[GradientAccumulator, ...]] = {}

    def sums(self, axis: Axis, owner: int, *like: Tensor) -> tuple[GradientAccumulator, ...]:
        """Return the sums of the gradients of tensors like these: dq, or dk and dv, of the shard of `owner`."""
        if (axis, owner) not in self._sums:
            self._sums[axis, owner] = tuple([GradientAccumulator(x, self._dtype) for x in like])
        return self._sums[axis, owner]

    def compute(self, block: AttentionBlock, rows: Bundle, keys: Bundle) -> None:
        q, k, v = rows["q"], keys["k"], keys["v"]
        grads = self.sums("q", block.q_shard, q) + self.sums("kv", block.kv_shard, k, v)
        o = self._own_o if rows is self.local["q"] else None
        self._math.backward(grads, FinalRows(q, o, rows["lse"], rows["do"], rows.get("delta")), k, v, block.layers)

    def result(self, transfer: Transfer) -> Bundle:
        names = ("dq",) if transfer.axis == "q" else ("dk", "dv")
        sums = self._sums.pop((transfer.axis, transfer.send_shard))
        return {name: each.value.to(transfer.dtype).contiguous() for name, each in zip(names, sums, strict=True)}

    def receive(self, transfer: Transfer, bundle: Bundle) -> None:
        sums = self._sums[transfer.axis, transfer.recv_shard]
        for each, received in zip(sums, bundle.values(), strict=True):
            each.add(received, rows=transfer.recv_rows, borrowed=True)


def distributed_forward(
    comm: Communicator, spec: CallSpec, block_math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of this rank's query rows over all ranks' keys, o in `spec.accumulate_dtype`.

    Args:
        q, k, v: this rank's shards, contiguous. If k and v have a batch of 1, the items of q share them.
    """
    batch = q.shape[0]
    shared = batch > k.shape[0]
    if shared:  # the items are rows of one item from here on
        q, spec = fold_batch(q), spec.folded
    steps = spec.steps(comm, q, k, block_math.kernel, backward=False)
    if spec.mesh_shape == (1, 1):  # this rank alone, or plain Ulysses: one block and no transfers
        result = PartialResult(q, spec.accumulate_dtype)
        block_math.forward(q, k, v, steps[0].blocks[0].layers, result)
    else:
        forward = _Forward(spec, block_math, q, k, v)
        _run(steps, comm, forward, spec.overlap)
        result = forward.partials[comm.rank]
    o, lse = result.value
    return (unfold_batch(o, batch), unfold_batch(lse, batch)) if shared else (o, lse)


def distributed_backward(
    comm: Communicator,
    spec: CallSpec,
    block_math: BlockMath,
    rows: FinalRows,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's dq, dk and dv in `spec.accumulate_dtype`.

    Args:
        rows: q, o, lse and do of this rank's query rows, where o and lse are final: merged over all keys. If Q shards
            are sent and delta is not given, it is computed here, and sent instead of o.
        k, v: this rank's KV shard.
    """
    batch = rows.q.shape[0]
    shared = batch > k.shape[0]
    if shared:
        rows, spec = rows.folded(), spec.folded
    q = rows.q
    steps = spec.steps(comm, q, k, block_math.kernel, backward=True)
    if spec.mesh_shape == (1, 1):
        sums = tuple([GradientAccumulator(x, spec.accumulate_dtype) for x in (q, k, v)])
        block_math.backward(sums, rows, k, v, steps[0].blocks[0].layers)
    else:
        if spec.mesh_shape[0] > 1:
            rows = rows.with_delta()
        backward = _Backward(spec, block_math, rows, k, v)
        _run(steps, comm, backward, spec.overlap)
        sums = backward.sums("q", comm.rank, q) + backward.sums("kv", comm.rank, k, v)
    dq, dk, dv = [each.value for each in sums]
    return unfold_batch(dq, batch) if shared else dq, dk, dv


def _run(steps: Schedule, comm: Communicator, direction: _Forward | _Backward, overlap: bool) -> None:
    """Run the steps of this rank. `overlap=False` waits for the transfers before computing, only to measure."""
    local, rank = direction.local, comm.rank
    held: dict[tuple[Axis, int], Bundle] = {("q", rank): local["q"], ("kv", rank): local["kv"]}
    with BufferLease(comm.kept.buffers) as lease:
        for step in steps:
            pending, incoming = _post(step, comm, direction, held, lease) if step.transfers else (None, ())
            if pending is not None and not overlap:
                pending.wait()
            for block in step.blocks:
                direction.compute(block, held["q", block.q_shard], held["kv", block.kv_shard])
            if pending is not None and overlap:
                pending.wait()
            for transfer, buffers in incoming:
                if transfer.kind == "input":
                    held[transfer.axis, transfer.recv_shard] = buffers
                else:
                    direction.receive(transfer, buffers)
                    lease.give(buffers.values())
            for shard in step.released:
                lease.give(held.pop(shard).values())


def _post(
    step: Step,
    comm: Communicator,
    direction: _Forward | _Backward,
    held: dict[tuple[Axis, int], Bundle],
    lease: BufferLease,
) -> tuple[Pending, Sequence[tuple[Transfer, Bundle]]]:
    """Post the transfers of a step; return the exchange, and the receive buffers of each transfer."""
    sends: list[Send] = []
    recvs: list[Recv] = []
    incoming: list[tuple[Transfer, Bundle]] = []
    for transfer in step.transfers:
        axis, rows, is_input = transfer.axis, transfer.send_rows, transfer.kind == "input"
        outgoing = held[axis, transfer.send_shard] if is_input else direction.result(transfer)
        buffers: Bundle = {}
        for name, tensor in outgoing.items():
            if isinstance(rows, slice):
                tensor = tensor[:, :, rows].contiguous()
            elif rows is not None:
                tensor = tensor.index_select(2, rows)
            kind = axis, is_input, tensor.dim()  # tensors of one kind and dtype reuse one buffer
            buffer = buffers[name] = lease.take(kind, tensor, transfer.recv_length)
            if tensor.numel():
                sends.append(Send(transfer.dst, tensor, name))
            if buffer.numel():
                recvs.append(Recv(transfer.src, buffer))
        incoming.append((transfer, buffers))
    return comm.exchange(sends, recvs), incoming
