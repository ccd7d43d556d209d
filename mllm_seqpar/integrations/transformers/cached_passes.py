"""Passes of a patched transformers model that fill or continue a cache: a prompt, or a step of decoding.

All text is on every rank and the frames stay dealt; a long prompt is read with its text dealt, too, and the K and V of
both then stay where they were computed. With Star Attention that is the prompt's context, and the query comes after it.

Shape legend: B samples, L text tokens of the pass, s of them on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.errors import ShapeError
from mllm_seqpar.models.cache_rows import attach
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.text_kv_cache import CachedTextMask
from mllm_seqpar.runtime.text_shards import TextShards, rows_kept
from mllm_seqpar.runtime.visual_features import VisualKVCache, fingerprint_of

from .cache import SequenceParallelCacheState, begin_prompt, cache_state, shard_cached_text, supports_sharded_text
from .family import Family, Visibility
from .frame_encoding import local_features
from .inputs import ForwardInputs
from .outputs import whole_states, whole_text_loss
from .pass_inputs import frames_of, passed_through, report, require_same_pass, shared, text_of, view_of
from .star_attention import can_be_cut, check_star, joined_states, star_shards
from .text_masks import text_shards

BROADCAST_ROWS = 64
"""Hidden states of so few rows are rank 0's on every rank: ranks that pick tokens from other bits would drift apart."""


def cached_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """A pass that fills or continues a cache: a prompt, or a step of decoding."""
    past = inputs.past_length
    cache = inputs.past_key_values
    if cache is None:
        cache = DynamicCache(config=family.text_config)
    if past == 0 or inputs.length > 1:  # not each step of decoding
        require_same_pass(family, inputs, kwargs | {"logits_to_keep": logits_to_keep})
    else:
        check_star(family.context.config, inputs)
    beside = _continued(family, inputs, cache) if past else _begun(family, inputs, cache)
    beside.active = True
    try:
        features = _keep_frames(family, inputs, cache, beside, past)
        if past == 0 and _deals_prompt(family, inputs, cache):
            out = _dealt_prompt(family, inputs, cache, beside, features, logits_to_keep, kwargs)
        else:
            out = _replicated_pass(family, inputs, cache, beside, logits_to_keep, kwargs)
    finally:
        beside.active = False
    if beside.kept is not None:
        beside.kept.close()
    return family.output(out, features, inputs)


def _begun(family: Family, inputs: ForwardInputs, cache: Any) -> SequenceParallelCacheState:
    return begin_prompt(cache, inputs.batch, family.context.comm, family.text_config.num_hidden_layers)


def _continued(family: Family, inputs: ForwardInputs, cache: Any) -> SequenceParallelCacheState:
    """Return what is kept with a cache that has some text.

    Raises:
        ConfigError: K and V in it are sharded over another group, or belong to an unpatched model's frames.
        ShapeError: it has another number of rows than the call.
    """
    beside, comm = cache_state(cache), family.context.comm
    if beside is None:
        beside = SequenceParallelCacheState(inputs.batch, comm)
        family.adopt(cache, beside)
        attach(cache, beside, family.text_config.num_hidden_layers)
    beside.check_group(comm)
    beside.rows_of(inputs.batch)
    beside.note = family.cropped(beside.note, inputs.past_length)
    return beside


def _keep_frames(
    family: Family, inputs: ForwardInputs, cache: Any, beside: SequenceParallelCacheState, past: int
) -> Tensor | None:
    """Encode frames that came with this pass, and make a place for their K and V."""
    if beside.kept is not None and not _replaces_frames(family, inputs, beside):
        return None
    if past and not inputs.total_frames:
        return None
    note = family.note(inputs)
    features = local_features(family, inputs)  # FSDP wants it without frames, too
    if features is not None:
        beside.keep(VisualKVCache(shared(family, inputs, features), inputs.total_frames), note, inputs.batch)
        beside.seen = {fingerprint_of(x) for x in (inputs.frames, features) if x is not None}
        family.mark_cache(cache, beside)
    return features


def _replaces_frames(family: Family, inputs: ForwardInputs, beside: SequenceParallelCacheState) -> bool:
    """Whether frames of this pass take the place of those that are kept; the same frames do not.

    Raises:
        ShapeError: other frames, in a family whose earlier text would then lack its own.
    """
    if inputs.frames is None or not inputs.total_frames:
        return False
    assert beside.kept is not None
    same = fingerprint_of(inputs.frames) in beside.seen
    if family.repeats_frames:  # as unpatched: every pass looks at the frames that come with it
        return torch.is_grad_enabled() or not same or not family.in_order(inputs, beside.note)
    if same:
        return False
    raise ShapeError(
        f"{inputs.total_frames} frames were passed with a cache that holds {beside.kept.total_frames} others already; "
        "leave frames out to go on with those of the cache, or pass new frames with the whole conversation and "
        "without the cache"
    )


def _replicated_pass(
    family: Family,
    inputs: ForwardInputs,
    cache: Any,
    beside: SequenceParallelCacheState,
    logits_to_keep: int | Tensor,
    kwargs: dict[str, Any],
) -> CausalLMOutputWithPast:
    """All text on every rank, frames dealt out; text K and V as the cache has them, whole or dealt."""
    view = _view_of_kept(family, inputs, beside)
    outputs = _replicated_rows(family, inputs, inputs.positions(), view, cache, beside, kwargs)
    hidden = _in_step(family, rows_kept(outputs.last_hidden_state, logits_to_keep))
    return _whole_outputs(family, inputs, hidden, outputs.hidden_states, cache, kwargs)


def _view_of_kept(family: Family, inputs: ForwardInputs, beside: SequenceParallelCacheState) -> Visibility | None:
    """What the rows of this pass see of the frames whose K and V are kept."""
    kept = beside.kept
    if kept is None:
        return None
    return view_of(family, inputs, kept.units, kept.tokens_per_unit, kept.total_frames, beside.note)


def _replicated_rows(
    family: Family,
    inputs: ForwardInputs,
    positions: Tensor,
    view: Visibility | None,
    cache: Any,
    beside: SequenceParallelCacheState,
    kwargs: dict[str, Any],
    start: int = 0,
) -> Any:
    """What `Family.decode` gives for the rows from `start` on, on every rank, over what the cache has of the others.

    Args:
        positions, view: of all rows of the pass, made before any of them was cached.
    """
    ids, embeds = (None if x is None else x[:, start:] for x in (inputs.input_ids, inputs.inputs_embeds))
    if embeds is None:
        assert ids is not None
        embeds = family.embed(ids)
    length, mask, cached, kept = embeds.shape[1], inputs.attention_mask, None, beside.kept
    if beside.text is not None:
        beside.text.extend(length)
        cached = CachedTextMask(beside.text, length, mask)
        mask = passed_through(embeds)
    mask = family.text_mask(embeds, mask, positions[:, start:], cache)
    seen: dict[str, Any] = {}
    if kept is not None:
        assert view is not None
        own = view.mask.take(torch.arange(start, start + length)) if start else view.mask
        rows = {name: x[:, start:] for name, x in view.rows.items()}
        per_frame = kept.units // max(1, kept.total_frames)
        seen = {"frame_mask": own, "units_per_frame": per_frame, "rows": rows, "visual_cache": kept}
    call = ForwardState(family.context, cached_text=cached, tokens=int(cache.get_seq_length()) + length, **seen)
    return family.decode(embeds, positions[:, start:], mask, cache, call, **kwargs)


def _in_step(family: Family, hidden: Tensor) -> Tensor:
    """Hidden states (..., r, C) that every rank computed: the same bits on all ranks, where they are few."""
    if hidden.shape[-2] <= BROADCAST_ROWS and not hidden.requires_grad:
        return family.context.comm.broadcast(hidden, "hidden")
    return hidden


def _whole_outputs(
    family: Family, inputs: ForwardInputs, hidden: Tensor, states: Any, cache: Any, kwargs: dict[str, Any]
) -> CausalLMOutputWithPast:
    logits = family.lm_head(hidden)
    loss = whole_text_loss(logits, inputs, family.loss_function, kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)


def _deals_prompt(family: Family, inputs: ForwardInputs, cache: Any) -> bool:
    """Whether this prompt is read with its text dealt to the ranks; the same on all of them."""
    config = family.context.config
    return (
        family.context.comm.size > 1
        and config.self_attention != "local"
        and config.shard_prompt_from is not None
        and inputs.length >= config.shard_prompt_from
        and (config.self_attention != "star" or can_be_cut(family.context, inputs))
        and not torch.is_grad_enabled()
        and supports_sharded_text(cache)
    )


def _dealt_prompt(
    family: Family,
    inputs: ForwardInputs,
    cache: Any,
    beside: SequenceParallelCacheState,
    features: Tensor | None,
    logits_to_keep: int | Tensor,
    kwargs: dict[str, Any],
) -> CausalLMOutputWithPast:
    """A prompt too long for one rank: text and frames dealt out, K and V of both kept where they were computed.

    Star Attention deals the context only; the query's rows come after it, as every later row.
    """
    star = family.context.config.self_attention == "star"
    text = (star_shards if star else text_shards)(family.context, inputs)
    note = beside.note
    # of all rows, by a cache that is empty still
    every_position, every_view = inputs.positions(), _view_of_kept(family, inputs, beside)
    shard_cached_text(cache, text, family.text_config.num_hidden_layers)
    call = ForwardState(family.context, text=text, **frames_of(family, inputs, text, features, note, beside.kept))
    report(family, inputs, text.local)
    embeds, positions, mask = text_of(family, inputs, call)
    outputs = family.decode(embeds, positions, mask, cache, call, **kwargs)
    states = whole_states(text, outputs.hidden_states)
    if not star:
        hidden = _rows_asked(text, outputs.last_hidden_state, inputs.length, logits_to_keep)
        return _whole_outputs(family, inputs, hidden, states, cache, kwargs)
    later = _replicated_rows(family, inputs, every_position, every_view, cache, beside, kwargs, start=text.length)
    hidden = _rows_asked(text, outputs.last_hidden_state, inputs.length, logits_to_keep, later.last_hidden_state)
    states = joined_states(states, later.hidden_states)
    return _whole_outputs(family, inputs, _in_step(family, hidden), states, cache, kwargs)


def _rows_asked(
    text: TextShards, dealt: Tensor, length: int, logits_to_keep: int | Tensor, query: Tensor | None = None
) -> Tensor:
    """The hidden states that `logits_to_keep` asks for, of the prompt's `length` rows, on every rank.

    Args:
        text, dealt: how the first rows are dealt, and this rank's (B, s, C) of them.
        query: (B, r, C) of the rows after them, on every rank.
    """
    every_row = isinstance(logits_to_keep, int) and logits_to_keep == 0
    if every_row or (isinstance(logits_to_keep, Tensor) and logits_to_keep.dim() == 2):
        whole = text.unshard(dealt, 1)
        return rows_kept(whole if query is None else torch.cat([whole, query], dim=1), logits_to_keep)
    rows = rows_kept(torch.arange(length)[None], logits_to_keep)[0]
    first = rows < text.length
    if query is None or bool(first.all()):
        return text.gather_rows(dealt, rows)
    out = query[:, (rows - text.length).clamp(min=0).to(query.device)]
    if bool(first.any()):
        out[:, first.to(out.device)] = text.gather_rows(dealt, rows[first])
    return out
