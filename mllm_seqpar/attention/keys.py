"""The keys and values of a softmax: placement, mask and schedule (`CallSpec`), and chunks that are made when needed.

A chunk is given (`GivenKeys`), recomputed from features (`runtime.visual_features`), copied from host memory
(`runtime.offload`) or read from a cache there (`runtime.frames`). Most keys are one chunk. Streamed keys arrive
in several, and never exist as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.kernels.base import fold_batch, fold_heads, unfold_batch, unfold_heads
from mllm_seqpar.masks.rectangles import Span

from .call_spec import CallSpec


class KeyChunks(Protocol):
    """One pass over the chunks of streamed keys, in order."""

    def __iter__(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Yield (start, stop), k and v (1, G, keys, D), of the units from `start` to `stop` after this rank's first."""

    def add_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """Take the gradients of the k and v that were yielded last."""

    def input_grads(self) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, after the last chunk."""


class Keys(ABC):
    """One set of keys and values of a softmax, as this rank has them.

    Attributes:
        spec: the placement, the mask and the schedule.
        k: (B or 1, G, T, D), if a cache stores it.
        streamed: whether the keys arrive in several chunks.
        modules: the modules that compute k, v and their gradients; none if k and v exist.
    """

    spec: CallSpec
    k: Tensor
    streamed = False
    modules: Sequence[nn.Module]

    def attend_alone(self, q: Tensor, scale: float) -> Tensor | None:
        """Return o (B, H, s, D) of the softmax over these keys alone, if torch's own operator can compute it.

        It is differentiable, and has no log-sum-exp. None: the block kernels compute it.
        """
        return None

    @abstractmethod
    def inputs(self) -> Sequence[Tensor]:
        """Return the tensors that k and v are computed from and that may require gradients; always the same number."""

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the part of `inputs` that backward needs saved; `restored` finds the rest elsewhere."""
        return inputs

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return all inputs, in the order of `inputs`, from the saved ones."""
        return saved

    def without_inputs(self) -> Keys:
        """Return these keys without references to tensors that `saved` names, for backward to hold.

        Activation checkpointing and offloading reach only tensors that autograd itself saves.
        """
        return self

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's k, v (B or 1, G, T, D). Called without grad mode, in forward and again in backward."""
        raise NotImplementedError

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the gradients of `inputs` (None where not needed), given those of k and v in float32."""
        raise NotImplementedError

    def chunks(self, inputs: Sequence[Tensor], needed: Sequence[bool] | None = None) -> KeyChunks:
        """Begin a pass over streamed keys; with `needed`, a backward pass that returns gradients of these inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class GivenKeys(Keys):
    """Keys and values that exist as tensors and are saved for backward.

    Attributes:
        whole: computes `attend_alone` with the unpatched model's own attention, given q and the scale.
        window: the number of keys that a row attends to at most, of a text; None: all before it.
    """

    modules = ()

    spec: CallSpec
    k: Tensor
    v: Tensor
    whole: Callable[[Tensor, float], Tensor] | None = None
    window: int | None = None

    def attend_alone(self, q: Tensor, scale: float) -> Tensor | None:
        if self.whole is not None:
            return self.whole(q, scale)
        keys = self.spec.visible_keys
        if keys is None:
            return None
        k, v, batch = self.k[:, :, keys], self.v[:, :, keys], q.shape[0]
        shared = k.shape[0] < batch
        rows = fold_heads(fold_batch(q) if shared else q, k.shape[1])
        o = unfold_heads(F.scaled_dot_product_attention(rows, k, v, scale=scale), q.shape[1])
        return unfold_batch(o, batch) if shared else o

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

    def without_inputs(self) -> GivenKeys:
        empty = self.k.new_empty(0)
        return GivenKeys(self.spec, empty, empty)


def attended_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in: autocast's if it is enabled, else that of x."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if it is enabled, as autocast does for torch's own attention.

    Under autocast, q and k leave the rotary embedding in float32, while v has the dtype of the projection.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(attended_dtype(x)) for x in tensors)


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
