"""The forward pass of a patched transformers model, the same for all families.

`Family` describes the model. This module first compares the inputs of the ranks, decides which tokens and frames each
rank computes, and returns loss and logits as the unpatched model does.

Without a cache, text and frames are sharded. In a pass that fills or continues a cache (a prompt, or a decoding step),
every rank has all text, and the frames are sharded. A long prompt is prefilled with its text sharded too; K and V of
text and frames then stay on the ranks that computed them. Star Attention shards the prompt's context in that way, and
computes the query after it on every rank.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, r requested rows, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache

from mllm_seqpar.models.cache import (
    SequenceParallelCacheState,
    attach,
    begin_prompt,
    cache_state_of,
    shard_cached_text,
    supports_sharded_text,
)
from mllm_seqpar.runtime.attention_record import AnyRecorder
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.fsdp_units import call_within
from mllm_seqpar.runtime.star import block_length
from mllm_seqpar.runtime.text import TextShards, select_logit_rows

from .checks import check_arguments, check_star, require_same_pass
from .data_parallel import with_accumulated_gradients
from .frames import PassFrames, log_shard_sizes
from .generation import share_random_state
from .inputs import ForwardInputs
from .text import (
    dummy_mask,
    embeddings,
    gather_hidden_states,
    outputs_without_logits,
    rows_of_pass,
    star_text_shards,
    text_shards,
    uncached_outputs,
    whole_text_outputs,
)

if TYPE_CHECKING:
    from .family import Family


def run_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run one forward pass of a patched model, and return what the model's `forward` returns."""
    family.context.require_same_world()
    run = _cached_pass if inputs.use_cache else _uncached_pass
    fsdp_units = [module for module in family.bypassed_modules if isinstance(module, FSDPModule)]
    return call_within(fsdp_units, functools.partial(run, family, inputs, logits_to_keep, kwargs))


def _uncached_pass(
    family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]
) -> Any:
    """Run a pass with text and frames sharded: training, evaluation, generation without a cache."""
    require_same_pass(family, inputs, logits_to_keep, kwargs)
    text = text_shards(family.context, inputs)
    frames = family.begin_frames(inputs)
    frames.encode()
    state, decoded = _run_sharded_rows(frames, text, kwargs)
    out = uncached_outputs(family, inputs, state, decoded, logits_to_keep, kwargs)
    return family.model_output(out, frames.features, inputs)


def _run_sharded_rows(
    frames: PassFrames,
    text: TextShards,
    kwargs: Mapping[str, Any],
    cache: Any = None,
    recorder: AnyRecorder | None = None,
) -> tuple[ForwardState, Any]:
    """Run the decoder on this rank's rows of sharded text; return the state of the pass, and the decoder's output."""
    family, inputs = frames.family, frames.inputs
    state = frames.state_of_shards(text, recorder)
    log_shard_sizes(family, inputs, text.local if state.shards_text else inputs.length)
    # Without sharding, every rank computes all text, with the same dropout masks. The vision tower may have drawn other
    # random numbers on each rank.
    if not state.shards_text and family.model.training:
        share_random_state(family.context.comm, inputs.text.device)
    embeds, positions, mask = rows_of_pass(family, inputs, state)
    if not frames.has_frames:
        embeds = with_accumulated_gradients(embeds, family.model)
    return state, family.run_decoder(embeds, positions, mask, cache, state, **kwargs)


BROADCAST_ROWS = 64
"""Up to this number of rows, hidden states are broadcast from rank 0.

Ranks that choose tokens from logits with different last bits would generate different texts.
"""


def _cached_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run a pass that fills or continues a cache, and return the model's output."""
    cache = inputs.cache
    if cache is None:
        cache = DynamicCache(config=family.text_config)
    if inputs.is_decoding_step:
        check_star(family.context.config, inputs)
        if kwargs:  # seldom: `generate` passes none
            check_arguments(family, inputs, kwargs)
    else:
        require_same_pass(family, inputs, logits_to_keep, kwargs, cache)
    cache_state = _cache_state_of_pass(family, inputs, cache)
    cache_state.active = True
    try:
        frames = family.begin_frames(inputs, cache_state)
        frames.encode()
        if frames.features is not None:
            family.mark_cache(cache, cache_state)
        if _shards_prompt(family, inputs, cache):
            hidden, states = _sharded_prompt(frames, cache, cache_state, logits_to_keep, kwargs)
        else:
            decoded = _run_replicated_rows(frames, cache, cache_state, kwargs)
            hidden = _broadcast(family, select_logit_rows(decoded.last_hidden_state, logits_to_keep))
            states = decoded.hidden_states
        no_logits = family.leaves_out_logits(inputs, logits_to_keep)
        outputs = outputs_without_logits if no_logits else whole_text_outputs
        out = outputs(family, inputs, hidden, states, kwargs, cache=cache)
    finally:
        cache_state.active = False
    if cache_state.visual is not None:
        cache_state.visual.close()
    return family.model_output(out, frames.features, inputs)


def _cache_state_of_pass(family: Family, inputs: ForwardInputs, cache: Any) -> SequenceParallelCacheState:
    """Return what the patched model stores with the cache; raise if this pass cannot continue it."""
    comm, model_layers = family.context.comm, family.text_config.num_hidden_layers
    group = comm.rank, comm.size
    if not inputs.past_length:
        state = begin_prompt(cache, inputs.batch, group, model_layers)
        family.continue_cache(cache, state, 0)
        return state
    found = cache_state_of(cache)
    state = SequenceParallelCacheState(inputs.batch, group) if found is None else found
    family.continue_cache(cache, state, inputs.past_length)
    state.continue_in(group)
    if found is None:
        attach(cache, state, model_layers)
    state.rows_of(inputs.batch)
    return state


def _shards_prompt(family: Family, inputs: ForwardInputs, cache: Any) -> bool:
    """Return whether this is a prompt whose text is sharded; the same on all ranks."""
    config, size = family.context.config, family.context.comm.size
    return (
        inputs.past_length == 0
        and size > 1
        and config.self_attention != "local"
        and config.shard_prompt_from is not None
        and inputs.length >= config.shard_prompt_from
        and (config.self_attention != "star" or block_length(inputs.length, size) > 0)
        and not torch.is_grad_enabled()
        and supports_sharded_text(cache)
    )


def _sharded_prompt(
    frames: PassFrames,
    cache: Any,
    cache_state: SequenceParallelCacheState,
    logits_to_keep: int | Tensor,
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, Any]:
    """Run a long prompt with text and frames sharded; K and V of both stay on the ranks that computed them.

    Star Attention shards only the context. The rows of the query are computed after it, like all later rows.

    Returns:
        The last hidden states (..., r, C) of the requested rows, and the hidden states of every layer or None.
    """
    family, inputs = frames.family, frames.inputs
    star = family.context.config.self_attention == "star"
    text = (star_text_shards if star else text_shards)(family.context, inputs)
    shard_cached_text(cache, cache_state, text, family.text_config.num_hidden_layers)
    recorder = None if star else _recorder(frames, inputs.length, text)
    _, decoded = _run_sharded_rows(frames, text, kwargs, cache, recorder)
    states = gather_hidden_states(text, decoded.hidden_states)
    if not star:
        return _requested_rows(inputs, logits_to_keep, text, decoded.last_hidden_state), states
    query = _run_replicated_rows(frames, cache, cache_state, kwargs, start=text.length)
    hidden = _requested_rows(inputs, logits_to_keep, text, decoded.last_hidden_state, query.last_hidden_state)
    later = query.hidden_states
    if states is not None:
        pairs = None if later is None else zip(states, later, strict=True)
        states = None if pairs is None else tuple(None if x is None else torch.cat([x, y], 1) for x, y in pairs)
    return _broadcast(family, hidden), states


def _run_replicated_rows(
    frames: PassFrames, cache: Any, cache_state: SequenceParallelCacheState, kwargs: Mapping[str, Any], start: int = 0
) -> Any:
    """Run the decoder on every rank on the rows from `start`, over the K and V in the cache."""
    family, inputs, text = frames.family, frames.inputs, cache_state.text
    positions = inputs.positions[..., start:]
    embeds = embeddings(family, inputs, lambda text: text[:, start:])
    length, mask, cached_text = embeds.shape[1], inputs.attention_mask, None
    if text is not None:
        text.extend(length)
        on_host = inputs.on_host("attention_mask")
        valid = mask if on_host is None else on_host
        cached_text = functools.partial(text.rectangles, length, valid)
        mask = dummy_mask(embeds)
    mask = family.text_mask(embeds, mask, positions, cache)
    tokens = int(cache.get_seq_length()) + length
    recorder = _recorder(frames, tokens)
    state = frames.state_of_rows(start, length, tokens, cached_text=cached_text, recorder=recorder)
    embeds = state.embedded(embeds)  # the embeddings of the text alone are freed
    return family.run_decoder(embeds, positions, mask, cache, state, **kwargs)


def _recorder(frames: PassFrames, tokens: int, shards: TextShards | None = None) -> AnyRecorder | None:
    """Return what records the attention of the last row to the frames, if it is recorded; None without frames.

    `tokens` is the number of tokens so far, including those of this pass; `shards` is the sharding of the rows.
    """
    records = frames.family.context.records
    if not records:
        return None
    return frames.begin_record(records[-1], tokens, None if shards is None else shards.positions(shards.comm.rank))


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


def _broadcast(family: Family, hidden: Tensor) -> Tensor:
    """Return the hidden states (..., r, C) of rank 0 if there are few rows, so that all ranks have the same bits."""
    if hidden.shape[-2] <= BROADCAST_ROWS and not hidden.requires_grad:
        return family.context.comm.broadcast(hidden, "hidden")
    return hidden
