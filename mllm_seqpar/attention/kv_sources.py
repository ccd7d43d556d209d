"""KV sources of an attention call: the protocol, and given K and V. `runtime.visual_features` has recomputed ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .call_spec import CallSpec


class KVSource(Protocol):
    """One set of keys and values of a joint softmax."""

    @property
    def spec(self) -> CallSpec:
        """How the group attends to these keys."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that `keys_values` and `input_grads` compute with; none if k and v exist."""

    def inputs(self) -> Sequence[Tensor]:
        """Return the tensors that k and v are computed from and that may require gradients; always as many."""

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's k, v (B or 1, G, T, D). Called without grad mode, in forward and again in backward."""

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the gradients of `inputs` (None where not needed), given those of k and v in float32."""

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the part of `inputs` that backward needs saved; `restored` finds the rest elsewhere."""

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return all inputs, in the order of `inputs`, from the saved ones."""

    def without_inputs(self) -> KVSource:
        """Return this source without references to tensors that `saved` names, for backward to hold.

        Activation checkpointing and offloading reach only tensors that autograd itself saves.
        """


@dataclass(frozen=True)
class GivenKV:
    """Keys and values that exist as tensors and are saved for backward."""

    spec: CallSpec
    k: Tensor
    v: Tensor
    modules: Sequence[nn.Module] = ()

    def inputs(self) -> Sequence[Tensor]:
        return self.k, self.v

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v, contiguous, as transfers need them."""
        k, v = inputs
        return k.contiguous(), v.contiguous()

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """Return dk and dv in the dtypes of k and v."""
        return [g.to(x.dtype) if need else None for x, g, need in zip(inputs, (dk, dv), needed, strict=True)]

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return inputs

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        return saved

    def without_inputs(self) -> GivenKV:
        return GivenKV(self.spec, self.k.new_empty(0), self.v.new_empty(0))


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if it is enabled, as autocast does for torch's own attention.

    Under autocast, q and k leave the rotary embedding in float32, while v has the dtype of the projection.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    narrow = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 else x.to(narrow) for x in tensors)


@dataclass(frozen=True)
class AutocastState:
    """The autocast mode of the forward pass, for recomputation in backward."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self) -> AbstractContextManager[object]:
        """Return a context manager that restores this mode."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return nullcontext()  # most passes; a context manager of autocast takes as long as a small projection
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
