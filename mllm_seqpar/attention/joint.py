"""One softmax over several distributed sets of keys, in one autograd function.

    o, lse = attend(q, [source, ...])        q (B, H, s_q, D): this rank's rows; each source: this rank's keys

Forward: for every source s, (o_s, l_s) = the distributed attention of q over all ranks' keys of s; then one merge.
Backward, with the merged o and lse and their do: the distributed backward of every source by itself; dq is the sum.
That is exact because a block's backward needs nothing of other blocks but the row's final (o, lse), and do.

Travels: per source what its plan says (`mllm_seqpar.schedules`). Saved for backward: q, o, lse and what each
source keeps; a recomputed source keeps only the features that all layers share, so nothing here grows with the number
of visual keys (arXiv 2502.02406, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mllm_seqpar._eager import eager
from mllm_seqpar.comm import Communicator

from .block_math import BlockMath, PartialResult
from .distributed import distributed_backward, distributed_forward
from .head_sharding import attend_by_heads, backward_by_heads, forward_by_heads
from .kv_sources import KVSource


@dataclass(frozen=True)
class _Call:
    comm: Communicator
    sources: tuple[KVSource, ...]
    math: BlockMath


class _JointAttention(torch.autograd.Function):
    """Local shapes: q, o, do (B, H, s_q, D), lse (B, H, s_q) float32; globally s_q becomes n s_q, dealt to the ranks.

    Forward: o = softmax(scale q [K_1; ...; K_m]^T) [V_1; ...; V_m] over all sources' keys on all ranks.
    Backward: P = exp(scale q K^T - lse), dV = P^T do, dS = P (do V^T - rowsum(do o)), dq = scale dS K,
    dK = scale dS^T q.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        q_home = q.contiguous()
        total = PartialResult(q_home, call.sources[0].plan.accumulate_dtype)
        saved: list[Tensor] = []
        ctx.counts = []
        for source, its_inputs in _split(call.sources, inputs):
            k, v = source.keys_values(its_inputs)
            forward = distributed_forward if source.plan.heads == 1 else forward_by_heads
            total.add(*forward(call.comm, source.plan, call.math, q_home, k, v))
            kept = source.saved(its_inputs)
            saved.extend(kept)
            ctx.counts.append((len(its_inputs), len(kept)))
        o, lse = total.value
        o = o.to(q.dtype)
        ctx.call = replace(call, sources=tuple(source.without_inputs() for source in call.sources))
        ctx.save_for_backward(q_home, o, lse, *saved)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, o, lse, *saved = ctx.saved_tensors
        rows = (q, o, lse, do.contiguous())
        dq: Tensor | None = None
        grads: list[Tensor | None] = []
        needed = list(ctx.needs_input_grad[2:])
        for source, (count, kept) in zip(call.sources, ctx.counts, strict=True):
            its_saved, saved = saved[:kept], saved[kept:]
            its_needed, needed = needed[:count], needed[count:]
            its_inputs = source.restored(its_saved)
            k, v = source.keys_values(its_inputs)
            backward = distributed_backward if source.plan.heads == 1 else backward_by_heads
            part, dk, dv = backward(call.comm, source.plan, call.math, rows, k, v)
            del k, v
            dq = part if dq is None else dq.add_(part)
            grads.extend(source.input_grads(its_inputs, its_needed, dk, dv))
        assert dq is not None
        return None, dq.to(q.dtype), *grads


def _split(sources: Sequence[KVSource], inputs: Sequence[Tensor]) -> list[tuple[KVSource, Sequence[Tensor]]]:
    pairs, start = [], 0
    for source in sources:
        count = len(source.inputs())
        pairs.append((source, inputs[start : start + count]))
        start += count
    return pairs


@eager
def attend(
    q: Tensor, sources: Sequence[KVSource], *, comm: Communicator, scale: float, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The attention of this rank's rows over every source's keys on all ranks, as one softmax.

    Args:
        q: (B, H, s_q, D), this rank's rows.
        sources: at least one; their order is the order of work and must be the same on every rank.
        comm: the group.
        scale: factor of q k^T.
        kernel: name of a block kernel, or "auto".

    Returns:
        o (B, H, s_q, D) in q.dtype, and lse (B, H, s_q) float32, which carries no gradient. A row that sees nothing
        has o = 0, lse = -inf. Differentiable in q and in what the sources are made of.
    """
    if sources[0].plan.heads > 1 and len({source.plan.heads for source in sources}) == 1:
        return attend_by_heads(q, sources, comm, partial(attend_by_rows, scale=scale, kernel=kernel))
    return attend_by_rows(q, sources, comm, scale=scale, kernel=kernel)


def attend_by_rows(
    q: Tensor, sources: Sequence[KVSource], comm: Communicator, *, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """The same where the ranks have all heads of the rows that they have."""
    inputs = [tensor for source in sources for tensor in source.inputs()]
    return _JointAttention.apply(_Call(comm, tuple(sources), BlockMath(kernel, scale)), q, *inputs)
