"""Keys that arrive one chunk at a time, and distributed attention to them: the outer loop is over chunks, each of which
is computed with all queries.

    forward    q of every rank --exchange--> Q, the rows that attend to any frame of this rank
               for each chunk: (o, lse) = merge((o, lse), attend(Q, k, v))
               (o, lse) of each rank's rows --exchange--> their owner, which merges them
    backward   the same exchange of q, do, lse and delta; for each chunk: dk, dv, and dq += ...
               dq of each rank's rows --exchange--> their owner, which sums them

Each chunk of K and V exists once per layer and pass, and only one exists at a time. A ring over Q shards would need all
chunks of a rank once per hop. The bytes sent are those of LV-XAttn: a rank sends its rows to the ranks that hold a
frame they attend to, and receives one result from each. All Q shards are on every rank during a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, Recv, Send
from mllm_seqpar.comm.receive_buffers import BufferLease
from mllm_seqpar.kernels import FinalRows, KernelOption
from mllm_seqpar.kernels.base import fold_batch, unfold_batch
from mllm_seqpar.masks import BlockMasks, RowSubset
from mllm_seqpar.masks.intervals import part_of_mask

from .call_spec import CallSpec, MaskLayer, with_kernels
from .executor import BlockMath, Bundle, GradientAccumulator, PartialResult
from .keys import Keys


class KeyChunk(NamedTuple):
    """A chunk of streamed keys.

    Attributes:
        k, v: (1, G, keys, D).
        add_gradients: takes dk and dv, in backward.
    """

    k: Tensor
    v: Tensor
    add_gradients: Callable[[Tensor, Tensor], None] | None = None


class StreamedKeys(Keys):
    """Keys that arrive in several chunks, and never exist as a whole on the device.

    Keys that exist in host memory have no inputs, and no gradients. Subclasses compute theirs from inputs.

    Args:
        spec: see `Keys`.
        k: K of the sources that the chunks come from, in host memory or on the device.
        read: returns the chunks in order.
    """

    modules = ()

    def __init__(self, spec: CallSpec, k: Sequence[Tensor], read: Callable[[], Iterator[KeyChunk]]) -> None:
        self.spec, self.stored, self._read = spec, k, read

    def inputs(self) -> Sequence[Tensor]:
        return ()

    def chunks(self, inputs: Sequence[Tensor]) -> Iterator[KeyChunk]:
        """Return the chunks in order. Called without grad mode."""
        return self._read()

    def chunk_vjps(
        self, saved: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[Iterator[KeyChunk], Callable[[], Sequence[Tensor | None]]]:
        """Return `chunks` again, in backward, and a function that returns the gradients of the inputs after the last.

        The arguments are those of `WholeKeys.vjp`. Never called for keys whose `inputs` are empty.
        """
        raise NotImplementedError


def streamed_forward(
    comm: Communicator, spec: CallSpec, block_math: BlockMath, q: Tensor, chunks: Iterable[KeyChunk]
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of this rank's rows q over all ranks' keys, as `executor.distributed_forward`."""
    if (batch := q.shape[0]) > 1:
        o, lse = streamed_forward(comm, spec.folded, block_math, fold_batch(q), chunks)
        return unfold_batch(o, batch), unfold_batch(lse, batch)
    comm = comm.alone if spec.alone else comm
    plan = _plan(spec, comm)
    every_q = _gather_rows(comm, plan, {"q": q})["q"]
    partial = PartialResult(every_q, spec.accumulate_dtype)
    done = 0
    for k, v, _ in chunks:
        block_math.forward(every_q, k, v, plan.layers(done, every_q, k, block_math.kernel), partial)
        done += k.shape[2]
    o, lse = partial.value
    total, own = PartialResult(q, spec.accumulate_dtype), plan.spans[comm.rank]
    total.add(o[:, :, own], lse[:, :, own])
    with _returned_rows(comm, plan, {"o": o.to(spec.result_dtype("q", q.dtype)), "lse": lse}) as parts:
        for index, part in parts:
            total.add(part["o"], part["lse"], rows=index, borrowed=True)
    return total.value


def streamed_backward(
    comm: Communicator, spec: CallSpec, block_math: BlockMath, rows: FinalRows, chunks: Iterable[KeyChunk]
) -> Tensor:
    """Return dq of this rank's rows, as `executor.distributed_backward`; each chunk takes its dk and dv."""
    if (batch := rows.q.shape[0]) > 1:
        return unfold_batch(streamed_backward(comm, spec.folded, block_math, rows.folded(), chunks), batch)
    comm = comm.alone if spec.alone else comm
    plan = _plan(spec, comm)
    if comm.size > 1:
        rows = rows.with_delta()._replace(o=None)
    local = {name: x for name, x in rows._asdict().items() if x is not None}
    every = _gather_rows(comm, plan, local)
    gathered = FinalRows(every["q"], every.get("o"), every["lse"], every["do"], every.get("delta"))
    dq = GradientAccumulator(every["q"], spec.accumulate_dtype)
    done = 0
    for k, v, add_gradients in chunks:
        dk, dv = (GradientAccumulator(x, spec.accumulate_dtype) for x in (k, v))
        layers = plan.layers(done, gathered.q, k, block_math.kernel)
        block_math.backward((dq, dk, dv), gathered, k, v, layers)
        done += k.shape[2]
        assert add_gradients is not None
        add_gradients(dk.value, dv.value)
    total = GradientAccumulator(local["q"], spec.accumulate_dtype)
    total.add(dq.value[:, :, plan.spans[comm.rank]])
    with _returned_rows(comm, plan, {"dq": dq.value.to(spec.result_dtype("q", local["q"].dtype))}) as parts:
        for index, part in parts:
            total.add(part["dq"], rows=index, borrowed=True)
    return total.value


@dataclass(frozen=True)
class _RowPlan:
    """Which rows the ranks exchange, and the mask of the rows that this rank computes with.

    Attributes:
        masks: of the one block of the gathered rows, in the order of ranks, and this rank's keys.
        spans: where the rows of each rank are among the gathered rows.
        sent: this rank's rows that each rank computes with; None: all.
    """

    masks: BlockMasks
    spans: tuple[slice, ...]
    sent: tuple[RowSubset | None, ...]
    _layers: dict[Hashable, tuple[MaskLayer, ...]] = field(default_factory=dict)

    def layers(self, first: int, q: Tensor, k: Tensor, kernel: KernelOption) -> tuple[MaskLayer, ...]:
        """Return the mask of a chunk of keys, `first` of this rank's keys before it, with its kernels."""
        keys = first, first + k.shape[2]
        key = keys, q.shape, q.dtype, q.device, kernel
        if key not in self._layers:
            mask = part_of_mask(self.masks.block(0, 0), keys=keys) if k.shape[2] else ()
            self._layers[key] = with_kernels(mask, q, k, kernel)
        return self._layers[key]


def _plan(spec: CallSpec, comm: Communicator) -> _RowPlan:
    """Return the plan of this rank, made on first use: all of its own rows, and the rows of other ranks that attend."""

    def make() -> _RowPlan:
        masks, ranks = spec.masks, range(comm.size)
        received = [None if rank == comm.rank else masks.visible_rows(rank, comm.rank) for rank in ranks]
        bounds = [x if rows is None else x[..., rows.index] for x, rows in zip(masks.bounds, received, strict=True)]
        stops = torch.tensor([x.shape[-1] for x in bounds]).cumsum(0).tolist()
        spans = tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False))
        sent = tuple(None if rank == comm.rank else masks.visible_rows(comm.rank, rank) for rank in ranks)
        block = BlockMasks([torch.cat(bounds, dim=-1)], [masks.keys[comm.rank]])
        return _RowPlan(block, spans, sent)

    return spec.once((_RowPlan, comm.rank, comm.identity), make)


def _gather_rows(comm: Communicator, plan: _RowPlan, local: Mapping[str, Tensor]) -> Bundle:
    """(1, H, s, ...) of this rank -> (1, H, gathered rows, ...), in the order of ranks."""
    if comm.size == 1:
        return dict(local)
    sends, recvs = [], []
    with BufferLease(comm.kept.buffers) as lease:
        parts: dict[str, list[Tensor]] = {name: [] for name in local}
        for peer, (span, rows) in enumerate(zip(plan.spans, plan.sent, strict=True)):
            for name, x in local.items():
                if peer == comm.rank:
                    parts[name].append(x)
                    continue
                part = x.contiguous() if rows is None else rows.select(x)
                buffer = lease.take(("streamed", x.dim()), x, span.stop - span.start)
                parts[name].append(buffer)
                if part.numel():
                    sends.append(Send(peer, part, name))
                if buffer.numel():
                    recvs.append(Recv(peer, buffer))
        comm.exchange(sends, recvs).wait()
        return {name: torch.cat(pieces, dim=2) for name, pieces in parts.items()}


@contextmanager
def _returned_rows(
    comm: Communicator, plan: _RowPlan, results: Mapping[str, Tensor]
) -> Iterator[list[tuple[slice | Tensor | None, Bundle]]]:
    """Send each rank the results for its rows; yield (rows of this rank, results) from each other rank, by rank."""
    sends, recvs, parts = [], [], []
    with BufferLease(comm.kept.buffers) as lease:
        for peer, (span, rows) in enumerate(zip(plan.spans, plan.sent, strict=True)):
            if peer == comm.rank:
                continue
            own, bundle = plan.spans[comm.rank], {}
            for name, x in results.items():
                length = own.stop - own.start if rows is None else rows.count
                bundle[name] = lease.take(("streamed results", x.dim()), x, length)
                if span.stop > span.start:
                    sends.append(Send(peer, x[:, :, span].contiguous(), name))
                if bundle[name].numel():
                    recvs.append(Recv(peer, bundle[name]))
            if rows is None or rows.count:
                parts.append((None if rows is None else rows.index_on(bundle[name].device), bundle))
        comm.exchange(sends, recvs).wait()
        yield parts
