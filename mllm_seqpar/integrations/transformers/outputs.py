"""What a pass returns, given the last hidden states: loss, logits, and the hidden states of every layer.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, r requested rows, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar._compat import cache_argument
from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm.autograd import group_sum
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.text import (
    IGNORE,
    Rows,
    TextShards,
    mean_over_targets,
    require_tokens,
    select_logit_rows,
    sharded_causal_lm_loss,
    summed_cross_entropy,
)

from .facts import ModelFacts
from .inputs import ForwardInputs


def uncached_outputs(
    family: ModelFacts[Any],
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
    if leaves_out_logits(family, inputs, logits_to_keep):
        sharding = text if state.shards_text else None
        if sharding is not None:
            hidden_states = _gather_hidden_states(sharding, hidden_states)
        return _without_logits(family, inputs, hidden, hidden_states, kwargs, sharding)
    if not state.shards_text or text.comm.size == 1:
        return _of_whole_text(family, inputs, select_logit_rows(hidden, logits_to_keep), hidden_states, kwargs)
    every_row = isinstance(logits_to_keep, int) and logits_to_keep == 0
    option = state.context.config.logits
    loss = logits = None
    if inputs.has_labels:
        targets = inputs.target_labels(kwargs.get("ignore_index"))
        logits = family.model.get_output_embeddings()(hidden)
        counted = {name: kwargs.get(name) for name in ("num_items_in_batch", "ignore_index")}
        loss = sharded_causal_lm_loss(logits, targets, text, **counted, target_weights=family.target_weights)
    if option == "full" or not every_row or (option != "local" and not inputs.has_labels):
        # Hidden states are gathered rather than logits, because the vocabulary is wider than they are.
        logits = family.model.get_output_embeddings()(select_logit_rows(text.unshard(hidden, 1), logits_to_keep))
    elif logits is None:
        logits = family.model.get_output_embeddings()(hidden)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=_gather_hidden_states(text, hidden_states))


BROADCAST_ROWS = 64
"""Up to this number of rows, hidden states are broadcast from rank 0.

Ranks that choose tokens from logits with different last bits would generate different texts.
"""


def cached_outputs(
    family: ModelFacts[Any],
    inputs: ForwardInputs,
    parts: Sequence[Rows],
    decoded: Sequence[Any],
    logits_to_keep: int | Tensor,
    kwargs: Mapping[str, Any],
    cache: Any,
) -> CausalLMOutputWithPast:
    """Return loss and logits of a pass with a cache, given the decoder's output for each part of its rows."""
    hidden, states = decoded[0].last_hidden_state, decoded[0].hidden_states
    text = parts[0].text
    if text is not None:
        states = _gather_hidden_states(text, states)
        query = None
        if len(decoded) > 1:
            query, later = decoded[1].last_hidden_state, decoded[1].hidden_states
            if states is not None:
                pairs = None if later is None else zip(states, later, strict=True)
                states = None if pairs is None else tuple(None if x is None else torch.cat([x, y], 1) for x, y in pairs)
        hidden = _requested_rows(inputs, logits_to_keep, text, hidden, query)
    else:
        hidden = select_logit_rows(hidden, logits_to_keep)
    if parts[-1].text is None and hidden.shape[-2] <= BROADCAST_ROWS and not hidden.requires_grad:
        hidden = family.context.comm.broadcast(hidden, "hidden")  # so that all ranks have the same bits
    outputs = _without_logits if leaves_out_logits(family, inputs, logits_to_keep) else _of_whole_text
    return outputs(family, inputs, hidden, states, kwargs, cache=cache)


def custom_loss(model: Any) -> Any:
    """Return the model's loss function if it is not the cross-entropy of tokens; None if it is."""
    function = getattr(model, "loss_function", ForCausalLMLoss)
    return None if function is ForCausalLMLoss else function


def leaves_out_logits(family: ModelFacts[Any], inputs: ForwardInputs, logits_to_keep: int | Tensor) -> bool:
    """Return whether a pass returns a loss and no logits; the head then computes only the rows with a target."""
    wanted = family.context.config.logits != "none" or inputs.is_decoding_step
    return not wanted and inputs.has_labels and isinstance(logits_to_keep, int) and logits_to_keep == 0


def _requested_rows(
    inputs: ForwardInputs, wanted: int | Tensor, text: TextShards, local: Tensor, query: Tensor | None = None
) -> Tensor:
    """Return, on every rank, the hidden states of the `wanted` rows (`logits_to_keep`).

    `local` (B, s, C) is the shard of the first rows; `query` (B, r, C) has the rows after them, on every rank.
    """
    every_row = isinstance(wanted, int) and wanted == 0
    if every_row or (isinstance(wanted, Tensor) and wanted.dim() == 2):
        whole = text.unshard(local, 1)
        return select_logit_rows(whole if query is None else torch.cat([whole, query], dim=1), wanted)
    rows = select_logit_rows(torch.arange(inputs.length)[None], wanted)[0]
    sharded = rows < text.length
    if query is None or bool(sharded.all()):
        return text.gather_rows(local, rows)
    out = query[:, (rows - text.length).clamp(min=0).to(query.device)]
    if bool(sharded.any()):
        out[:, sharded.to(out.device)] = text.gather_rows(local, rows[sharded])
    return out


def _without_logits(
    family: ModelFacts[Any],
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


def _of_whole_text(
    family: ModelFacts[Any],
    inputs: ForwardInputs,
    hidden: Tensor,
    states: Any,
    kwargs: Mapping[str, Any],
    cache: Any = None,
) -> CausalLMOutputWithPast:
    """Return loss and logits of a pass in which every rank has all text.

    `hidden` (B, r, C) are the last hidden states of the rows whose logits are returned, and `states` has the hidden
    states of every layer.
    """
    logits, loss, weights = family.model.get_output_embeddings()(hidden), None, None
    if inputs.has_labels:
        ignore = IGNORE if kwargs.get("ignore_index") is None else kwargs["ignore_index"]
        if custom_loss(family.model) is None and not inputs.is_decoding_step:
            targets = inputs.target_labels(ignore)
            require_tokens(targets, logits.shape[-1], ignore)
            weights = family.target_weights(targets)
        if weights is not None:
            on_device = copy_to_device(targets, logits.device)
            total = summed_cross_entropy(logits, on_device, ignore, family.target_weights(on_device))
            loss = mean_over_targets(total, targets, kwargs.get("num_items_in_batch"), ignore)
        else:
            if inputs.shift_labels is not None:
                kwargs = {**kwargs, "shift_labels": inputs.shift_labels.contiguous()}  # the loss takes a view of it
            # Labels are passed unchanged, because a loss function of the user may take unshifted ones only. Logits may
            # have more columns than `config.vocab_size` (IDEFICS' `additional_vocab_size`).
            labels, columns = inputs.labels, logits.shape[-1]
            loss = family.model.loss_function(logits=logits, labels=labels, vocab_size=columns, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states, **cache_argument(cache))


def _loss_of_targets(
    family: ModelFacts[Any], inputs: ForwardInputs, hidden: Tensor, kwargs: Mapping[str, Any], text: TextShards | None
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
    logits = family.model.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, rows)[None])[0]
    require_tokens(targets, logits.shape[-1], ignore)
    total = summed_cross_entropy(logits, labels, weights=family.target_weights(labels))
    total = total if text is None else group_sum(total, text.comm)
    return mean_over_targets(total, targets, kwargs.get("num_items_in_batch"), ignore)


def _gather_hidden_states(text: TextShards, states: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...] | None:
    """Gather hidden states (B, s, C) of each layer to (B, L, C) on every rank; None for a layer stays None."""
    return None if states is None else tuple(None if state is None else text.unshard(state, 1) for state in states)
