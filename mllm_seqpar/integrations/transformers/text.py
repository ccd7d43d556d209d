"""The text of a pass: how it is sharded, the rows that this rank computes, and the loss and logits made from them.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, K keys, H heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar._compat import cache_argument
from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm.autograd import group_sum
from mllm_seqpar.errors import MaskError
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.star import StarText
from mllm_seqpar.runtime.text import (
    IGNORE,
    TextShards,
    mean_over_targets,
    packed_starts,
    require_tokens,
    select_logit_rows,
    sharded_causal_lm_loss,
)

from .inputs import ForwardInputs

if TYPE_CHECKING:
    from .family import Family


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
    """Return (embeds, positions, the decoder's attention mask) of the rows of a pass with a sharding of the text.

    These are this rank's rows, or all of them if the text stays whole. Visual tokens are among them.
    """
    text, mask, positions = state.text, inputs.attention_mask, inputs.positions
    assert text is not None
    if state.text_mask != "decoder":
        embeds = state.embedded(embeddings(family, inputs, lambda x: text.shard(x, 1)))
        return embeds, text.shard(positions, -1), dummy_mask(inputs.text)
    if mask is None and not inputs.detects_packing:  # a mask of ones keeps transformers from looking at positions
        mask = torch.ones(inputs.batch, inputs.length, dtype=torch.long, device=inputs.text.device)
    embeds = state.embedded(embeddings(family, inputs, lambda x: x))
    return embeds, positions, family.text_mask(embeds, mask, positions, None)


def embeddings(family: Family, inputs: ForwardInputs, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the embeddings (B, s, C) of the rows that `select` takes from the text."""
    rows = select(inputs.text)
    return family.embed(rows) if inputs.inputs_embeds is None else rows


def dummy_mask(text: Tensor) -> Tensor:
    """Return a mask that transformers passes on unchanged, for passes whose mask is in the `ForwardState`."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=text.device)


def outputs_without_logits(
    family: Family,
    inputs: ForwardInputs,
    hidden: Tensor,
    states: Any,
    kwargs: Mapping[str, Any],
    text: TextShards | None = None,
    cache: Any = None,
) -> CausalLMOutputWithPast:
    """Return the loss, given the last hidden states (B, s, C) of the rows that `text` shards, or of all rows."""
    loss = _loss_of_targets(family, inputs, hidden, kwargs, text)
    return CausalLMOutputWithPast(loss=loss, hidden_states=states, **cache_argument(cache))


def whole_text_outputs(
    family: Family, inputs: ForwardInputs, hidden: Tensor, states: Any, kwargs: Mapping[str, Any], cache: Any = None
) -> CausalLMOutputWithPast:
    """Return loss and logits of a pass in which every rank has all text.

    `hidden` (B, r, C) are the last hidden states of the rows whose logits are returned, and `states` has the hidden
    states of every layer.
    """
    logits, loss = family.lm_head(hidden), None
    if inputs.has_labels:
        if inputs.shift_labels is not None:
            kwargs = {**kwargs, "shift_labels": inputs.shift_labels.contiguous()}  # the loss takes a view of it
        # Labels are passed unchanged, because a loss function of the user may take unshifted ones only. Logits may have
        # more columns than `config.vocab_size` (IDEFICS' `additional_vocab_size`).
        loss = family.model.loss_function(logits=logits, labels=inputs.labels, vocab_size=logits.shape[-1], **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states, **cache_argument(cache))


def uncached_outputs(
    family: Family,
    inputs: ForwardInputs,
    state: ForwardState,
    decoded: Any,
    logits_to_keep: int | Tensor,
    kwargs: Mapping[str, Any],
) -> CausalLMOutputWithPast:
    """Return the loss and, as `config.logits` says, the logits of a pass without a cache.

    `decoded` has the hidden states (B, s, C) of this rank's tokens; of all tokens if the text is not sharded. If
    `logits_to_keep` asks for some rows of the whole text only, they are returned whatever `config.logits` says.
    """
    hidden, hidden_states = decoded.last_hidden_state, decoded.hidden_states
    text = state.text
    assert text is not None
    if family.leaves_out_logits(inputs, logits_to_keep):
        sharding = text if state.shards_text else None
        if sharding is not None:
            hidden_states = gather_hidden_states(sharding, hidden_states)
        return outputs_without_logits(family, inputs, hidden, hidden_states, kwargs, sharding)
    if not state.shards_text or text.comm.size == 1:
        return whole_text_outputs(family, inputs, select_logit_rows(hidden, logits_to_keep), hidden_states, kwargs)
    every_row = isinstance(logits_to_keep, int) and logits_to_keep == 0
    option = state.context.config.logits
    loss = logits = None
    if inputs.has_labels:
        targets = inputs.target_labels(kwargs.get("ignore_index"))
        logits = family.lm_head(hidden)
        counted = {name: kwargs.get(name) for name in ("num_items_in_batch", "ignore_index")}
        loss = sharded_causal_lm_loss(logits, targets, text, **counted)
    if option == "full" or not every_row or (option != "local" and not inputs.has_labels):
        # Hidden states are gathered rather than logits, because the vocabulary is wider than they are.
        logits = family.lm_head(select_logit_rows(text.unshard(hidden, 1), logits_to_keep))
    elif logits is None:
        logits = family.lm_head(hidden)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=gather_hidden_states(text, hidden_states))


def _loss_of_targets(
    family: Family, inputs: ForwardInputs, hidden: Tensor, kwargs: Mapping[str, Any], text: TextShards | None
) -> Tensor:
    """Return the loss, given the last hidden states (B, s, C) of the rows that `text` shards, or of all rows.

    The head computes only the rows that have a target. A rank without targets calls it too, for no row, so that FSDP2
    and DDP stay in step.
    """
    ignore = IGNORE if kwargs.get("ignore_index") is None else kwargs["ignore_index"]
    targets = inputs.target_labels(ignore)
    local = (targets if text is None else text.shard(targets, 1, ignore)).flatten()
    rows = (local != ignore).nonzero().flatten()
    rows, labels = copy_to_device(torch.stack([rows, local[rows].long()]), hidden.device)
    logits = family.lm_head(hidden.flatten(0, 1).index_select(0, rows)[None])[0]
    require_tokens(targets, logits.shape[-1], ignore)
    total = F.cross_entropy(logits.float(), labels, reduction="sum")
    total = total if text is None else group_sum(total, text.comm)
    return mean_over_targets(total, targets, kwargs.get("num_items_in_batch"), ignore)


def gather_hidden_states(text: TextShards, states: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...] | None:
    """Gather hidden states (B, s, C) of each layer to (B, L, C) on every rank; None for a layer stays None."""
    return None if states is None else tuple(None if state is None else text.unshard(state, 1) for state in states)
