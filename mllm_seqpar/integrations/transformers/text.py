"""The text of a pass: how it is sharded, the rows that this rank computes, and attention masks as rectangles.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, K keys, H heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import MaskError
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.star import StarText
from mllm_seqpar.runtime.text_shards import TextShards, packed_starts

from .family import Family
from .inputs import ForwardInputs


def text_shards(context: SeqParContext, inputs: ForwardInputs) -> TextShards:
    """Return how the text of a pass is sharded; raise MaskError if the attention mask is not (B, L)."""
    valid, first = _padding_and_packing(inputs)
    return TextShards(inputs.batch, inputs.length, context.comm, context.config.text_layout, valid, first)


def star_text_shards(context: SeqParContext, inputs: ForwardInputs) -> StarText:
    """Return how Star Attention shards the context of a prompt; warn once per patched model that it is approximate.

    With two ranks it is exact: the anchor and the second rank's block are the whole context. MaskError refuses a mask
    that is not (B, L), and samples that are all padding in the anchor.
    """
    valid, first = _padding_and_packing(inputs)
    text = StarText(inputs.batch, inputs.length, context.comm, valid, first)
    if valid is not None:
        without_text = (~valid[:, : text.block].bool().any(1)).nonzero().flatten().tolist()
        if without_text:
            raise MaskError(
                f"attention_mask: sample {without_text[0]} has padding only among its first {text.block} tokens, which "
                'are the anchor of self_attention="star" and must be text; pass samples of about one length, or one '
                "by one"
            )
    if context.comm.size > 2:
        context.report_approximation(text.block, inputs.length - text.length)
    return text


def _padding_and_packing(inputs: ForwardInputs) -> tuple[Tensor | None, Tensor | None]:
    """Return `valid` and `first` of `TextShards`."""
    mask, shape = inputs.attention_mask, (inputs.batch, inputs.length)
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != shape):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"attention_mask: sequence-parallel text takes a padding mask of shape {shape}, got {found}")
    positions = inputs.on_host("position_ids") if mask is None and inputs.detects_packing else None
    return inputs.on_host("attention_mask"), None if positions is None else packed_starts(positions)


def rows_of_pass(family: Family, inputs: ForwardInputs, state: ForwardState) -> tuple[Tensor, Tensor, Any]:
    """Return (embeds, positions, attention mask) of the rows that this rank computes."""
    text, mask = state.text, inputs.attention_mask
    if state.shards_text and text is not None:
        embeds, positions = embeddings(family, inputs, lambda x: text.shard(x, 1)), text.shard(inputs.positions(), 1)
        if not state.takes_mask:
            return embeds, positions, dummy_mask(inputs.text)
    if mask is None and not inputs.detects_packing:  # a mask of ones keeps transformers from looking at positions
        mask = torch.ones(inputs.batch, inputs.length, dtype=torch.long, device=inputs.text.device)
    return embeddings(family, inputs, lambda x: x), inputs.positions(), mask


def embeddings(family: Family, inputs: ForwardInputs, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the embeddings (B, s, C) of the rows that `select` takes from the text."""
    rows = select(inputs.text)
    return family.embed(rows) if inputs.inputs_embeds is None else rows


def dummy_mask(text: Tensor) -> Tensor:
    """Return a mask that transformers passes on unchanged, for passes whose mask is in the `ForwardState`."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=text.device)
