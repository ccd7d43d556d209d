"""One softmax over several distributed KV sources, in one autograd function.

    o, lse = attend(q, [source, ...])        q (B, H, s_q, D): this rank's rows; each source: this rank's keys

Forward: (o_s, lse_s) = distributed attention of q over all ranks' keys of source s, for every s, and one merge.
Backward: the distributed backward of each source, given the merged o and lse and their do; dq is the sum. This is exact
because the backward of a block needs only the final (o, lse) and do of its rows, and nothing of other blocks.

Saved for backward are q, o, lse, and what each source saves. A recomputed source saves only the features that all
layers share, so nothing here grows with the number of visual keys (arXiv 2502.02406, section 3.2). Under activation
checkpointing, (o, lse) of the forward pass are kept for the recomputation of the layer (`kept_results`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mllm_seqpar.comm import Communicator
from mllm_seqpar.kernels.merge import merge_

from .block_math import BlockMath
from .executor import distributed_backward, distributed_forward
from .kept_results import running_region
from .kv_sources import KVSource
from .streamed import StreamedKV, streamed_backward, streamed_forward
from .ulysses import attend_head_sharded, backward_head_sharded, forward_head_sharded

KeySource = KVSource | StreamedKV
"""What `attend` attends to: keys and values that exist as a whole while it runs, or arrive in chunks."""

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` such that torch.compile runs it eagerly, in a graph break.

    Traced, host-side planning would be compiled again for every shape and mask, and collectives would be replaced. This
    is torch.compiler.disable without its cost for callers that do not compile: its import takes as long as the whole
    rest of this package.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


class _JointAttention(torch.autograd.Function):
    """Local shapes: q, o, do (B, H, s_q, D), lse (B, H, s_q) float32; globally s_q becomes n s_q, sharded by rows.

    Forward: o = softmax(scale q [K_1; ...; K_m]^T) [V_1; ...; V_m] over all sources' keys on all ranks.
    Backward: P = exp(scale q K^T - lse), dV = P^T do, dS = P (do V^T - rowsum(do o)), dq = scale dS K,
    dK = scale dS^T q.

    `counts` is the number of inputs of each source; `recompute` is an argument of `attend`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        block_math: BlockMath,
        sources: Sequence[KeySource],
        counts: Sequence[int],
        recompute: bool,
        q: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        local_q = q.contiguous()
        by_source = [inputs[end - count : end] for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
        compute = functools.partial(_merged_forward, comm, block_math, sources, local_q, by_source)
        region = None if recompute or not any(ctx.needs_input_grad) else running_region()
        o, lse = compute() if region is None else region.once(compute, "attention")
        saved: list[Tensor] = []
        ctx.counts, ctx.sources = [], []
        for source, own_inputs in zip(sources, by_source, strict=True):
            kept = source.saved(own_inputs)
            saved.extend(kept)
            ctx.counts.append((len(own_inputs), len(kept)))
            ctx.sources.append(source.without_inputs())
        ctx.comm, ctx.block_math = comm, block_math
        if region is not None and not region.replays_rng:
            # Dropout before attention recomputes other q, k and v than the saved ones, which gave (o, lse).
            of_this_pass = local_q, *saved
            local_q, *saved = region.once(lambda: of_this_pass, "inputs")
        ctx.save_for_backward(local_q, o, lse, *saved)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, o, lse, *saved = ctx.saved_tensors
        rows = (q, o, lse, do.contiguous())
        dq: Tensor | None = None
        grads: list[Tensor | None] = []
        needed = list(ctx.needs_input_grad[6:])
        for source, (count, kept) in zip(ctx.sources, ctx.counts, strict=True):
            own_saved, saved = saved[:kept], saved[kept:]
            own_needed, needed = needed[:count], needed[count:]
            inputs = source.restored(own_saved)
            if isinstance(source, StreamedKV):
                part, input_grads = streamed_backward(ctx.comm, source, ctx.block_math, rows, inputs, own_needed)
                dq = part if dq is None else dq.add_(part)
                grads.extend(input_grads)
                continue
            k, v = source.keys_values(inputs)
            backward = distributed_backward if source.spec.head_degree == 1 else backward_head_sharded
            part, dk, dv = backward(ctx.comm, source.spec, ctx.block_math, rows, k, v)
            del k, v
            dq = part if dq is None else dq.add_(part)
            grads.extend(source.input_grads(inputs, own_needed, dk, dv))
        assert dq is not None
        return None, None, None, None, None, dq.to(q.dtype), *grads


def _merged_forward(
    comm: Communicator,
    block_math: BlockMath,
    sources: Sequence[KeySource],
    q: Tensor,
    inputs: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of contiguous q over all sources, given the inputs of each, with o in the dtype of q."""
    total: tuple[Tensor, Tensor] | None = None
    for source, own_inputs in zip(sources, inputs, strict=True):
        if isinstance(source, StreamedKV):
            result = streamed_forward(comm, source, block_math, q, own_inputs)
        else:
            k, v = source.keys_values(own_inputs)
            forward = distributed_forward if source.spec.head_degree == 1 else forward_head_sharded
            result = forward(comm, source.spec, block_math, q, k, v)
        if total is None:
            total = result[0].contiguous(), result[1].contiguous()
        else:
            merge_(*total, *result)
    assert total is not None
    return total[0].to(q.dtype), total[1]


@eager
def attend(
    q: Tensor,
    sources: Sequence[KeySource],
    *,
    comm: Communicator,
    scale: float,
    kernel: str = "auto",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's rows over every source's keys on all ranks, as one softmax.

    Args:
        q: (B, H, s_q, D), this rank's rows.
        sources: at least one; the order of computation, the same on every rank.
        comm: the group.
        scale: factor of q k^T.
        kernel: name of a block kernel, or "auto".
        recompute: under activation checkpointing, compute the result again when backward recomputes the layer, instead
            of keeping it (`kept_results`).

    Returns:
        o (B, H, s_q, D) in q.dtype, and lse (B, H, s_q) float32, which carries no gradient. A row without visible keys
        has o = 0, lse = -inf. Differentiable in q and in the inputs of the sources.
    """
    degree = sources[0].spec.head_degree
    if degree > 1:
        sharded = [s for s in sources if not isinstance(s, StreamedKV) and s.spec.head_degree == degree]
        if len(sharded) == len(sources):
            among_equal_heads = functools.partial(attend, scale=scale, kernel=kernel, recompute=recompute)
            return attend_head_sharded(q, sharded, comm, among_equal_heads, keep=not recompute)
    inputs: list[Tensor] = []
    counts = []
    for source in sources:
        source_inputs = source.inputs()
        inputs.extend(source_inputs)
        counts.append(len(source_inputs))
    return _JointAttention.apply(comm, BlockMath(kernel, scale), tuple(sources), counts, recompute, q, *inputs)
