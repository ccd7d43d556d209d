"""The keys and values of a softmax: placement, mask and schedule (`CallSpec`), and chunks that are made when needed.

A chunk is given (`GivenKeys`), recomputed from features (`runtime.visual_features`), copied from host memory
(`runtime.offload`) or read from a cache there (`runtime.visual_kv_cache`). Most keys are one chunk (`WholeKeys`). Keys
that arrive in several chunks, and never exist as a whole, are `attention.streamed.StreamedKeys`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.kernels.base import fold_batch, fold_heads, unfold_batch, unfold_heads

from .call_spec import CallSpec

if TYPE_CHECKING:  # `ulysses` imports it, and makes it
    from .head_layout import HeadLayout

NOTHING = torch.empty(0)

InputGrads = Callable[[Tensor, Tensor], Sequence[Tensor | None]]
"""dk, dv in the spec's `accumulate_dtype` -> the gradients of the inputs of k and v; None where not needed."""


class Keys(ABC):
    """One set of keys and values of a softmax, as this rank has them: `WholeKeys` or `StreamedKeys`.

    Attributes:
        spec: the placement, the mask and the schedule.
        stored: K if it exists, given or in a cache: tensors (B or 1, G, T, D), one for each cache.
        torch_attend: computes o (B, H, s, D) of a softmax over these keys alone, given q and the scale, by torch's own
            operator. It is differentiable, and has no log-sum-exp. None: the block kernels compute it.
        row_layout: how rows are head-sharded for these keys alone, which share a softmax with others (`ulysses`). None:
            rows stay as they are.
        modules: the modules that compute k, v and their gradients; none if k and v exist.
    """

    spec: CallSpec
    stored: Sequence[Tensor] = ()
    torch_attend: Callable[[Tensor, float], Tensor] | None = None
    row_layout: HeadLayout | None = None
    modules: Sequence[nn.Module]

    @abstractmethod
    def inputs(self) -> Sequence[Tensor]:
        """Return the tensors that k and v are computed from and that may require gradients; always the same number."""

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[Self, Sequence[Tensor]]:
        """Return these keys without the tensors that backward needs, and these tensors, for autograd to save.

        Activation checkpointing and offloading reach only tensors that autograd itself saves.
        """
        return self, inputs


class WholeKeys(Keys):
    """Keys that are one chunk."""

    @abstractmethod
    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's k, v (B or 1, G, T, D). Called without grad mode."""

    @abstractmethod
    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        """Return `keys_values` again, in backward, and the function of their gradients, to be called at most once.

        This is `torch.func.vjp` of `keys_values`, without a graph where none is needed.

        Args:
            saved: the tensors that `for_backward` returned.
            needed: whether the gradient of each input is needed.
        """


@dataclass(frozen=True)
class GivenKeys(WholeKeys):
    """Keys and values that exist as tensors and are saved for backward.

    Attributes:
        window: the number of keys that a row attends to at most, of a text; None: all before it.
    """

    modules = ()

    spec: CallSpec
    k: Tensor
    v: Tensor
    torch_attend: Callable[[Tensor, float], Tensor] | None = None
    window: int | None = None

    @property
    def stored(self) -> Sequence[Tensor]:  # type: ignore[override]
        return (self.k,)

    def inputs(self) -> Sequence[Tensor]:
        return self.k, self.v

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v, contiguous, as transfers need them."""
        k, v = inputs
        return k.contiguous(), v.contiguous()

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[GivenKeys, Sequence[Tensor]]:
        return GivenKeys(self.spec, NOTHING, NOTHING), inputs

    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        def grads(*of_keys_values: Tensor) -> Sequence[Tensor | None]:
            given = zip(saved, of_keys_values, needed, strict=True)
            return [grad.to(x.dtype) if need else None for x, grad, need in given]

        return *self.keys_values(saved), grads


def attend_unmasked(k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
    """Return o (B, H, s, D) of rows that attend to all of k and v (B or 1, G, T, D), by torch's own operator."""
    shared = k.shape[0] < q.shape[0]
    rows = fold_heads(fold_batch(q) if shared else q, k.shape[1])
    o = unfold_heads(F.scaled_dot_product_attention(rows, k, v, scale=scale), q.shape[1])
    return unfold_batch(o, q.shape[0]) if shared else o


def attention_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in: autocast's if it is enabled, else that of x."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def cast_for_attention(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if it is enabled, as autocast does for torch's own attention.

    Under autocast, q and k leave the rotary embedding in float32, while v has the dtype of the projection.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(attention_dtype(x)) for x in tensors)
