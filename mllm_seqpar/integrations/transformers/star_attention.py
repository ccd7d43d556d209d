"""Star Attention in a patched transformers model (`runtime.star`): what it refuses, and its one warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError, MaskError
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.star import StarText, block_length

from .inputs import ForwardInputs
from .text_masks import text_arguments


def check_star(config: SeqParConfig, inputs: ForwardInputs) -> None:
    """Raises ConfigError where `self_attention="star"` is asked for what it is not made for."""
    if config.self_attention != "star":
        return
    if torch.is_grad_enabled():
        raise ConfigError(
            'self_attention="star" is an approximation for inference and has no backward pass; generate with it, or '
            'call the model under torch.no_grad(). To train, patch with self_attention="ring", which is exact'
        )
    if not inputs.use_cache:
        raise ConfigError(
            'self_attention="star" reads a prompt into a cache, and this pass has none; pass use_cache=True (generate '
            'does). To evaluate without a cache, patch with self_attention="ring" or "local", which are exact'
        )


def can_be_cut(context: SeqParContext, inputs: ForwardInputs) -> bool:
    """Whether the prompt has a token for the block of every rank."""
    return block_length(inputs.length, context.comm.size) > 0


def star_shards(context: SeqParContext, inputs: ForwardInputs) -> StarText:
    """How the context of a prompt is dealt to the ranks; says once per patched model that this is approximate.

    Of two ranks it is not: the second one's block and the anchor are the whole context.

    Raises:
        MaskError: an attention mask that is not (B, L), or a sample that is all padding where the anchor is.
    """
    valid, first = text_arguments(inputs)
    text = StarText(inputs.batch, inputs.length, context.comm, valid, first)
    if valid is not None:
        without = (~valid[:, : text.block].bool().any(1)).nonzero().flatten().tolist()
        if without:
            raise MaskError(
                f"attention_mask: sample {without[0]} has padding only among its first {text.block} tokens, which are "
                'the anchor of self_attention="star" and must be text; pass samples of about one length, or one by one'
            )
    if context.comm.size > 2:
        context.report_approximation(text.block, inputs.length - text.length)
    return text


def joined_states(context: Sequence[Tensor | None] | None, query: Sequence[Tensor] | None) -> Any:
    """Hidden states of the layers that were asked for: (B, n b, C) of the context and (B, r, C) of what follows it."""
    if context is None or query is None:
        return None
    return tuple(None if x is None else torch.cat([x, y], dim=1) for x, y in zip(context, query, strict=True))
