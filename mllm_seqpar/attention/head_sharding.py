"""Attention dealt by heads: DeepSpeed-Ulysses (arXiv 2309.14509), and its hybrid with every other schedule.

    by rows (B, H, s, D), (B, G, t, D)   -- all-to-all -->   by heads (B, H/u, u s, D), (B, g, sum of t, D)   and back

u consecutive ranks deal heads among themselves: each then has all their rows and keys, of its own heads. Over the n / u
ranks with the same heads any tile (a, b) runs, as it does over whole ranks: (1, 1) where u = n, which is plain Ulysses.
Key heads go only where query heads use them (`schedules.heads`).

Forward sends Q, K, V and O, backward dO, dQ, dK, dV, complete and therefore in the inputs' dtype; only where ranks
share a key head are dK and dV partial sums, and travel as wide as they are summed in. What is kept for the backward
pass is dealt by heads too, and as large as it was. Rows are put in an order in which causal blocks are few and large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mllm_seqpar.comm import Communicator

from .all_to_all import gather_heads, gather_heads_autograd, shard_heads, shard_heads_autograd
from .block_math import BlockMath
from .distributed import CallSpec, distributed_backward, distributed_forward
from .head_layout import HeadLayout
from .head_sharded_sources import HeadShardedKV
from .kv_sources import KVSource

Attend = Callable[[Tensor, Sequence[KVSource], Communicator], tuple[Tensor, Tensor]]


def attend_by_heads(
    q: Tensor, sources: Sequence[KVSource], comm: Communicator, attend: Attend
) -> tuple[Tensor, Tensor]:
    """One softmax over sources that are all dealt by heads, to as many ranks each.

    Args:
        q: (B, H, s, D), this rank's rows.
        sources: their plans say `heads` > 1, all the same.
        comm: the group.
        attend: (q, sources, comm) -> (o, lse) for what is left to do among ranks with the same heads.

    Returns:
        o (B, H, s, D), lse (B, H, s).
    """
    size = sources[0].plan.heads
    orders = next((found for s in sources if (found := s.plan.blocks.orders(size, q.device)) is not None), None)
    by = [HeadLayout(comm, source.plan, q, orders) for source in sources]
    q_dealt = shard_heads_autograd(q, by[0].rows("q"), by[0].inside)
    inner = [HeadShardedKV(source, its, q.dtype) for source, its in zip(sources, by, strict=True)]
    o, lse = attend(q_dealt, inner, by[0].between)
    o = gather_heads_autograd(o, by[0].rows("o"), by[0].inside)
    (lse_rows,) = gather_heads([lse.unsqueeze(-1)], [by[0].rows("lse")], by[0].inside)
    return o, lse_rows.squeeze(-1)


def forward_by_heads(
    comm: Communicator, plan: CallSpec, math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`distributed_forward` for a plan that deals heads, beside sources of one softmax that do not.

    Then only the rows' home has the final (o, lse), and the backward pass deals everything again.
    """
    by = HeadLayout(comm, plan, q, plan.blocks.orders(plan.heads, q.device))
    (q,) = shard_heads([q], [by.rows("q")], by.inside)
    k, v = by.deal_keys(k, v)
    o, lse = distributed_forward(by.between, by.plan, math, q, k, v)
    o, lse = gather_heads([o, lse.unsqueeze(-1)], [by.rows("o"), by.rows("lse")], by.inside)
    return o, lse.squeeze(-1)


def backward_by_heads(
    comm: Communicator,
    plan: CallSpec,
    math: BlockMath,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`distributed_backward` for such a plan."""
    q, o, lse, do = saved
    by = HeadLayout(comm, plan, q, plan.blocks.orders(plan.heads, q.device))
    rows = shard_heads([q, o, lse.unsqueeze(-1), do], [by.rows(name) for name in ("q", "o", "lse", "do")], by.inside)
    q, o, lse, do = (x.contiguous() for x in rows)
    k, v = by.deal_keys(k, v)
    dq, dk, dv = distributed_backward(by.between, by.plan, math, (q, o, lse.squeeze(-1), do), k, v)
    (dq,) = gather_heads([dq], [by.rows("dq")], by.inside)
    return dq, *by.collect_keys(dk, dv, None)
