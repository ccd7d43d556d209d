"""Text masks as transformers passes them, brought into tiles and shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks.rectangles import Rectangle, Span, masked_rectangles
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.text_shards import TextShards, packed_starts

from .inputs import ForwardInputs


@dataclass(frozen=True)
class _TensorRule:
    """A mask that exists already: visible (B or 1, L, K) bool."""

    visible: Tensor

    def expand(self, batch: Span, rows: Span, keys: Span, device: torch.device) -> Tensor:
        part = self.visible if self.visible.shape[0] == 1 else self.visible[slice(*batch)]
        return part[:, slice(*rows), slice(*keys)].to(device)


def text_shards(context: SeqParContext, inputs: ForwardInputs) -> TextShards:
    """How the text of a sharded pass is dealt to the ranks, with its padding and packed sequences.

    Raises:
        MaskError: an attention mask that is not (B, L).
    """
    valid, first = text_arguments(inputs)
    return TextShards(inputs.batch, inputs.length, context.comm, context.config.text_layout, valid, first)


def text_arguments(inputs: ForwardInputs) -> tuple[Tensor | None, Tensor | None]:
    """`valid` and `first` of `TextShards`: the padding, and where each packed sequence begins.

    Raises:
        MaskError: an attention mask that is not (B, L).
    """
    mask, shape = inputs.attention_mask, (inputs.batch, inputs.length)
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != shape):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"attention_mask: sequence-parallel text takes a padding mask of shape {shape}, got {found}")
    return mask, packed_starts(inputs.positions()) if mask is None and inputs.packed else None


def whole_text_mask(inputs: ForwardInputs) -> Tensor | None:
    """The attention mask for text that every rank has whole: transformers' own, packed sequences and all."""
    mask = inputs.attention_mask
    if mask is None and not inputs.packed:  # a mask of ones keeps transformers from looking at positions
        return torch.ones(inputs.batch, inputs.length, dtype=torch.long, device=inputs.text.device)
    return mask


def causal_rectangles(mask: Tensor | None, q: Tensor, k: Tensor) -> Iterable[Rectangle]:
    """The tiles of rows (B, H, L, D) against the cached and new keys (B, G, K, D); no mask means plain causal."""
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    if mask is None:
        before = keys - length
        if before:
            yield Rectangle((0, batch), (0, length), (0, before))
        yield Rectangle((0, batch), (0, length), (before, keys), "causal")
        return
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise MaskError(
            f"attention_mask: expected (B, 1, rows, keys) as transformers prepares it, got {tuple(mask.shape)}"
        )
    visible = mask[:, 0, :, :keys]
    rule = _TensorRule(visible if visible.dtype is torch.bool else visible >= 0)
    yield from masked_rectangles((0, batch), (0, length), (0, keys), 1, rule)
