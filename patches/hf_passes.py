"""The forward passes of a patched transformers model, the same for all families.

A family says what its model computes (`Family`); here is who computes it: which tokens and frames a rank has, what is
agreed upon before, what a cache keeps, and how loss and logits come out as the unpatched model's.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, F frames of all samples and ranks (f on this
rank). A frame is what one rank holds whole; it consists of `units_per_frame` units, which the mask speaks of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.cached_text import CachedRows
from mllm_seqpar.call import SeqParCall, VisualShards
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.sharding import frame_bounds
from mllm_seqpar.text import TextShards
from mllm_seqpar.visual import KeptVisual, SharedVisual

from .hf_cache import Remembered, begin_prompt, can_be_dealt, deal_text, remembered
from .hf_family import Family, View
from .hf_frames import local_features
from .hf_inputs import Inputs, agree_on_inputs, fingerprint_of
from .hf_outputs import (
    kept_rows,
    sharded_outputs,
    whole_states,
    whole_text_loss,
)
from .text_masks import text_shards, whole_text_mask

BROADCAST_ROWS = 64
"""Hidden states of so few rows are rank 0's on every rank: ranks that pick tokens from other bits would drift apart."""


def run_pass(family: Family, inputs: Inputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """One forward pass of a patched model; what its `forward` returns."""
    return (_cached_pass if inputs.use_cache else _sharded_pass)(family, inputs, logits_to_keep, kwargs)


def _agree(family: Family, inputs: Inputs, kwargs: dict[str, Any]) -> None:
    compared = family.model if family.context.compares_weights() else None
    agree_on_inputs(family.context.comm, inputs, lambda: family.check(inputs, kwargs), compared)


def passed_through(text: Tensor) -> Tensor:
    """An attention mask that transformers hands on as it is: in a sharded pass the call has its own."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=text.device)


def _sharded_pass(family: Family, inputs: Inputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """Text and frames dealt to the ranks, no cache: training, evaluation, generation without a cache."""
    context = family.context
    _agree(family, inputs, kwargs)
    text, note = text_shards(context, inputs), family.note(inputs)
    features = local_features(family, inputs)
    call = SeqParCall(context, text=text, **_frames_of(family, inputs, text, features, note))
    _report(family, inputs, text.local if call.shards_text else inputs.length)
    embeds, positions, mask = _text_of(family, inputs, call)
    outputs = family.decode(embeds, positions, mask, None, call, **kwargs)
    out = sharded_outputs(
        call,
        inputs,
        outputs.last_hidden_state,
        outputs.hidden_states,
        lm_head=family.lm_head,
        loss_function=family.loss_function,
        vocab_size=family.text_config.vocab_size,
        loss_arguments=kwargs,
        logits_to_keep=logits_to_keep,
    )
    return family.output(out, features, inputs)


def _text_of(family: Family, inputs: Inputs, call: SeqParCall) -> tuple[Tensor, Tensor, Any]:
    """(embeds, positions, attention mask) of the rows that this rank computes."""
    ids, embeds, positions = inputs.input_ids, inputs.inputs_embeds, inputs.positions()
    mask: Any = whole_text_mask(inputs)
    if call.shards_text:
        assert call.text is not None
        positions = call.text.shard(positions, 1)
        ids, embeds = (None if x is None else call.text.shard(x, 1) for x in (ids, embeds))
        mask = passed_through(inputs.text)
    if embeds is None:
        assert ids is not None
        embeds = family.embed(ids)
    return embeds, positions, mask


def _frames_of(
    family: Family,
    inputs: Inputs,
    text: TextShards,
    features: Tensor | None,
    note: Any,
    kept: KeptVisual | None = None,
) -> dict[str, Any]:
    """What a call of a pass with dealt text knows of the frames: `SeqParCall`'s frames, rows, kept."""
    if features is None:
        return {}
    visual = _shared(family, inputs, features)
    view = _view(family, inputs, visual.total_frames, features.shape[1], inputs.total_frames, note)
    shards = VisualShards.of(visual, view.mask, text, family.units_per_frame(inputs))
    rows = view.rows
    if family.context.config.self_attention != "local":
        rows = {name: text.shard(x, 1) for name, x in rows.items()}
    return {"frames": shards, "rows": rows, "kept": kept}


def _shared(family: Family, inputs: Inputs, features: Tensor) -> SharedVisual:
    """This rank's units; without frames, those of an empty one that rank 0 has."""
    per_frame, total = family.units_per_frame(inputs), max(1, inputs.total_frames)
    start, stop = frame_bounds(total, family.context.comm.size)[family.context.comm.rank]
    index = family.index(inputs, total * per_frame)[start * per_frame : stop * per_frame].to(features.device)
    return SharedVisual(features, index, total * per_frame)


def _view(family: Family, inputs: Inputs, units: int, tokens: int, frames: int, note: Any) -> View:
    """What all rows see of all units; of the empty frame that is there when there are no frames, nothing."""
    return family.view(inputs, units, tokens, note) if frames else family.nobody(inputs, units, tokens)


def _report(family: Family, inputs: Inputs, held: int) -> None:
    comm = family.context.comm
    start, stop = frame_bounds(inputs.total_frames, comm.size)[comm.rank]
    family.context.report_shares((held, inputs.length), (stop - start, inputs.total_frames))


def _cached_pass(family: Family, inputs: Inputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """A pass that fills or continues a cache: a prompt, or a step of decoding."""
    past = inputs.past_length
    cache = inputs.past_key_values
    if cache is None:
        cache = DynamicCache(config=family.text_config)
    if past == 0 or inputs.length > 1:  # not each step of decoding
        _agree(family, inputs, kwargs)
    beside = remembered(cache) if past else begin_prompt(cache)
    features = _keep_frames(family, inputs, beside, past)
    if past == 0 and _deals_prompt(family, inputs, cache):
        out = _dealt_prompt(family, inputs, cache, beside, features, logits_to_keep, kwargs)
    else:
        out = _replicated_pass(family, inputs, cache, beside, features, logits_to_keep, kwargs)
    if beside.kept is not None:
        beside.kept.close()
    return family.output(out, features, inputs)


def _keep_frames(family: Family, inputs: Inputs, beside: Remembered, past: int) -> Tensor | None:
    """Encodes frames that came with this pass, and makes a place for their K and V."""
    if inputs.frames is not None and beside.kept is not None and fingerprint_of(inputs.frames) not in beside.seen:
        raise ShapeError(
            f"{inputs.total_frames} frames were passed with a cache that holds {beside.kept.total_frames} already; "
            "pass new frames with the whole conversation and without the cache"
        )
    if beside.kept is not None or (past and not inputs.total_frames):
        return None
    note = family.note(inputs)
    features = local_features(family, inputs)  # FSDP wants it without frames, too
    if features is not None:
        beside.kept = KeptVisual(_shared(family, inputs, features), inputs.total_frames, note)
        if family.repeats_frames:
            beside.seen = {fingerprint_of(x) for x in (inputs.frames, features) if x is not None}
    return features


def _replicated_pass(
    family: Family,
    inputs: Inputs,
    cache: Any,
    beside: Remembered,
    features: Tensor | None,
    logits_to_keep: int | Tensor,
    kwargs: dict[str, Any],
) -> CausalLMOutputWithPast:
    """All text on every rank, frames dealt out; text K and V as the cache has them, whole or dealt."""
    mask, cached, kept = inputs.attention_mask, None, beside.kept
    past = inputs.past_length
    if beside.text is not None:
        beside.text.extend(inputs.length)
        cached = CachedRows(beside.text, inputs.length, mask)
        mask = passed_through(inputs.text)
    seen: dict[str, Any] = {}
    if kept is not None:
        view = _view(family, inputs, kept.units, kept.tokens_per_unit, kept.total_frames, kept.note)
        per_frame = kept.units // max(1, kept.total_frames)
        seen = {"frame_mask": view.mask, "units_per_frame": per_frame, "rows": view.rows, "kept": kept}
    call = SeqParCall(family.context, cached=cached, tokens=past + inputs.length, **seen)
    embeds = inputs.inputs_embeds
    if embeds is None:
        assert inputs.input_ids is not None
        embeds = family.embed(inputs.input_ids)
    outputs = family.decode(embeds, inputs.positions(), mask, cache, call, **kwargs)
    hidden = outputs.last_hidden_state[:, kept_rows(logits_to_keep)]
    if hidden.shape[1] <= BROADCAST_ROWS and not hidden.requires_grad:
        hidden = family.context.comm.broadcast(hidden, "hidden")
    return _whole_outputs(family, inputs, hidden, outputs.hidden_states, cache, kwargs)


def _whole_outputs(
    family: Family, inputs: Inputs, hidden: Tensor, states: Any, cache: Any, kwargs: dict[str, Any]
) -> CausalLMOutputWithPast:
    logits = family.lm_head(hidden)
    targets, loss = inputs.target_labels(kwargs.get("ignore_index")), None
    if targets is not None:
        loss = whole_text_loss(logits, targets, family.loss_function, family.text_config.vocab_size, kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)


def _deals_prompt(family: Family, inputs: Inputs, cache: Any) -> bool:
    """Whether this prompt is read with its text dealt to the ranks; the same on all of them."""
    config = family.context.config
    return (
        family.context.comm.size > 1
        and config.self_attention != "local"
        and config.shard_prompt_from is not None
        and inputs.length >= config.shard_prompt_from
        and not torch.is_grad_enabled()
        and can_be_dealt(cache)
    )


def _dealt_prompt(
    family: Family,
    inputs: Inputs,
    cache: Any,
    beside: Remembered,
    features: Tensor | None,
    logits_to_keep: int | Tensor,
    kwargs: dict[str, Any],
) -> CausalLMOutputWithPast:
    """A prompt too long for one rank: text and frames dealt out, K and V of both kept where they were computed."""
    text, note = text_shards(family.context, inputs), None if beside.kept is None else beside.kept.note
    deal_text(cache, text, family.text_config.num_hidden_layers)
    call = SeqParCall(family.context, text=text, **_frames_of(family, inputs, text, features, note, beside.kept))
    _report(family, inputs, text.local)
    embeds, positions, mask = _text_of(family, inputs, call)
    outputs = family.decode(embeds, positions, mask, cache, call, **kwargs)
    keep = kept_rows(logits_to_keep)
    if isinstance(keep, slice) and keep == slice(0, None):
        hidden = text.unshard(outputs.last_hidden_state, 1)
    else:
        hidden = text.gather_rows(outputs.last_hidden_state, torch.arange(inputs.length)[keep])
    return _whole_outputs(family, inputs, hidden, whole_states(text, outputs.hidden_states), cache, kwargs)
