"""Sources whose keys are dealt by heads, in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .distributed import CallSpec
from .head_layout import HeadLayout
from .kv_sources import GivenKV, KVSource


@dataclass(frozen=True)
class HeadShardedKV:
    """A source whose keys are made by rows, when they are needed, and then dealt by heads.

    Keys that are given are kept as they were dealt; those that are made again in the backward pass are dealt again.
    """

    source: KVSource
    by: HeadLayout
    dtype: torch.dtype
    _dealt: list[Tensor] = field(default_factory=list)

    @property
    def plan(self) -> CallSpec:
        """That of the ranks with the same heads."""
        return self.by.plan

    def inputs(self) -> Sequence[Tensor]:
        """The source's."""
        return self.source.inputs()

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The source's, dealt; every rank of the group takes part."""
        dealt = self.by.deal_keys(*self.source.keys_values(inputs))
        if isinstance(self.source, GivenKV):
            self._dealt[:] = dealt
        return dealt

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """The source's, of the gradients that all ranks have of its keys."""
        return self.source.input_grads(inputs, needed, *self.by.collect_keys(dk, dv, self.dtype))

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The source's, or what was dealt."""
        return self._dealt or self.source.saved(inputs)

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The source's."""
        return self.source.restored(saved)

    def without_inputs(self) -> KVSource:
        """The same of the source without them."""
        if self._dealt:
            return HeadShardedSavedKV(self.by, self.dtype)
        return HeadShardedKV(self.source.without_inputs(), self.by, self.dtype)


@dataclass(frozen=True)
class HeadShardedSavedKV:
    """In the backward pass: keys that were given, as they were dealt in the forward pass."""

    by: HeadLayout
    dtype: torch.dtype

    @property
    def plan(self) -> CallSpec:
        """That of the ranks with the same heads."""
        return self.by.plan

    def inputs(self) -> Sequence[Tensor]:
        """None are asked for in the backward pass."""
        return ()

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What was kept."""
        k, v = inputs
        return k, v

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """By rows, in the dtype of the keys that were given."""
        grads = self.by.collect_keys(dk, dv, self.dtype)
        return [grad.to(self.dtype) if need else None for grad, need in zip(grads, needed, strict=True)]

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What was kept."""
        return inputs

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """What was kept."""
        return saved

    def without_inputs(self) -> KVSource:
        """Itself."""
        return self
