"""The forward pass of a patched transformers model, the same for all families: `run_pass`.

A pass computes its rows of text in one part or two (`Rows`). The rows of a part are sharded, or every rank computes all
of them. The frames are sharded when they are encoded.

    training, evaluation        all rows, sharded
    a long prompt               all rows, sharded; K and V of text and frames stay on the ranks that computed them
    ... with Star Attention     the context, sharded in blocks; then the query on every rank
    other prompts, decoding     all rows on every rank, over the K and V in the cache

With `self_attention="local"`, a part with a sharding has all rows on every rank too, except in attention to frames.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache

from mllm_seqpar.errors import MaskError
from mllm_seqpar.fsdp_units import call_within
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import (
    SequenceParallelCacheState,
    attach,
    begin_prompt,
    cache_state_of,
    shard_cached_text,
    supports_sharded_text,
)
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import Frames, KVSource, VisualKVCache, select_strategy
from mllm_seqpar.runtime.star import StarText, block_length
from mllm_seqpar.runtime.text import Rows, TextShards, packed_starts
from mllm_seqpar.runtime.visual_features import VisualFeatures, fingerprint_of
from mllm_seqpar.runtime.visual_tokens import FrameTokens, VisualTokens
from mllm_seqpar.sharding import FrameSizes, span_length

from .checks import check_arguments, check_star, require_same_pass
from .generation import share_random_state
from .inputs import ForwardInputs
from .outputs import cached_outputs, uncached_outputs
from .tower import frames_by_rank, local_embeddings, local_features, visual_features, with_accumulated_gradients

if TYPE_CHECKING:
    from .family import Family


def run_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run one forward pass of a patched model, and return what the model's `forward` returns."""
    family.context.require_same_world()
    fsdp_units = [module for module in family.bypassed_modules if isinstance(module, FSDPModule)]
    return call_within(fsdp_units, functools.partial(_pass, family, inputs, logits_to_keep, kwargs))


def _pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Check, encode, run the decoder on each part of the rows, and make the output.

    Frames reach the rows in one of these forms:

    - layers attend to them (`attended`): to features of this pass, or to K and V of an earlier pass, in the cache;
    - their embeddings are among the rows (`embedded`), to which later tokens attend as to text;
    - not at all: the pass is one of text only.
    """
    cache, cache_state = inputs.cache, None
    if inputs.use_cache and cache is None:
        cache = DynamicCache(config=family.text_config)
    if (continued := inputs.cache_state) is not None:
        continued.crop_to(inputs.past_length)
    if not inputs.is_decoding_step:
        require_same_pass(family, inputs, logits_to_keep, kwargs, cache)
    else:  # the ranks have compared the text before it
        check_star(family.context.config, inputs)
        if kwargs:  # seldom: `generate` passes none
            check_arguments(family, inputs, kwargs)
    if cache is not None:
        cache_state = _cache_state_of_pass(family, inputs, cache)
        cache_state.active = True
    try:
        parts = _parts(family, inputs, cache, cache_state)
        attended, embedded = None, list[Any]([None] * len(parts))
        if family.has_cross_attention:
            attended = _attended_frames(family, inputs, cache, cache_state)
        else:
            embedded = _embedded_frames(family, inputs, parts, cache_state)
        if cache_state is not None and parts[0].text is not None:
            # Only now: a cache whose frames could not be encoded is still an ordinary one.
            shard_cached_text(cache, cache_state, parts[0].text, family.text_config.num_hidden_layers)
        states, decoded = list[ForwardState](), []
        for rows, tokens in zip(parts, embedded, strict=True):
            states.append(_state_of_rows(family, inputs, rows, attended, tokens, cache_state))
            decoded.append(_run_rows(family, inputs, rows, states[-1], cache, kwargs))
        if cache is None:
            out = uncached_outputs(family, inputs, states[0], decoded[0], logits_to_keep, kwargs)
        else:
            out = cached_outputs(family, inputs, parts, decoded, logits_to_keep, kwargs, cache)
    finally:
        if cache_state is not None:
            cache_state.active = False
    if cache_state is not None and cache_state.visual_kv is not None:
        cache_state.visual_kv.close()
    return family.model_output(out, None if attended is None else attended.features, inputs)


def _cache_state_of_pass(family: Family, inputs: ForwardInputs, cache: Any) -> SequenceParallelCacheState:
    """Return what the patched model stores with the cache; raise if this pass cannot continue it."""
    comm, model_layers = family.context.comm, family.text_config.num_hidden_layers
    group = comm.rank, comm.size
    if not inputs.past_length:
        state = begin_prompt(cache, inputs.batch, group, model_layers)
        family.continue_cache(inputs, cache, state)
        return state
    found = cache_state_of(cache)
    state = SequenceParallelCacheState(inputs.batch, group) if found is None else found
    family.continue_cache(inputs, cache, state)
    state.continue_in(group)
    if found is None:
        attach(cache, state, model_layers)
    state.rows_of(inputs.batch)
    return state


# The rows of the text.


def _parts(
    family: Family, inputs: ForwardInputs, cache: Any, cache_state: SequenceParallelCacheState | None
) -> list[Rows]:
    """Return the rows of each part of a pass, in the order in which they are computed; the same on all ranks."""
    context, length = family.context, inputs.length
    if cache_state is not None and not _shards_prompt(family, inputs, cache):
        return [Rows(0, length)]
    if cache_state is not None and context.config.self_attention == "star":
        star = _star_text_shards(context, inputs)
        return [Rows(0, star.length, star), Rows(star.length, length)]
    return [Rows(0, length, _text_shards(context, inputs))]


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


def _text_shards(context: SeqParContext, inputs: ForwardInputs) -> TextShards:
    """Return how the text of a pass is sharded; raise MaskError if the attention mask is not (B, L)."""
    valid, first = _padding_and_packing(inputs)
    return TextShards(inputs.batch, inputs.length, context.comm, context.config.text_layout, valid, first)


def _star_text_shards(context: SeqParContext, inputs: ForwardInputs) -> StarText:
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
    valid = _padding_mask(inputs)
    positions = inputs.on_host("position_ids") if valid is None and inputs.detects_packing else None
    return valid, None if positions is None else packed_starts(positions)


def _padding_mask(inputs: ForwardInputs) -> Tensor | None:
    """Return the attention mask, or None without one; raise MaskError unless it is (B, tokens so far).

    With a cache it may be longer, as in the unpatched model, which reads its first entries.
    """
    mask, tokens = inputs.attention_mask, inputs.past_length + inputs.length
    if mask is None:
        return None
    found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    longer = bool(inputs.past_length) and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > tokens
    if found != (inputs.batch, mask.shape[1] if longer else tokens):
        shape = inputs.batch, tokens
        raise MaskError(f"attention_mask: sequence-parallel text takes a padding mask of shape {shape}, got {found}")
    on_host = inputs.on_host("attention_mask")
    return mask if on_host is None else on_host


# The frames.


class AttendedFrames(NamedTuple):
    """The frames that the rows of a pass attend to by cross-attention.

    Attributes:
        source: where their K and V come from.
        mask: which of them each row (B, L) attends to.
        facts: what `Family.row_facts` returned for all rows.
        features: the features that this rank has encoded in this pass; None if the frames are those of the cache.
    """

    source: KVSource
    mask: FrameMask
    facts: Mapping[str, Tensor]
    features: Tensor | None


def _attended_frames(
    family: Family, inputs: ForwardInputs, cache: Any, cache_state: SequenceParallelCacheState | None
) -> AttendedFrames | None:
    """Return the frames that rows attend to: encoded now, or those of the cache; None in a pass of text only.

    All ranks call it together. K and V of frames that are encoded in a pass with a cache are stored in the cache.
    """
    source: KVSource | None = None
    features, total_frames = None, inputs.total_frames
    if cache_state is None or _brings_frames(family, inputs, cache_state):
        family.check_new_frames(inputs)
        features = local_features(family, inputs)
        if features is not None:
            source = visual = visual_features(family, inputs, features)
            if cache_state is not None:
                source = _store_frames(inputs, cache_state, visual, features)
                total_frames = source.total_frames
                family.complete_cache(inputs, cache, cache_state)
    elif cache_state.visual_kv is not None:
        source = cache_state.visual_kv
        total_frames = source.total_frames
    if source is None:
        return None
    if total_frames:
        mask = _visibility(family, inputs, source)
    else:  # the empty frame, to which no row attends
        none = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
        mask = FrameMask.from_intervals(none, none, source.tokens_per_unit, source.units)
    return AttendedFrames(source, mask, family.row_facts(inputs, mask), features)


def _store_frames(
    inputs: ForwardInputs, cache_state: SequenceParallelCacheState, visual: VisualFeatures, features: Tensor
) -> VisualKVCache:
    """Store the frames of this pass in the cache, in the place of others or after them; return where K and V are."""
    fingerprints = {fingerprint_of(features)}
    if inputs.frames is not None:
        fingerprints.add(_fingerprint(inputs))
    earlier = cache_state.frames if inputs.appends_frames else None
    source = VisualKVCache(inputs.total_frames, inputs.sizes, visual.tokens_per_unit, visual, earlier)
    cache_state.store_frames(source, inputs.batch, fingerprints, inputs.past_length)
    return source


def _visibility(family: Family, inputs: ForwardInputs, source: KVSource) -> FrameMask:
    """Return which frames the rows attend to, of each pass that brought frames."""
    tokens, state = source.tokens_per_unit, inputs.cache_state
    if isinstance(source, VisualFeatures) or source.earlier is None:
        return family.visibility(inputs, source.units, tokens)
    assert state is not None
    *earlier, _ = state.by_pass()
    views = [*map(inputs.of_pass, earlier), inputs]
    parts = zip(views, source.parts, strict=True)
    return FrameMask.joined([family.visibility(view, part.own_units, tokens) for view, part in parts])


def _brings_frames(family: Family, inputs: ForwardInputs, cache_state: SequenceParallelCacheState) -> bool:
    """Return whether a pass with a cache encodes frames: a prompt does, for FSDP also without any.

    Frames that the cache has already are not encoded again. Others follow them, or take their place: if `generate`
    repeats frames, every pass attends to those that come with it, as unpatched (`Family.appends_frames`).
    """
    visual = cache_state.frames
    if visual is None:
        return not inputs.past_length or inputs.total_frames > 0
    if inputs.frames is None or not inputs.total_frames:
        return False
    same = _fingerprint(inputs) in cache_state.frame_fingerprints
    # The frames of one rank may be the same while those of another are not.
    if not inputs.compares_values_of_frames:
        same = all(number for (number,) in family.context.comm.gather_ints([int(same)]))
    if family.appends_frames(inputs, same):
        object.__setattr__(inputs, "appends_frames", True)
        return True
    return not same or (family.repeats_frames and torch.is_grad_enabled())


def _fingerprint(inputs: ForwardInputs) -> tuple[int, ...]:
    """Return the fingerprint of the frames that the caller passes."""
    assert inputs.frames is not None
    return fingerprint_of(inputs.frames, inputs.on_host("sample of frames"))


def _embedded_frames(
    family: Any, inputs: ForwardInputs, parts: Sequence[Rows], cache_state: SequenceParallelCacheState | None
) -> list[list[VisualTokens] | None]:
    """Return the embeddings of frames among this rank's rows, for each part of the rows; None if a pass has no frames.

    Each rank encodes its frames, and sends their embeddings to the ranks of their rows: all of them here, so that the
    layers begin without those of other rows. All ranks call it together. Frames of an earlier pass are in the cache, as
    tokens of the text.
    """
    comm, past = family.context.comm, inputs.past_length
    if cache_state is not None and past and not inputs.total_frames:
        return [None] * len(parts)
    layout, embeddings = family.visual_token_layout(inputs), local_embeddings(family, inputs)
    if cache_state is not None and layout.tokens.total:
        tokens = layout.tokens
        if past:
            earlier = FrameTokens.none() if cache_state.frame_tokens is None else cache_state.frame_tokens
            tokens = earlier.followed_by(tokens, past, cache_state.rows_of(inputs.batch))
        cache_state.frame_tokens = tokens
    if embeddings is None:
        return [None] * len(parts)
    found: list[list[VisualTokens] | None] = []
    for rows in parts:
        by_rank = [torch.arange(rows.stop - rows.start)] * comm.size
        if rows.text is not None and family.context.config.self_attention != "local":
            by_rank = [rows.text.positions(rank) for rank in range(comm.size)]
        routes = layout.between(rows.start, rows.stop).routes(by_rank, comm.rank)
        found.append(routes.exchange(embeddings, comm, embeddings.shape[1] // family.text_config.hidden_size))
    return found


# The layers.


def _state_of_rows(
    family: Family,
    inputs: ForwardInputs,
    rows: Rows,
    attended: AttendedFrames | None,
    embedded: list[VisualTokens] | None,
    cache_state: SequenceParallelCacheState | None,
) -> ForwardState:
    """Return the state that the layers share while they compute a part of the rows."""
    context, text, frames = family.context, rows.text, None
    facts: Mapping[str, Tensor] = {}
    if text is not None:
        if attended is not None:
            frames, facts = _frames_of_shards(family, inputs, text, attended)
        recorder = None
        if cache_state is not None and not isinstance(text, StarText):
            recorder = context.recorder(inputs, rows, attended, cache_state)
        return ForwardState(
            context, text=text, frames=frames, row_facts=facts, visual_tokens=embedded, recorder=recorder
        )
    assert cache_state is not None
    cached_text = None
    if cache_state.text_kv is not None:
        valid = _padding_mask(inputs)
        cache_state.text_kv.extend(rows.stop - rows.start)
        cached_text = functools.partial(cache_state.text_kv.mask, rows.stop - rows.start, valid)
    if attended is not None:
        mask, facts = attended.mask, attended.facts
        if rows.start:
            mask = mask.take(torch.arange(rows.start, rows.stop))
            facts = {name: x[:, rows.start :] for name, x in facts.items()}
        assert isinstance(attended.source, VisualKVCache)
        frames = attended.source.frames_of(mask, context.comm)
    return ForwardState(
        context,
        frames=frames,
        row_facts=facts,
        cached_text=cached_text,
        visual_tokens=embedded,
        text_length=inputs.past_length + rows.stop,
        recorder=context.recorder(inputs, rows, attended, cache_state),
    )


def _frames_of_shards(
    family: Family, inputs: ForwardInputs, text: TextShards, attended: AttendedFrames
) -> tuple[Frames, Mapping[str, Tensor]]:
    """Return the frames of a pass with a sharding of the text, and the facts about this rank's rows."""
    source, context = attended.source, family.context
    frames = Frames.of_shards(source, attended.mask, text, _sizes(inputs, source))
    shape = family.cross_attention_shape()
    if isinstance(source, VisualFeatures):
        index = functools.partial(family.unit_index, inputs, ((0, inputs.sizes.total),))
        frames = select_strategy(context, frames, source, text, index, shape)
    frames.kv_heads = None if shape is None else shape.kv_heads
    if context.config.self_attention == "local":
        return frames, attended.facts
    return frames, {name: text.shard(x, 1) for name, x in attended.facts.items()}


def _sizes(inputs: ForwardInputs, source: KVSource) -> FrameSizes:
    """Return the units of each frame, of this pass or of its cache."""
    return source.sizes if isinstance(source, VisualKVCache) else inputs.sizes


def _run_rows(
    family: Family, inputs: ForwardInputs, rows: Rows, state: ForwardState, cache: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run the decoder on a part of the rows, this rank's or all of them; return its output."""
    tokens, mask, positions, comm = inputs.tokens, inputs.attention_mask, inputs.positions, family.context.comm
    text, has_frames = rows.text, state.frames is not None or bool(state.visual_tokens)
    if text is not None:
        _count_shards(family, inputs, text.local if state.shards_text else inputs.length)
        # Without sharding, every rank computes all tokens, with the same dropout masks. The vision tower may have drawn
        # other random numbers on each rank.
        if not state.shards_text and family.model.training:
            share_random_state(comm, tokens.device)
        if state.text_mask != "decoder":
            tokens, positions = text.shard(tokens, 1), text.shard(positions, -1)
        elif mask is None and not inputs.detects_packing:
            # A mask of ones keeps transformers from looking at positions.
            mask = torch.ones(inputs.batch, inputs.length, dtype=torch.long, device=tokens.device)
    elif rows.start:
        tokens, positions = tokens[:, rows.start :], positions[..., rows.start :]
    embeds = family.model.get_input_embeddings()(tokens) if inputs.inputs_embeds is None else tokens
    if state.text_mask == "decoder":
        found = family.text_mask(embeds, mask, positions, cache)
        if found is None and mask is not None and cache is None and _begins_again(inputs.text_position_ids):
            # Without a mask, the decoder would separate sequences by their positions.
            found = torch.ones(inputs.length, inputs.length, dtype=torch.bool, device=embeds.device).tril()[None, None]
        mask = found
    else:  # the mask is in the state, and transformers passes on a mask of four dimensions
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=embeds.device)
    embeds = state.embedded(embeds)  # the embeddings of the text alone are freed
    if text is not None and not has_frames:
        embeds = with_accumulated_gradients(embeds, family.model)
    family.whole_positions = inputs.positions
    return family.run_decoder(embeds, positions, mask, cache, state, **kwargs)


def _begins_again(positions: Tensor | None) -> bool:
    return positions is not None and packed_starts(positions) is not None


def _count_shards(family: Family, inputs: ForwardInputs, local_tokens: int) -> None:
    """Record in the context how many text tokens and frames this rank holds in this pass."""
    local = span_length(frames_by_rank(family, inputs)[family.context.comm.rank]) if inputs.total_frames else 0
    family.context.count_shards((local_tokens, inputs.length), (local, inputs.total_frames))
