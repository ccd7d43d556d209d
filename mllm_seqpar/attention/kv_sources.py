"""Where the keys and values of one attention call come from: tensors, or shared features projected on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .distributed import CallSpec


class KVSource(Protocol):
    """One set of keys of a joint softmax, with the plan by which the group attends to it."""

    @property
    def plan(self) -> CallSpec:
        """How the group attends to these keys."""

    def inputs(self) -> Sequence[Tensor]:
        """The tensors that k and v are computed from and that gradients may flow to; the same number every time."""

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """k, v (B or 1, G, T, D) of this rank. Called without grad mode, in forward and again in backward."""

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """The gradients of `inputs` (None where not needed), given those of k and v in float32."""

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What of `inputs` must be kept for the backward pass; the rest is read again by `restored`."""

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """All inputs, in the order of `inputs`, from what was kept."""

    def without_inputs(self) -> KVSource:
        """What the backward pass holds on to: this source without tensors that `saved` names.

        Only what goes through autograd's saved tensors can be dropped by activation checkpointing, or offloaded.
        """


@dataclass(frozen=True)
class GivenKV:
    """Keys and values that are tensors already, kept for the backward pass as they are."""

    plan: CallSpec
    k: Tensor
    v: Tensor

    def inputs(self) -> Sequence[Tensor]:
        """k and v."""
        return self.k, self.v

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """k and v, contiguous, as transfers need them."""
        k, v = inputs
        return k.contiguous(), v.contiguous()

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """dk and dv in the dtypes of k and v."""
        return [g.to(x.dtype) if need else None for x, g, need in zip(inputs, (dk, dv), needed, strict=True)]

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Everything."""
        return inputs

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """What was kept."""
        return saved

    def without_inputs(self) -> GivenKV:
        """The plan alone."""
        return GivenKV(self.plan, self.k.new_empty(0), self.v.new_empty(0))


@dataclass(frozen=True)
class AutocastState:
    """The autocast mode of the forward pass, to be entered again when something is recomputed in the backward pass."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        """What is in force now for that kind of device."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self) -> torch.autocast:
        """A context manager that puts this state in force."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
