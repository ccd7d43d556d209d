"""Attention dealt by heads: DeepSpeed-Ulysses (arXiv 2309.14509), and its hybrid with every other schedule.

    by rows (B, H, s, D), (B, G, t, D)   -- all-to-all -->   by heads (B, H/u, u s, D), (B, g, sum of t, D)   and back

u consecutive ranks deal heads among themselves: each then has all their rows and keys, of its own heads. Over the n / u
ranks with the same heads any tile (a, b) runs, as it does over whole ranks: (1, 1) where u = n, which is plain Ulysses.
Key heads go only where query heads use them (`schedules.heads`).

Forward sends Q, K, V and O, backward dO, dQ, dK, dV, all complete, in the inputs' dtype. What is kept for the backward
pass is dealt by heads too, and as large as it was. Rows are put in an order in which causal blocks are few and large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm import Communicator, PartOfGroup
from ..schedules.heads import HeadShares
from .all_to_all import Item, collect, collected, deal, dealt
from .block import BlockMath
from .distributed import Plan, distributed_backward, distributed_forward
from .sources import GivenKeys, KeySource


class ByHeads:
    """One plan, dealt by heads.

    Attributes:
        inside: the ranks that deal heads among themselves.
        between: the ranks with the same heads.
        plan: what these run.
    """

    def __init__(self, comm: Communicator, plan: Plan, q: Tensor, orders: Sequence[Tensor] | None) -> None:
        size = plan.heads
        group, place = divmod(comm.rank, size)
        self.inside = PartOfGroup(comm, range(group * size, (group + 1) * size))
        self.between = PartOfGroup(comm, range(place, comm.size, size))
        lengths = [plan.key_lengths[i : i + size] for i in range(0, comm.size, size)]
        self.plan = replace(
            plan,
            heads=1,
            blocks=plan.blocks.merged(size, orders),
            key_lengths=tuple(map(sum, lengths)),
        )
        self._heads, self._kv_heads = q.shape[1], 0
        self._lengths = (q.shape[2],) * size, lengths[group]
        self._order = None if orders is None else orders[group]
        self._key_order = self._order if plan.blocks.keys_are_rows else None

    def rows(self, label: str) -> Item:
        """How what goes with query heads changes hands."""
        shares = HeadShares(self._heads, self._heads, self.inside.size)
        return Item(
            label, [shares.query_heads(peer) for peer in range(self.inside.size)], self._lengths[0], self._order
        )

    def keys(self, label: str, kv_heads: int) -> Item:
        """How what goes with key heads does."""
        self._kv_heads = kv_heads
        shares = self._shares
        return Item(
            label, [shares.key_heads(peer) for peer in range(self.inside.size)], self._lengths[1], self._key_order
        )

    @property
    def _shares(self) -> HeadShares:
        return HeadShares(self._heads, self._kv_heads, self.inside.size)

    def uniform(self, x: Tensor) -> Tensor:
        """Key heads (B, g, T, D) such that equally many query heads use each; differentiable."""
        places = self._shares.uniform(self.inside.rank)
        return x if places is None else x.index_select(1, torch.tensor(places, device=x.device))

    def _not_uniform(self, x: Tensor) -> Tensor:
        """The adjoint of `uniform`."""
        places = self._shares.uniform(self.inside.rank)
        if places is None:
            return x
        total = x.new_zeros((x.shape[0], max(places) + 1, *x.shape[2:]))
        return total.index_add_(1, torch.tensor(places, device=x.device), x)

    def deal_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v by rows -> by heads, uniform."""
        both = deal([k, v], [self.keys(name, k.shape[1]) for name in ("k", "v")], self.inside)
        k, v = (self.uniform(x).contiguous() for x in both)
        return k, v

    def collect_keys(self, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Their gradients by heads -> by rows, sent in `dtype`."""
        grads = [self._not_uniform(x).to(dtype) for x in (dk, dv)]
        dk, dv = collect(grads, [self.keys(name, self._kv_heads) for name in ("dk", "dv")], self.inside)
        return dk, dv


@dataclass(frozen=True)
class DealtKeys:
    """A source whose keys are made by rows, when they are needed, and then dealt by heads."""

    source: KeySource
    by: ByHeads
    dtype: torch.dtype

    @property
    def plan(self) -> Plan:
        """That of the ranks with the same heads."""
        return self.by.plan

    def inputs(self) -> Sequence[Tensor]:
        """The source's."""
        return self.source.inputs()

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The source's, dealt; every rank of the group takes part."""
        return self.by.deal_keys(*self.source.keys_values(inputs))

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """The source's, of the gradients that all ranks have of its keys."""
        return self.source.input_grads(inputs, needed, *self.by.collect_keys(dk, dv, self.dtype))

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The source's."""
        return self.source.saved(inputs)

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The source's."""
        return self.source.restored(saved)

    def without_inputs(self) -> KeySource:
        """The same of the source without them."""
        return DealtKeys(self.source.without_inputs(), self.by, self.dtype)


Attend = Callable[[Tensor, Sequence[KeySource], Communicator], tuple[Tensor, Tensor]]


def attend_by_heads(
    q: Tensor, sources: Sequence[KeySource], comm: Communicator, attend: Attend
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
    orders = next((found for s in sources if (found := s.plan.blocks.orders(size)) is not None), None)
    by = [ByHeads(comm, source.plan, q, orders) for source in sources]
    xs, items = [q], [by[0].rows("q")]
    for source, its in zip(sources, by, strict=True):
        if isinstance(source, GivenKeys):
            xs += [source.k, source.v]
            items += [its.keys(name, source.k.shape[1]) for name in ("k", "v")]
    q_dealt, *rest = dealt(xs, items, by[0].inside)
    inner: list[KeySource] = []
    for source, its in zip(sources, by, strict=True):
        if isinstance(source, GivenKeys):
            k, v, *rest = rest
            inner.append(GivenKeys(its.plan, its.uniform(k), its.uniform(v)))
        else:
            inner.append(DealtKeys(source, its, q.dtype))
    o, lse = attend(q_dealt, inner, by[0].between)
    o = collected(o, by[0].rows("o"), by[0].inside)
    (lse_rows,) = collect([lse.unsqueeze(-1)], [by[0].rows("lse")], by[0].inside)
    return o, lse_rows.squeeze(-1)


def forward_by_heads(
    comm: Communicator, plan: Plan, math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`distributed_forward` for a plan that deals heads, beside sources of one softmax that do not.

    Then only the rows' home has the final (o, lse), and the backward pass deals everything again.
    """
    by = ByHeads(comm, plan, q, plan.blocks.orders(plan.heads))
    (q,) = deal([q], [by.rows("q")], by.inside)
    k, v = by.deal_keys(k, v)
    o, lse = distributed_forward(by.between, by.plan, math, q, k, v)
    o, lse = collect([o, lse.unsqueeze(-1)], [by.rows("o"), by.rows("lse")], by.inside)
    return o, lse.squeeze(-1)


def backward_by_heads(
    comm: Communicator,
    plan: Plan,
    math: BlockMath,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`distributed_backward` for such a plan."""
    q, o, lse, do = saved
    by = ByHeads(comm, plan, q, plan.blocks.orders(plan.heads))
    rows = deal([q, o, lse.unsqueeze(-1), do], [by.rows(name) for name in ("q", "o", "lse", "do")], by.inside)
    q, o, lse, do = (x.contiguous() for x in rows)
    k, v = by.deal_keys(k, v)
    dq, dk, dv = distributed_backward(by.between, by.plan, math, (q, o, lse.squeeze(-1), do), k, v)
    (dq,) = collect([dq], [by.rows("dq")], by.inside)
    return dq, *by.collect_keys(dk, dv, dk.dtype)
