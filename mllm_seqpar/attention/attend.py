"""Attention of rows to keys: one softmax over several sets of keys, wherever rows and keys are.

    attend(q, [[keys, ...], ...]) -> [(o, lse), ...]             q (B, H, s_q, D); each inner list is one softmax

Placements decide how: sharded rows and sharded keys run the schedule of the keys' spec. With replicated rows and
sharded keys, each rank computes a partial result over its own keys, and the partial results are merged over ranks
(`merge_over_ranks`). Everything else is local: the schedule of a group of one.

Forward: (o_s, lse_s) = the attention of q to each set of keys, and one merge. Backward: the backward of each set, given
the merged o and lse and their do; dq is the sum. This is exact because the backward of a block needs only the final
(o, lse) and do of its rows, and nothing of other blocks.

Saved for backward are q, o, lse, and what the keys save. Recomputed keys save only the features that all layers share,
so nothing here grows with the number of visual keys (arXiv 2502.02406, section 3.2). Under activation checkpointing,
(o, lse) of the forward pass are kept for the recomputation of the layer (`kept_results`).

Replicated rows, while decoding and while prefilling with replicated text: every rank has the same q and its own keys.
With few rows, the merge over ranks is one all-gather. With many rows each rank merges a part of them and the merged
rows are gathered, which sends 2 (n - 1)/n of a result instead of n - 1 results (Star Attention, arXiv 2411.17116, phase
2; flash decoding across devices). All ranks merge the same numbers in the same order and therefore have bitwise equal
results, so that they sample the same tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.fsdp_units import call_within, fsdp_units_among
from mllm_seqpar.kernels import FinalRows, KernelOption
from mllm_seqpar.kernels.base import merge, merge_

from .call_spec import Placement
from .executor import BlockMath, distributed_backward, distributed_forward
from .kept_results import count_dispatch_modes, running_region, without_stored_operators
from .keys import Keys, WholeKeys
from .streamed import StreamedKeys, streamed_backward, streamed_forward


class _JointAttention(torch.autograd.Function):
    """Local shapes: q, o, do (B, H, s_q, D), lse (B, H, s_q) float32; globally s_q becomes n s_q, sharded by rows.

    Forward: o = softmax(scale q [K_1; ...; K_m]^T) [V_1; ...; V_m] over all sets of keys on all ranks.
    Backward: P = exp(scale q K^T - lse), dV = P^T do, dS = P (do V^T - rowsum(do o)), dq = scale dS K,
    dK = scale dS^T q.

    `key_sets` are the keys with their inputs, which are passed once more as `inputs`, where autograd finds them;
    `recompute` is an argument of `attend`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        block_math: BlockMath,
        key_sets: Sequence[tuple[Keys, Sequence[Tensor]]],
        recompute: bool,
        q: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        region = None if recompute or not any(ctx.needs_input_grad) else running_region()
        compute = functools.partial(_forward, comm, block_math, key_sets, q, q.dtype)
        o, lse = compute() if region is None else region.once(compute, "attention")
        saved: list[Tensor] = []
        ctx.counts, ctx.keys = [], []
        for keys, own_inputs in key_sets:
            keys_for_backward, own_saved = keys.for_backward(own_inputs)
            saved.extend(own_saved)
            ctx.counts.append((len(own_inputs), len(own_saved)))
            ctx.keys.append(keys_for_backward)
        ctx.comm, ctx.block_math = comm, block_math
        if region is not None and not region.replays_rng:
            # With dropout, recomputation yields other q, k and v; keep the ones that gave (o, lse).
            of_this_pass = q, *saved
            q, *saved = region.once(lambda: of_this_pass, "inputs")
        ctx.save_for_backward(q, o, lse, *saved)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, o, lse, *saved = ctx.saved_tensors
        rows = FinalRows(q, o, lse, do.contiguous())
        dq: Tensor | None = None
        grads: list[Tensor | None] = []
        needed = list(ctx.needs_input_grad[5:])
        for keys, (count, kept) in zip(ctx.keys, ctx.counts, strict=True):
            own_saved, saved = saved[:kept], saved[kept:]
            own_needed, needed = needed[:count], needed[count:]
            part, input_grads = _backward(ctx.comm, ctx.block_math, keys, rows, own_saved, own_needed)
            dq = part if dq is None else dq.add_(part)
            grads.extend(input_grads)
        assert dq is not None
        return None, None, None, None, dq.to(q.dtype), *grads


def _forward(
    comm: Communicator,
    block_math: BlockMath,
    key_sets: Sequence[tuple[Keys, Sequence[Tensor]]],
    q: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of contiguous q over all sets of keys with their inputs; o in `dtype`, or the accumulator's.

    Under Ulysses, q is head-sharded already (`_attend_sharded`), and `comm` has the ranks with the same heads. Only if
    the keys of the softmax differ in their degree, q is row-sharded, and head-sharded here for each set (`row_layout`).
    """
    total = None
    with without_stored_operators() if count_dispatch_modes() else nullcontext():
        for keys, own_inputs in key_sets:
            rows, spec, layout, group = q, keys.spec, keys.row_layout, comm
            if layout is not None:
                rows, group = layout.shard_rows(q), layout.across
            if isinstance(keys, WholeKeys):
                o, lse = distributed_forward(group, spec, block_math, rows, *keys.keys_values(own_inputs))
            else:
                assert isinstance(keys, StreamedKeys)
                o, lse = streamed_forward(group, spec, block_math, rows, keys.chunks(own_inputs))
            if layout is not None:
                o, lse = layout.gather_rows(o.to(spec.direct_result_dtype(q.dtype)), lse)
                o = o.to(spec.accumulate_dtype)
            if total is None:
                total = o.contiguous(), lse.contiguous()
            else:
                merge_(*total, o, lse)
    assert total is not None
    return total[0] if dtype is None else total[0].to(dtype), total[1]


def _backward(
    comm: Communicator,
    block_math: BlockMath,
    keys: Keys,
    rows: FinalRows,
    saved: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return dq, and the gradients of the inputs that need one.

    Args:
        rows: contiguous, with their final o and lse.
        saved, needed: see `WholeKeys.vjp`.
    """
    spec, layout, dtype = keys.spec, keys.row_layout, rows.q.dtype
    if layout is not None:
        rows, comm = layout.shard_final(rows), layout.across
    if isinstance(keys, WholeKeys):
        k, v, input_grads = keys.vjp(saved, needed)
        dq, dk, dv = distributed_backward(comm, spec, block_math, rows, k, v)
        del k, v  # their memory is free for the gradients of the inputs
        grads = input_grads(dk, dv)
    else:
        assert isinstance(keys, StreamedKeys)
        chunks, sums = keys.chunk_vjps(saved, needed)
        dq, grads = streamed_backward(comm, spec, block_math, rows, chunks), sums()
    if layout is not None:
        dq = layout.gather_dq(dq.to(spec.direct_result_dtype(dtype))).to(spec.accumulate_dtype)
    return dq, grads


def attend(
    q: Tensor,
    softmaxes: Sequence[Sequence[Keys]],
    *,
    rows: Placement,
    comm: Communicator,
    scale: float,
    kernel: KernelOption = "auto",
    recompute: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Return the attention (o, lse) of rows to all keys on all ranks, for each of several softmaxes.

    Args:
        q: (B, H, s_q, D), this rank's shard of the rows, or all rows, the same on every rank.
        softmaxes: the sets of keys of each softmax, at least one, in the order of computation; the same on every rank.
        rows: the placement of q. With replicated rows, the partial results of all softmaxes share one exchange.
        comm: the group.
        scale: factor of q k^T.
        kernel: as `choose_kernel` takes it.
        recompute: under activation checkpointing, compute the result again when backward recomputes the layer, instead
            of keeping it (`kept_results`).

    Returns:
        For each softmax, o (B, H, s_q, D) in q.dtype, and lse (B, H, s_q) float32, which carries no gradient. A row
        without visible keys has o = 0, lse = -inf. Differentiable in q and in the inputs of the keys.

    Raises:
        ConfigError: rows are replicated, and gradients are required of them or of keys.
    """
    block_math = BlockMath(kernel, scale)
    if rows == "replicated":
        return _attend_replicated(q, softmaxes, comm, block_math)
    results = []
    for key_sets in softmaxes:
        modules: list[nn.Module] = []
        for keys in key_sets:
            modules.extend(keys.modules)
        fsdp_units = fsdp_units_among(modules) if modules else []
        compute = functools.partial(_attend_sharded, key_sets, comm, block_math, recompute)
        results.append(call_within(fsdp_units, compute, q) if fsdp_units else compute(q))
    return results


def _attend_sharded(
    key_sets: Sequence[Keys], comm: Communicator, block_math: BlockMath, recompute: bool, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of this rank's rows for one softmax; see `attend`."""
    layout = None
    for keys in key_sets:
        if keys.spec.head_degree > 1:
            from .ulysses import head_sharded  # of one strategy

            key_sets, layout = head_sharded(q, key_sets, comm)
            break
    if layout is not None:
        q, comm = layout.shard_rows(q), layout.across
    with_inputs, inputs = [], list[Tensor]()
    for keys in key_sets:
        with_inputs.append((keys, keys.inputs()))
        inputs.extend(with_inputs[-1][1])
    if torch.is_grad_enabled():
        o, lse = _JointAttention.apply(comm, block_math, with_inputs, recompute, q, *inputs)
    else:
        o, lse = _forward(comm, block_math, with_inputs, q.contiguous(), q.dtype)
    return (o, lse) if layout is None else layout.gather_rows(o, lse, keep=not recompute)


def _attend_replicated(
    q: Tensor, softmaxes: Sequence[Sequence[Keys]], comm: Communicator, block_math: BlockMath
) -> list[tuple[Tensor, Tensor]]:
    """Return (o, lse) of rows that every rank has, for each of several softmaxes, by one exchange; see `attend`.

    Each rank computes a partial result over its own shards of keys. These are merged over ranks, and with what every
    rank computes over replicated keys.
    """
    rows = q.contiguous()
    over_shards: list[tuple[Tensor, Tensor]] = []  # this rank's partial results, of the softmaxes with sharded keys
    results: list[tuple[bool, tuple[Tensor, Tensor] | None]] = []  # whether it has one, and that of replicated keys
    for key_sets in softmaxes:
        sharded, replicated = list[tuple[Keys, Sequence[Tensor]]](), list[tuple[Keys, Sequence[Tensor]]]()
        for keys in key_sets:
            (sharded if keys.spec.placement == "sharded" else replicated).append((keys, keys.inputs()))
        if torch.is_grad_enabled():
            needed = [q, *(x for _, inputs in (*sharded, *replicated) for x in inputs)]
            if any(x.requires_grad for x in needed):
                raise ConfigError(
                    "use_cache: a pass with a cache has no backward pass through attention on several ranks; run it "
                    "under torch.no_grad(), or pass use_cache=False to train"
                )
        if sharded:
            over_shards.append(_forward(comm, block_math, sharded, rows))
        results.append((bool(sharded), _forward(comm, block_math, replicated, rows) if replicated else None))
    merged: Iterator[tuple[Tensor, Tensor]] = iter(())
    if over_shards:
        o, lse = over_shards[0] if len(over_shards) == 1 else (torch.cat(x) for x in zip(*over_shards, strict=True))
        o, lse = merge_over_ranks(o, lse, comm)
        merged = zip(o.chunk(len(over_shards)), lse.chunk(len(over_shards)), strict=True)
    outputs = []
    for has_shards, replicated_result in results:
        result = next(merged) if has_shards else None
        if result is None or replicated_result is None:
            result = result or replicated_result
        else:
            result = merge(result, replicated_result)
        assert result is not None, "a softmax has keys"
        outputs.append((result[0].to(q.dtype), result[1]))
    return outputs


SCATTER_ROWS = 64
"""With at least this many rows, the merge itself is sharded."""


def merge_over_ranks(o: Tensor, lse: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return the merge of all ranks' partial (o (B, H, s, D), lse (B, H, s)) of the same rows, on every rank."""
    if comm.size == 1:
        return o, lse
    both = torch.cat([o, lse.to(o.dtype).unsqueeze(-1)], dim=-1)  # one message instead of two
    rows = both.shape[2]
    if rows < max(SCATTER_ROWS, comm.size):
        # The all-gather of gloo is a ring of n - 1 messages, one after the other. Messages to all ranks at once take
        # the latency of one, and send the same number of bytes. NCCL gathers few bytes in one kernel.
        on_cpu = both.device.type == "cpu"
        return _merge_all(comm.exchange_with_all([both] * comm.size, "o") if on_cpu else comm.all_gather(both, "o"))
    length = -(-rows // comm.size)
    missing = length * comm.size - rows
    padded = F.pad(both, (0, 0, 0, missing)) if missing else both  # pad always copies
    parts = [part.contiguous() for part in padded.split(length, dim=2)]
    o_part, lse_part = _merge_all(comm.exchange_with_all(parts, "o"))
    merged = comm.all_gather(torch.cat([o_part, lse_part.to(o.dtype).unsqueeze(-1)], dim=-1), "o")
    whole = torch.cat(merged, dim=2)[:, :, :rows]
    return whole[..., :-1].contiguous(), whole[..., -1].contiguous()


def _merge_all(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the ranks' (o | lse) in the same few operations for any number of ranks: decoding is bound by launches."""
    both = torch.stack(parts)
    o, lse = both[..., :-1], both[..., -1]
    total = torch.logsumexp(lse, dim=0)
    # A row without visible keys on any rank: -inf - (-inf) would be NaN.
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return o.mul_(weight.unsqueeze(-1)).sum(0), total
