"""Loss and logits of a pass, from the last hidden states: what the caller would get of the unpatched model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.loss import sharded_causal_lm_loss
from mllm_seqpar.runtime.text_shards import TextShards, rows_kept

from .inputs import ForwardInputs


def refuse_unlike_attention(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for what a language model with this config would be asked for and distributed attention lacks.

    Attention weights: no rank ever has them. Rows that see what comes after them: text is causal here.
    """
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(config, "output_attentions", False)):
        raise ConfigError(
            "output_attentions=True: attention weights do not exist in distributed attention, which never computes a "
            "row's scores in one place; leave it out, or unpatch_model(model) to look at them"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(config, "is_causal", True) if causal is None else causal):
        raise ConfigError(
            "is_causal=False: the text of a patched model is causal in every layer; leave it out, or "
            "unpatch_model(model) to let tokens see what comes after them"
        )


def refuse_other_losses(model: Any, has_labels: bool) -> None:
    """Raises ConfigError where the text is dealt to ranks and the model's loss is not the cross-entropy of tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    function = getattr(model, "loss_function", ForCausalLMLoss)
    if has_labels and function is not ForCausalLMLoss:
        raise ConfigError(
            f"loss_function: {getattr(function, '__name__', function)} is the model's own; of text that is dealt to "
            "ranks only transformers' causal language-modelling loss can be computed. Patch with "
            'self_attention="local", or leave the labels out and compute the loss from the logits'
        )


def whole_text_loss(
    logits: Tensor, inputs: ForwardInputs, loss_function: Callable[..., Tensor], arguments: dict[str, Any]
) -> Tensor | None:
    """Return the loss of logits (B, L, V) of the whole text; None without labels.

    Labels are passed on unchanged: a loss function of the user's own may know the unshifted ones only. The vocabulary
    is as wide as the logits, which may have more columns than `config.vocab_size` (IDEFICS' `additional_vocab_size`).
    """
    if inputs.labels is None and inputs.shift_labels is None:
        return None
    if inputs.shift_labels is not None:
        arguments = {**arguments, "shift_labels": inputs.shift_labels.contiguous()}  # the loss takes a view of it
    return loss_function(logits=logits, labels=inputs.labels, vocab_size=logits.shape[-1], **arguments)


def sharded_outputs(
    call: ForwardState,
    inputs: ForwardInputs,
    hidden: Tensor,
    hidden_states: Sequence[Tensor] | None,
    *,
    lm_head: nn.Module,
    loss_function: Callable[..., Tensor],
    loss_arguments: dict[str, Any],
    logits_to_keep: int | Tensor,
) -> CausalLMOutputWithPast:
    """Loss, and logits as `config.logits` says, of a sharded pass.

    Args:
        call: the pass.
        inputs: its inputs.
        hidden: (B, s, width), last hidden states of this rank's tokens; of all tokens when the text is not sharded.
        hidden_states: those of every layer, or None when they were not asked for.
        lm_head: the vocabulary's projection.
        loss_function: the model's own, for text that is not sharded.
        loss_arguments: the caller's further arguments, among them those of the loss (`num_items_in_batch`).
        logits_to_keep: rows of the whole text; asking for some gives those, whatever `config.logits` says.
    """
    text, targets = call.text, inputs.target_labels(loss_arguments.get("ignore_index"))
    assert text is not None
    every_row = isinstance(logits_to_keep, int) and logits_to_keep == 0
    choice = call.context.config.logits
    if not call.shards_text or text.comm.size == 1:
        logits = lm_head(rows_kept(hidden, logits_to_keep))
        loss = whole_text_loss(logits, inputs, loss_function, loss_arguments)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden_states)
    loss = logits = None
    if targets is not None:
        logits = lm_head(hidden)
        counted = {name: loss_arguments.get(name) for name in ("num_items_in_batch", "ignore_index")}
        loss = sharded_causal_lm_loss(logits, targets, text, **counted)
    if choice == "full" or not every_row or (choice == "auto" and targets is None):
        # hidden states are gathered rather than logits: they are a vocabulary's width narrower
        logits = lm_head(rows_kept(text.unshard(hidden, 1), logits_to_keep))
    elif logits is None:
        logits = lm_head(hidden)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=whole_states(text, hidden_states))


def whole_states(text: TextShards, states: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...] | None:
    """Hidden states (B, s, C) of the layers that were asked for -> (B, L, C) on every rank; None for other layers."""
    return None if states is None else tuple(None if state is None else text.unshard(state, 1) for state in states)


def refuse_reentrant(model: nn.Module) -> None:
    """Raises ConfigError when layers are checkpointed the reentrant way.

    That runs a backward pass of its own for each layer, and the features that all layers share would be gone after the
    first.
    """
    for module in model.modules():
        how = getattr(module, "_gradient_checkpointing_func", None)
        keywords = how.keywords if isinstance(how, functools.partial) else {}
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
            raise ConfigError(
                "gradient checkpointing with use_reentrant=True cannot share the visual features between layers; use "
                'model.gradient_checkpointing_enable({"use_reentrant": False}), which is the default, or '
                'TrainingArguments(gradient_checkpointing_kwargs={"use_reentrant": False})'
            )
