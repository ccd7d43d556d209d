"""Loss and logits of a pass, computed from the last hidden states, as the unpatched model returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.loss import sharded_causal_lm_loss
from mllm_seqpar.runtime.text_shards import TextShards, select_logit_rows

from .family import Family
from .inputs import ForwardInputs


def whole_text_outputs(
    family: Family, inputs: ForwardInputs, hidden: Tensor, states: Any, kwargs: Mapping[str, Any], cache: Any = None
) -> CausalLMOutputWithPast:
    """Return loss and logits of a pass in which every rank has all text.

    `hidden` (B, r, C) are the last hidden states of the rows whose logits are returned, `states` those of every layer.
    """
    logits, loss = family.lm_head(hidden), None
    if inputs.labels is not None or inputs.shift_labels is not None:
        if inputs.shift_labels is not None:
            kwargs = {**kwargs, "shift_labels": inputs.shift_labels.contiguous()}  # the loss takes a view of it
        # Labels are passed unchanged, because a loss function of the user may take unshifted ones only. Logits may have
        # more columns than `config.vocab_size` (IDEFICS' `additional_vocab_size`).
        loss = family.model.loss_function(logits=logits, labels=inputs.labels, vocab_size=logits.shape[-1], **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)


def uncached_outputs(
    family: Family,
    inputs: ForwardInputs,
    state: ForwardState,
    decoded: Any,
    logits_to_keep: int | Tensor,
    kwargs: Mapping[str, Any],
) -> CausalLMOutputWithPast:
    """Return loss, and logits as `config.logits` says, of a pass without a cache.

    `decoded` has the hidden states (B, s, C) of this rank's tokens; of all tokens if the text is not sharded. If
    `logits_to_keep` asks for some rows of the whole text only, they are returned whatever `config.logits` says.
    """
    hidden, hidden_states = decoded.last_hidden_state, decoded.hidden_states
    text, targets = state.text, inputs.target_labels(kwargs.get("ignore_index"))
    assert text is not None
    if not state.shards_text or text.comm.size == 1:
        return whole_text_outputs(family, inputs, select_logit_rows(hidden, logits_to_keep), hidden_states, kwargs)
    every_row = isinstance(logits_to_keep, int) and logits_to_keep == 0
    option = state.context.config.logits
    loss = logits = None
    if targets is not None:
        logits = family.lm_head(hidden)
        counted = {name: kwargs.get(name) for name in ("num_items_in_batch", "ignore_index")}
        loss = sharded_causal_lm_loss(logits, targets, text, **counted)
    if option == "full" or not every_row or (option == "auto" and targets is None):
        # Hidden states are gathered rather than logits, because the vocabulary is wider than they are.
        logits = family.lm_head(select_logit_rows(text.unshard(hidden, 1), logits_to_keep))
    elif logits is None:
        logits = family.lm_head(hidden)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=gather_hidden_states(text, hidden_states))


def gather_hidden_states(text: TextShards, states: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...] | None:
    """Gather hidden states (B, s, C) of each layer to (B, L, C) on every rank; None for a layer stays None."""
    return None if states is None else tuple(None if state is None else text.unshard(state, 1) for state in states)
