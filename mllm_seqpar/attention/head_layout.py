"""One plan, dealt by heads: who takes part, and how its rows and keys change hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, Subgroup
from mllm_seqpar.schedules.head_sharding import HeadShards

from .all_to_all import HeadTensor, gather_heads, shard_heads
from .distributed import CallSpec


class HeadLayout:
    """One plan, dealt by heads.

    Attributes:
        inside: the ranks that deal heads among themselves.
        between: the ranks with the same heads.
        plan: what these run.
    """

    def __init__(self, comm: Communicator, plan: CallSpec, q: Tensor, orders: Sequence[Tensor] | None) -> None:
        size = plan.heads
        group, place = divmod(comm.rank, size)
        self.inside = Subgroup(comm, range(group * size, (group + 1) * size))
        self.between = Subgroup(comm, range(place, comm.size, size))
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

    def rows(self, label: str) -> HeadTensor:
        """How what goes with query heads changes hands."""
        shares = HeadShards(self._heads, self._heads, self.inside.size)
        return HeadTensor(
            label, [shares.query_heads_of(peer) for peer in range(self.inside.size)], self._lengths[0], self._order
        )

    def keys(self, label: str, kv_heads: int) -> HeadTensor:
        """How what goes with key heads does."""
        self._kv_heads = kv_heads
        shares = self._shares
        return HeadTensor(
            label, [shares.kv_heads_of(peer) for peer in range(self.inside.size)], self._lengths[1], self._key_order
        )

    @property
    def _shares(self) -> HeadShards:
        return HeadShards(self._heads, self._kv_heads, self.inside.size)

    def _uniform(self, x: Tensor) -> Tensor:
        """Key heads (B, g, T, D) such that equally many query heads use each."""
        places = self._shares.kv_head_index(self.inside.rank)
        return x if places is None else torch.stack([x[:, place] for place in places], dim=1)

    def _not_uniform(self, x: Tensor) -> Tensor:
        """The adjoint."""
        places = self._shares.kv_head_index(self.inside.rank)
        if places is None:
            return x
        total = x.new_zeros((x.shape[0], max(places) + 1, *x.shape[2:]))
        for place, part in zip(places, x.unbind(1), strict=True):  # in order: index_add_ on CUDA adds as it happens
            total[:, place] += part
        return total

    def deal_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v by rows -> by heads, uniform."""
        both = shard_heads([k, v], [self.keys(name, k.shape[1]) for name in ("k", "v")], self.inside)
        k, v = (self._uniform(x).contiguous() for x in both)
        return k, v

    def collect_keys(self, dk: Tensor, dv: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Their gradients by heads -> by rows, sent in `dtype`; wide where ranks share a head (partial sums)."""
        shared = sum(len(self._shares.kv_heads_of(peer)) for peer in range(self.inside.size)) > self._kv_heads
        if shared or dtype is None:
            dtype = self.plan.accumulate_dtype
        grads = [self._not_uniform(x).to(dtype) for x in (dk, dv)]
        dk, dv = gather_heads(grads, [self.keys(name, self._kv_heads) for name in ("dk", "dv")], self.inside)
        return dk, dv
