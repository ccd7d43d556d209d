"""Head sharding by all-to-all: DeepSpeed-Ulysses (arXiv 2309.14509), and its hybrid with every other schedule.

    row-sharded (B, H, s, D), (B, G, t, D)  -- all-to-all -->  head-sharded (B, H/u, u s, D), (B, g, sum of t, D)

u consecutive ranks (the head-sharding degree) exchange shards, after which each holds all their rows and keys, for some
of the heads. The n / u ranks with the same heads then run any mesh shape (a, b), as whole ranks would; u = n and (1, 1)
is plain Ulysses. A KV head is sent only to the ranks whose query heads use it (`schedules.head_sharding`).

Forward sends Q, K, V and O, backward dO, dQ, dK and dV. These are complete and therefore sent in the inputs' dtype,
except dK and dV of a KV head that several ranks use: those are partial sums, sent in the dtype of the inputs too or in
the accumulation dtype (`CallSpec.direct_result_dtype`). Causal rows and keys are put in the order of the text, in which
each row attends to one interval.

K and V are head-sharded before attention if they are given (`HeadShardedKeys`), and saved for backward in this form.
Recomputed ones are head-sharded whenever they are projected (`ReshardedKeys`). Rows are head-sharded around the
softmax, and q, o and the log-sum-exp are saved in this form too. If the keys of a softmax differ in their degree, its
final o and log-sum-exp are those of row-sharded rows. Rows are then head-sharded around the attention to each set of
keys (`Keys.row_layout`), in forward and again in backward, where their delta is sent instead of o.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mllm_seqpar.comm import Communicator

from .call_spec import CallSpec
from .head_layout import HeadLayout
from .keys import NOTHING, GivenKeys, InputGrads, Keys, WholeKeys


@dataclass(frozen=True)
class HeadShardedKeys(WholeKeys):
    """Given k and v that are head-sharded. They are saved for backward, which does not send them again.

    Attributes:
        layout: how k and v are resharded.
        given: row-sharded k and v, which receive the gradients.
        kv_heads: the number of heads of `given`.
        k, v: head-sharded.
        row_layout: see `Keys`.
    """

    modules = ()

    spec: CallSpec
    layout: HeadLayout
    given: tuple[Tensor, ...]
    kv_heads: int
    k: Tensor
    v: Tensor
    row_layout: HeadLayout | None = None

    @classmethod
    def of(cls, keys: GivenKeys, layout: HeadLayout, rows: HeadLayout | None) -> HeadShardedKeys:
        """Return the head-sharded keys; collective over the group."""
        given = keys.k, keys.v
        with torch.no_grad():
            return cls(layout.spec, layout, given, keys.k.shape[1], *layout.shard_kv(*given), rows)

    def inputs(self) -> Sequence[Tensor]:
        return self.given

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[HeadShardedKeys, Sequence[Tensor]]:
        return replace(self, given=(), k=NOTHING, v=NOTHING), (self.k, self.v)

    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        k, v = saved

        def grads(dk: Tensor, dv: Tensor) -> Sequence[Tensor | None]:
            gathered = self.layout.gather_kv_grads(dk, dv, self.kv_heads, k.dtype)
            return [x.to(k.dtype) if need else None for x, need in zip(gathered, needed, strict=True)]

        return k, v, grads


@dataclass(frozen=True)
class ReshardedKeys(WholeKeys):
    """Recomputed keys, whose k and v are head-sharded each time that they are projected.

    Attributes:
        layout: how k and v are resharded.
        keys: the same keys, row-sharded.
        dtype: the dtype of the queries.
        row_layout: see `Keys`.
    """

    spec: CallSpec
    layout: HeadLayout
    keys: WholeKeys
    dtype: torch.dtype
    row_layout: HeadLayout | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:  # type: ignore[override]
        return self.keys.modules

    def inputs(self) -> Sequence[Tensor]:
        return self.keys.inputs()

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[ReshardedKeys, Sequence[Tensor]]:
        keys, saved = self.keys.for_backward(inputs)
        return replace(self, keys=keys), saved

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return head-sharded k and v; collective over the group."""
        return self.layout.shard_kv(*self.keys.keys_values(inputs))

    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        """Return head-sharded k and v, and the function of their gradients; both are collective over the group."""
        k, v, input_grads = self.keys.vjp(saved, needed)
        kv_heads = k.shape[1]

        def grads(dk: Tensor, dv: Tensor) -> Sequence[Tensor | None]:
            return input_grads(*self.layout.gather_kv_grads(dk, dv, kv_heads, self.dtype))

        return *self.layout.shard_kv(k, v), grads


def head_sharded(q: Tensor, keys: Sequence[Keys], comm: Communicator) -> tuple[list[Keys], HeadLayout | None]:
    """Return the keys of a softmax with those head-sharded that have a head-sharding degree.

    Args:
        q: (B, H, s, D), the row-sharded queries; for their shape.
        keys: row-sharded; keys that arrive in chunks stay row-sharded.
        comm: the group.

    Returns:
        The keys; and, if all of them have the same degree, the layout by which rows are head-sharded around the
        softmax, which the ranks `across` compute. None: they are head-sharded for each set of keys (`Keys.row_layout`).
    """
    degrees = [each.spec.head_degree if isinstance(each, WholeKeys) else 1 for each in keys]
    alike = min(degrees) == max(degrees)
    by_degree = zip(keys, degrees, strict=True)
    orders = [each.spec.masks.orders(each.spec.head_groups(comm), q.device) if d > 1 else None for each, d in by_degree]
    if alike:
        orders = [next((order for order in orders if order is not None), None)] * len(keys)
    sharded: list[Keys] = []
    layout = None
    for each, degree, order in zip(keys, degrees, orders, strict=True):
        if degree == 1:
            sharded.append(each)
            continue
        layout = HeadLayout.of(comm, each.spec, q, order)
        rows = None if alike else layout
        if isinstance(each, GivenKeys):
            sharded.append(HeadShardedKeys.of(each, layout, rows))
        else:
            assert isinstance(each, WholeKeys)
            sharded.append(ReshardedKeys(layout.spec, layout, each, q.dtype, rows))
    return sharded, layout if alike else None
