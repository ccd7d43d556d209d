"""Which heads, rows and keys a rank holds with head sharding (`ulysses`), and the all-to-all that reshards tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mllm_seqpar.comm import Communicator, Recv, Send, Subgroup
from mllm_seqpar.kernels import FinalRows
from mllm_seqpar.schedules.head_sharding import HeadShards

from .call_spec import CallSpec
from .kept_results import running_region


class HeadTensor(NamedTuple):
    """How one tensor is resharded.

    Attributes:
        label: the name that its bytes are counted under.
        heads: the heads that each rank holds when the tensor is head-sharded.
        lengths: the rows or keys that each rank holds when it is row-sharded.
        order: sorts the concatenated rows of all ranks; None: they stay in rank order.
    """

    label: str
    heads: Sequence[range]
    lengths: Sequence[int]
    order: Tensor | None


def shard_heads(xs: Sequence[Tensor], items: Sequence[HeadTensor], comm: Communicator) -> list[Tensor]:
    """(B, all heads, this rank's length, D) -> (B, this rank's heads, sum of lengths, D), for each tensor."""
    parts = [[x[:, h.start : h.stop] for h in i.heads] for x, i in zip(xs, items, strict=True)]
    shapes = [[(len(i.heads[comm.rank]), length) for length in i.lengths] for i in items]
    whole = [torch.cat(received, dim=2) for received in _all_to_all(parts, shapes, items, comm)]
    return [
        x if i.order is None else x.index_select(2, i.order.to(x.device)) for x, i in zip(whole, items, strict=True)
    ]


def gather_heads(xs: Sequence[Tensor], items: Sequence[HeadTensor], comm: Communicator) -> list[Tensor]:
    """(B, this rank's heads, sum of lengths, D) -> (B, all heads, this rank's length, D), for each tensor.

    The adjoint of `shard_heads`: a head that several ranks hold is summed over them, in float32 at least.
    """
    ordered = [
        x if i.order is None else torch.empty_like(x).index_copy_(2, i.order.to(x.device), x)
        for x, i in zip(xs, items, strict=True)
    ]
    parts = [x.split(list(i.lengths), dim=2) for x, i in zip(ordered, items, strict=True)]
    shapes = [[(len(heads), i.lengths[comm.rank]) for heads in i.heads] for i in items]
    received = _all_to_all(parts, shapes, items, comm)
    return [_sum_heads(own, i.heads) for own, i in zip(received, items, strict=True)]


def _all_to_all(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, int]]],
    items: Sequence[HeadTensor],
    comm: Communicator,
) -> list[list[Tensor]]:
    """Send the parts (B, heads, length, D) of each tensor to the ranks, and return the parts that each rank sent.

    `shapes` are the (heads, length) of what is received of each tensor, by sending rank.
    """
    sends, recvs, received = [], [], []
    for own, expected, item in zip(parts, shapes, items, strict=True):
        buffers = []
        for peer, (part, shape) in enumerate(zip(own, expected, strict=True)):
            if peer == comm.rank:
                buffers.append(part)
                continue
            buffers.append(part.new_empty((part.shape[0], *shape, part.shape[3])))
            sends += [Send(peer, part.contiguous(), item.label)] if part.numel() else []
            recvs += [Recv(peer, buffers[-1])] if buffers[-1].numel() else []
        received.append(buffers)
    comm.exchange(sends, recvs).wait()
    return received


def _sum_heads(parts: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    if sum(map(len, heads)) == heads[-1].stop:  # each head once
        return torch.cat(list(parts), dim=1)
    first = parts[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros((first.shape[0], heads[-1].stop, *first.shape[2:]), dtype=wide)
    for part, some in zip(parts, heads, strict=True):
        total[:, some.start : some.stop] += part
    return total


class _Reshard(torch.autograd.Function):
    """Forward: `shard_heads` or, with `gather`, `gather_heads`. Backward: the other, of the first tensor's gradient.

    Only the first tensor is differentiable. The bytes of its gradient are counted under "d" and its label. With `keep`,
    the results are kept for recomputation under activation checkpointing.
    """

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, items: Sequence[HeadTensor], gather: bool, keep: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.items, ctx.gather = comm, items, gather
        region = running_region() if keep and any(ctx.needs_input_grad) else None
        compute = functools.partial(_reshard, xs, items, comm, gather)
        resharded = compute() if region is None else region.once(compute, "rows")
        ctx.mark_non_differentiable(*resharded[1:])
        return resharded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
        item = ctx.items[0]._replace(label=f"d{ctx.items[0].label}")
        (d_first,) = _reshard([grad], [item], ctx.comm, not ctx.gather)
        return None, None, None, None, d_first, *(None for _ in others)


def _reshard(xs: Sequence[Tensor], items: Sequence[HeadTensor], comm: Communicator, gather: bool) -> tuple[Tensor, ...]:
    return tuple((gather_heads if gather else shard_heads)(xs, items, comm))


class HeadLayout:
    """The heads, rows and keys that each rank holds in one call with head sharding.

    Attributes:
        inside: the ranks that shard the heads among themselves.
        across: the ranks with the same heads.
        spec: what the ranks in `across` run.
    """

    def __init__(self, comm: Communicator, spec: CallSpec, q: Tensor, orders: Sequence[Tensor] | None) -> None:
        size, groups = spec.head_degree, spec.head_groups(comm)
        group = next(number for number, ranks in enumerate(groups) if comm.rank in ranks)
        place = groups[group].index(comm.rank)
        self.inside = Subgroup(comm, groups[group])
        self.across = Subgroup(comm, [ranks[place] for ranks in groups])
        lengths = [tuple(spec.key_lengths[rank] for rank in ranks) for ranks in groups]
        self.spec = replace(
            spec, head_degree=1, masks=spec.masks.merged(groups, orders), key_lengths=tuple(map(sum, lengths))
        )
        self._heads = q.shape[1]
        self._row_lengths, self._key_lengths = (q.shape[2],) * size, lengths[group]
        self._order = None if orders is None else orders[group]
        self._key_order = self._order if spec.masks.keys_are_rows else None

    @classmethod
    def of(cls, comm: Communicator, spec: CallSpec, q: Tensor, orders: Sequence[Tensor] | None) -> HeadLayout:
        """Return the layout for the row-sharded queries q, made once for each shape.

        `orders` sorts the rows of each group of ranks (`BlockMasks.orders`).
        """
        key = HeadLayout, comm.rank, comm.identity, q.shape[1:3], q.device, orders is None
        return spec.once(key, lambda: cls(comm, spec, q, orders))

    def rows(self, label: str) -> HeadTensor:
        """Return how a tensor with query heads and query rows is resharded."""
        shards = HeadShards(self._heads, self._heads, self.inside.size)
        heads = [shards.query_heads_of(rank) for rank in range(self.inside.size)]
        return HeadTensor(label, heads, self._row_lengths, self._order)

    def _keys(self, labels: tuple[str, str], shards: HeadShards) -> list[HeadTensor]:
        heads = [shards.kv_heads_of(rank) for rank in range(self.inside.size)]
        return [HeadTensor(label, heads, self._key_lengths, self._key_order) for label in labels]

    def shard_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return head-sharded k and v, in which each KV head serves the same number of query heads."""
        shards = HeadShards(self._heads, k.shape[1], self.inside.size)
        both = shard_heads([k, v], self._keys(("k", "v"), shards), self.inside)
        places = shards.kv_head_index(self.inside.rank)
        if places is not None:
            both = [torch.stack([x[:, place] for place in places], dim=1) for x in both]
        k, v = (x.contiguous() for x in both)
        return k, v

    def gather_kv_grads(self, dk: Tensor, dv: Tensor, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return row-sharded dk and dv with `kv_heads` heads: the adjoint of `shard_kv`.

        They are sent in `dtype`, that of the inputs, or, if several ranks hold a KV head, in
        `CallSpec.direct_result_dtype`.
        """
        shards = HeadShards(self._heads, kv_heads, self.inside.size)
        if sum(len(shards.kv_heads_of(rank)) for rank in range(self.inside.size)) > kv_heads:
            dtype = self.spec.direct_result_dtype(dtype)
        places = shards.kv_head_index(self.inside.rank)
        grads = [(x if places is None else _add_heads(x, places)).to(dtype) for x in (dk, dv)]
        dk, dv = gather_heads(grads, self._keys(("dk", "dv"), shards), self.inside)
        return dk, dv

    def shard_rows(self, q: Tensor) -> Tensor:
        """Return the head-sharded rows of q (B, H, s, D); differentiable."""
        (q,) = _Reshard.apply(self.inside, [self.rows("q")], False, False, q)
        return q

    def gather_rows(self, o: Tensor, lse: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Return o (B, H, s, D) and lse (B, H, s) of this rank's rows, given those of its heads; differentiable in o.

        With `keep`, they are kept for recomputation under activation checkpointing.
        """
        items = [self.rows("o"), self.rows("lse")]
        o, lse = _Reshard.apply(self.inside, items, True, keep, o, lse.unsqueeze(-1))
        return o, lse.squeeze(-1)

    def shard_final(self, rows: FinalRows) -> FinalRows:
        """Return the head-sharded rows; they have delta in place of o."""
        q, _, lse, do, _ = rows
        items = [self.rows(name) for name in ("q", "do", "lse", "delta")]
        sharded = shard_heads([q, do, lse.unsqueeze(-1), rows.deltas().unsqueeze(-1)], items, self.inside)
        q, do, lse, delta = (x.contiguous() for x in sharded)
        return FinalRows(q, None, lse.squeeze(-1), do, delta.squeeze(-1))

    def gather_dq(self, dq: Tensor) -> Tensor:
        """Return dq (B, H, s, D) of this rank's rows, given that of its heads."""
        return gather_heads([dq], [self.rows("dq")], self.inside)[0]


def _add_heads(x: Tensor, places: Sequence[int]) -> Tensor:
    total = x.new_zeros((x.shape[0], max(places) + 1, *x.shape[2:]))
    for place, part in zip(places, x.unbind(1), strict=True):  # one by one: index_add_ on CUDA has no fixed order
        total[:, place] += part
    return total
