"""Head sharding by all-to-all: DeepSpeed-Ulysses (arXiv 2309.14509), and its hybrid with every other schedule.

    row-sharded (B, H, s, D), (B, G, t, D)  -- all-to-all -->  head-sharded (B, H/u, u s, D), (B, g, sum of t, D)

u consecutive ranks (the head-sharding degree) exchange shards, after which each holds all their rows and keys, for some
of the heads. The n / u ranks with the same heads then run any mesh shape (a, b), as whole ranks would; u = n and (1, 1)
is plain Ulysses. A KV head is sent only to the ranks whose query heads use it (`schedules.head_sharding`).

Forward sends Q, K, V and O, backward dO, dQ, dK and dV. These are complete and therefore sent in the inputs' dtype,
except dK and dV of a KV head that several ranks use: those are partial sums, sent in the dtype of the inputs too or in
the accumulation dtype (`CallSpec.direct_result_dtype`). The tensors saved for backward are head-sharded too, and as
large as row-sharded ones. Causal rows are put in the order of the text, in which their mask has few and large
rectangles.

`head_sharded` and `row_sharded` are for softmaxes whose keys all have the same degree, and `forward_head_sharded` for
keys that share a softmax with others: its final (o, lse) are row-sharded, after the merge, so the first way would have
to save o and lse of every set. The second way, for all, would send Q, K, V and lse again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mllm_seqpar.comm import Communicator, Recv, Send, Subgroup
from mllm_seqpar.schedules.head_sharding import HeadShards

from .call_spec import CallSpec
from .executor import BlockMath, FinalRows, distributed_backward, distributed_forward
from .kept_results import running_region
from .keys import GivenKeys, InputGrads, WholeKeys


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

    Args:
        parts: of each tensor, by receiving rank. That of this rank is returned itself.
        shapes: (heads, length) of what is received of each tensor, by sending rank.
        items: for the labels.
        comm: the group.
    """
    sends, recvs, received = [], [], []
    for own, expected, item in zip(parts, shapes, items, strict=True):
        found = []
        for peer, (part, shape) in enumerate(zip(own, expected, strict=True)):
            if peer == comm.rank:
                found.append(part)
                continue
            found.append(part.new_empty((part.shape[0], *shape, part.shape[3])))
            sends += [Send(peer, part.contiguous(), item.label)] if part.numel() else []
            recvs += [Recv(peer, found[-1])] if found[-1].numel() else []
        received.append(found)
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
    """Forward: `shard_heads` or, with `gather`, `gather_heads` of one tensor. Backward: the other, of its gradient.

    The bytes of the gradient are counted under "d" and the label of the tensor. With `keep`, the result is kept for
    recomputation under activation checkpointing.
    """

    @staticmethod
    def forward(ctx: Any, comm: Communicator, item: HeadTensor, gather: bool, keep: bool, x: Tensor) -> Tensor:
        ctx.comm, ctx.item, ctx.gather = comm, item, gather
        reshard, region = gather_heads if gather else shard_heads, running_region() if keep else None
        if region is None:
            return reshard([x], [item], comm)[0]
        return region.once(lambda: tuple(reshard([x], [item], comm)), item.label)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        item = ctx.item._replace(label=f"d{ctx.item.label}")
        return None, None, None, None, (shard_heads if ctx.gather else gather_heads)([grad], [item], ctx.comm)[0]


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
        """Return the layout for the row-sharded queries q, made once for each shape."""
        key = HeadLayout, comm.rank, comm.identity, q.shape[1:3], q.device, orders is None
        found: HeadLayout | None = spec.derived.get(key)
        if found is None:
            found = spec.derived[key] = cls(comm, spec, q, orders)
        return found

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

    def gather_kv_grads(
        self, dk: Tensor, dv: Tensor, kv_heads: int, dtype: torch.dtype, *, complete: bool
    ) -> tuple[Tensor, Tensor]:
        """Return row-sharded dk and dv with `kv_heads` heads: the adjoint of `shard_kv`.

        They are sent in `dtype`, that of the inputs, or in `CallSpec.direct_result_dtype` if they are not complete or
        several ranks hold a KV head.
        """
        shards = HeadShards(self._heads, kv_heads, self.inside.size)
        several = sum(len(shards.kv_heads_of(rank)) for rank in range(self.inside.size)) > kv_heads
        if several or not complete:
            dtype = self.spec.direct_result_dtype(dtype)
        places = shards.kv_head_index(self.inside.rank)
        grads = [(x if places is None else _add_heads(x, places)).to(dtype) for x in (dk, dv)]
        dk, dv = gather_heads(grads, self._keys(("dk", "dv"), shards), self.inside)
        return dk, dv


def _add_heads(x: Tensor, places: Sequence[int]) -> Tensor:
    total = x.new_zeros((x.shape[0], max(places) + 1, *x.shape[2:]))
    for place, part in zip(places, x.unbind(1), strict=True):  # one by one: index_add_ on CUDA has no fixed order
        total[:, place] += part
    return total


@dataclass(frozen=True)
class HeadShardedKeys(WholeKeys):
    """Keys whose k and v are head-sharded when they are needed.

    Given k and v are saved head-sharded, so backward does not send them again; recomputed ones are sent again.

    Attributes:
        keys: the same keys, row-sharded.
        layout: how its k and v are resharded.
        dtype: the dtype of the queries.
        kv_heads: the number of KV heads of given k and v, before sharding; None if they are recomputed.
        resharded: whether the inputs are head-sharded k and v already, which is so in backward.
    """

    keys: WholeKeys
    layout: HeadLayout
    dtype: torch.dtype
    kv_heads: int | None
    resharded: bool = False
    _sharded: list[Tensor] = field(default_factory=list)

    @property
    def spec(self) -> CallSpec:  # type: ignore[override]
        return self.layout.spec

    @property
    def modules(self) -> Sequence[nn.Module]:  # type: ignore[override]
        return self.keys.modules

    def inputs(self) -> Sequence[Tensor]:
        return self.keys.inputs()

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return head-sharded k and v; collective over the group."""
        if self.resharded:
            return inputs[0], inputs[1]
        k, v = self.layout.shard_kv(*self.keys.keys_values(inputs))
        if isinstance(self.keys, GivenKeys):
            self._sharded[:] = k, v
        return k, v

    def vjp(self, inputs: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        """Return head-sharded k and v, and the function of their gradients; both are collective over the group."""
        k, v, input_grads = self.keys.vjp(inputs, needed)
        kv_heads = k.shape[1] if self.kv_heads is None else self.kv_heads
        if not self.resharded:
            k, v = self.layout.shard_kv(k, v)

        def grads(dk: Tensor, dv: Tensor) -> Sequence[Tensor | None]:
            return input_grads(*self.layout.gather_kv_grads(dk, dv, kv_heads, self.dtype, complete=True))

        return k, v, grads

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(self.keys, GivenKeys) and not self._sharded:
            self.keys_values(inputs)  # in a recomputation with kept results, which do not need them
        return self._sharded or self.keys.saved(inputs)

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        return saved if self.resharded else self.keys.restored(saved)

    def without_inputs(self) -> HeadShardedKeys:
        return replace(self, keys=self.keys.without_inputs(), resharded=bool(self._sharded), _sharded=[])


def head_sharded(
    q: Tensor, keys: Sequence[WholeKeys], comm: Communicator
) -> tuple[Tensor, list[HeadShardedKeys], HeadLayout]:
    """Return head-sharded rows, keys and their layout, given q (B, H, s, D) and row-sharded keys.

    All keys have the same head-sharding degree. The ranks `across` of the layout attend to them.
    """
    groups = keys[0].spec.head_groups(comm)
    found = (each.spec.masks.orders(groups, q.device) for each in keys)
    orders = next((order for order in found if order is not None), None)
    layouts = [HeadLayout.of(comm, each.spec, q, orders) for each in keys]
    first = layouts[0]
    sharded_q = _Reshard.apply(first.inside, first.rows("q"), False, False, q)
    sharded = []
    for each, layout in zip(keys, layouts, strict=True):
        kv_heads = each.k.shape[1] if isinstance(each, GivenKeys) else None
        sharded.append(HeadShardedKeys(each, layout, q.dtype, kv_heads))
    return sharded_q, sharded, first


def row_sharded(o: Tensor, lse: Tensor, layout: HeadLayout, keep: bool) -> tuple[Tensor, Tensor]:
    """Return o (B, H, s, D) and lse (B, H, s) of this rank's rows, given those of its heads.

    With `keep`, they are kept for recomputation under activation checkpointing.
    """
    keep &= o.requires_grad
    o = _Reshard.apply(layout.inside, layout.rows("o"), True, keep, o)
    row_lse = _Reshard.apply(layout.inside, layout.rows("lse"), True, keep, lse.unsqueeze(-1))
    return o, row_lse.squeeze(-1)


def forward_head_sharded(
    comm: Communicator, spec: CallSpec, block_math: BlockMath, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `distributed_forward` for head-sharded keys that share a softmax with other keys.

    The final (o, lse) are row-sharded in that case, so backward reshards everything again.
    """
    layout = HeadLayout.of(comm, spec, q, spec.masks.orders(spec.head_groups(comm), q.device))
    (q,) = shard_heads([q], [layout.rows("q")], layout.inside)
    k, v = layout.shard_kv(k, v)
    o, lse = distributed_forward(layout.across, layout.spec, block_math, q, k, v)
    o = o.to(spec.direct_result_dtype(q.dtype))
    o, lse = gather_heads([o, lse.unsqueeze(-1)], [layout.rows("o"), layout.rows("lse")], layout.inside)
    return o.to(spec.accumulate_dtype), lse.squeeze(-1)


def backward_head_sharded(
    comm: Communicator,
    spec: CallSpec,
    block_math: BlockMath,
    rows: FinalRows,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `distributed_backward` for such keys."""
    q, _, lse, do, delta = rows.with_delta()
    assert delta is not None
    layout = HeadLayout.of(comm, spec, q, spec.masks.orders(spec.head_groups(comm), q.device))
    items = [layout.rows(name) for name in ("q", "do", "lse", "delta")]
    sharded = shard_heads([q, do, lse.unsqueeze(-1), delta.unsqueeze(-1)], items, layout.inside)
    q, do, lse, delta = (x.contiguous() for x in sharded)
    kv_heads = k.shape[1]
    k, v = layout.shard_kv(k, v)
    final = FinalRows(q, None, lse.squeeze(-1), do, delta.squeeze(-1))
    dq, dk, dv = distributed_backward(layout.across, layout.spec, block_math, final, k, v)
    (dq,) = gather_heads([dq.to(spec.direct_result_dtype(q.dtype))], [layout.rows("dq")], layout.inside)
    kv_grads = layout.gather_kv_grads(dk, dv, kv_heads, q.dtype, complete=False)
    return dq.to(spec.accumulate_dtype), *kv_grads
