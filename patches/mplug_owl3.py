"""mPLUG-Owl3 (`mllm_seqpar.models.mplug_owl3`): where its sites are, what its tokens see, and its sharded forward.

Sites: the model's forward; the attention of every decoder layer, of which the hyper layers also look at the frames.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar.attention.block import BlockMath, Partial
from mllm_seqpar.call import SeqParCall, VisualShards, as_attended
from mllm_seqpar.context import SeqParContext
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.models.mplug_owl3.visual_inputs import VisualCache, visual_cache
from mllm_seqpar.patching import Patch
from mllm_seqpar.sharding import FrameShard, frame_bounds
from mllm_seqpar.text import TextShards
from mllm_seqpar.visual import Projection, SharedVisual, project_all

from . import hf_attention
from .hf_generation import patch_generate
from .hf_inputs import Inputs, agree_on_inputs, flat_places, local_features
from .hf_outputs import kept_rows, refuse_attentions, sharded_outputs, whole_text_loss
from .text_masks import causal_tiles, text_shards, whole_text_mask

_MODELS = "mllm_seqpar.models.mplug_owl3."


class MPlugOwl3Adapter:
    """The adapter of the native mPLUG-Owl3, both variants."""

    name = "mPLUG-Owl3"

    def matches(self, model: nn.Module) -> bool:
        """Whether it is `MPlugOwl3ForConditionalGeneration`, also after `fully_shard` made it a class of its own."""
        return any(
            c.__name__ == "MPlugOwl3ForConditionalGeneration" and c.__module__.startswith(_MODELS)
            for c in type(model).__mro__
        )

    def check(self, model: Any, context: SeqParContext) -> None:
        """Every decoder layer must be one that the patch knows, and every hyper layer a hyper attention."""
        from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention

        hyper = {number - 1 for number in model.config.hyper_layers}
        for index, layer in enumerate(model.language_model.model.layers):
            if isinstance(layer.self_attn, HyperAttention) is not (index in hyper):
                raise AdapterError(
                    f"layer {index} has {type(layer.self_attn).__name__}, but config.hyper_layers is "
                    f"{model.config.hyper_layers} (counted from 1)"
                )

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the forward of the model and of its hyper layers, and selects the text's attention function."""
        decoder = model.language_model.model
        hf_attention.select(patch, [decoder, *(layer.self_attn for layer in decoder.layers)])
        for number in model.config.hyper_layers:
            attention = decoder.layers[number - 1].self_attn
            patch.set(attention, "forward", _hyper_forward(attention))
        patch.set(model, "forward", _model_forward(model, context))
        patch.set(model, "count_frames", functools.partial(_count_frames, model.count_frames))
        patch_generate(model, context, patch)


def adapter() -> MPlugOwl3Adapter:
    """The adapter of this family."""
    return MPlugOwl3Adapter()


def _count_frames(unpatched: Any, *args: Any, visual_shard: FrameShard | None = None, **kwargs: Any) -> int:
    return visual_shard.total if visual_shard is not None else unpatched(*args, **kwargs)


def _hyper_forward(attention: Any) -> Any:
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        visual: Any = None,
        visual_norm: nn.Module | None = None,
        seqpar: SeqParCall | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Hyper attention of this rank's tokens (sharded pass) or of all tokens (replicated) over all ranks' frames."""
        if seqpar is None:
            return unpatched(
                hidden_states, position_embeddings, attention_mask, past_key_values, visual, visual_norm, **kwargs
            )
        q, k, v = self.project_text(hidden_states, position_embeddings)
        if seqpar.text is not None:
            q, k, v = as_attended(q, k, v)
            return self.output(_sharded(self, q, k, v, visual_norm, seqpar)), None
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.output(
            _replicated(self, q, k, v, attention_mask, past_key_values, visual, visual_norm, seqpar)
        ), None

    return types.MethodType(forward, attention)


def _sharded(self: Any, q: Tensor, k: Tensor, v: Tensor, visual_norm: Any, seqpar: SeqParCall) -> Tensor:
    """(B, s, C) before `o_proj`; text keys go by the self-attention's schedule, visual ones by the strategy."""
    hf_attention.refuse_dropout(self._dropout)
    assert seqpar.text is not None
    if not seqpar.shards_text:  # the text lives whole on every rank: its rows are shared out for this attention only
        q, k, v = (seqpar.text.shard(x, 2) for x in (q, k, v))
    text = seqpar.text_keys(k, v, self.sliding_window)
    if seqpar.frames is None:
        o = _channels(seqpar.attend(q, [text], self.scaling))
    else:
        visual = seqpar.visual_keys(_projection(self, visual_norm), [visual_norm, self.v_kv_proj], q.dtype)
        if self.fused:
            o = _channels(seqpar.attend(q, [text, visual], self.scaling))
        else:
            text_out = _channels(seqpar.attend(q, [text], self.scaling))
            visual_out = _channels(seqpar.attend(q, [visual], self.scaling))
            o = self.mix(text_out, visual_out, seqpar.frames.sees.to(q.device))
    return o if seqpar.shards_text else seqpar.text.unshard(o, 1)


def _replicated(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    visual: Any,
    visual_norm: Any,
    seqpar: SeqParCall,
) -> Tensor:
    """(B, L, C) before `o_proj`, the same on every rank; the frames' K and V stay where they are."""
    hf_attention.refuse_dropout(self._dropout)
    if visual is None:
        return self._attend_text(q, k, v, attention_mask)[0]
    q, k, v = as_attended(q, k, v)
    visual_k, visual_v = _cached_keys_values(self, past_key_values, visual, visual_norm, q.dtype)
    o_visual, lse_visual = seqpar.attend_replicated(q, visual_k, visual_v, self.scaling)
    if not self.fused:
        text_out, _ = self._attend_text(q, k, v, attention_mask)
        return self.mix(text_out, _channels(o_visual), visual.sees)
    partial = Partial(q, torch.promote_types(torch.float32, q.dtype))
    math = BlockMath(seqpar.context.config.kernel, self.scaling)
    math.forward(q, k, v, causal_tiles(attention_mask, q, k), partial)
    partial.add(o_visual, lse_visual)
    return _channels(partial.value[0].to(q.dtype))


def _projection(self: Any, visual_norm: Any) -> Projection:
    """Frames' features (f, tokens, width) and positions (f,) to k, v by the layer's own norm and projection."""
    return lambda features, frame_position: self.project_visual(visual_norm(features), frame_position)


def _cached_keys_values(
    self: Any, past_key_values: Any, visual: Any, visual_norm: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """This rank's K and V of the frames: kept beside the text cache, projected once per prompt, in chunks."""
    kept = visual_cache(past_key_values)
    assert kept is not None  # a replicated pass with frames has one
    if self.layer_idx not in kept.states:
        project = _projection(self, visual_norm)
        kept.states[self.layer_idx] = project_all(project, visual.embeds, visual.frame_position, dtype)
    return kept.states[self.layer_idx]


def _channels(o: Tensor) -> Tensor:
    """(B, H, s, D) -> (B, s, H * D)."""
    return o.transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class _Inputs(Inputs):
    """With what mPLUG-Owl3 is told about the places of the frames."""

    media_offset: Any
    media_layout: MediaLayout | None

    def layout(self, model: Any) -> MediaLayout:
        """Which row sees which frames, of all ranks; raises what the unpatched model would raise."""
        if self.media_layout is None:
            return model.media_layout(
                self.total_frames,
                input_ids=self.input_ids,
                media_offset=self.media_offset,
                position_ids=self.positions(),
            )
        samples, frames = self.media_layout.first.shape[0], self.media_layout.total_frames
        if (samples, frames) != (self.batch, self.total_frames):
            raise ShapeError(
                f"media_layout is for {samples} samples and {frames} frames; the call has {self.batch} samples and "
                f"{self.total_frames} frames"
            )
        return self.media_layout

    def check(self, model: Any, kwargs: dict[str, Any]) -> None:
        """What only one rank may have got wrong, and must not leave the others waiting for it."""
        refuse_attentions(model.config, kwargs)
        width = model.config.hidden_size
        if self.frames is not None and self.frames_are_features and self.frames.shape[2:] != (width,):
            raise ShapeError(
                f"image_embeds has shape {tuple(self.frames.shape)}; expected (frames, tokens, {width}), the frames of "
                "all samples one after another"
            )


def _model_forward(model: Any, context: SeqParContext) -> Any:
    unpatched = model.forward

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        media_offset: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_layout: MediaLayout | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        visual_shard: FrameShard | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        _, unpatched_caches = self._cache_for(past_key_values, use_cache)
        layout = () if media_layout is None else (media_layout.first, media_layout.stop, media_layout.frame_position)
        inputs = _Inputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            frames=pixel_values if pixel_values is not None else image_embeds,
            frames_are_features=image_embeds is not None,
            both_kinds=pixel_values is not None and image_embeds is not None,
            visual_shard=visual_shard,
            places=flat_places(media_offset, *layout),
            past_key_values=past_key_values,
            use_cache=past_key_values is not None or bool(use_cache and unpatched_caches),
            packed=not unpatched_caches,
            media_offset=media_offset,
            media_layout=media_layout,
        )
        run = _replicated_pass if inputs.use_cache else _sharded_pass
        return run(self, context, inputs, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD
    return types.MethodType(can_return_tuple(forward), model)


_VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `pixel_values` or `image_embeds` hold only
        this rank's frames of `visual_shard.total`. Without `use_cache=True` or a cache no cache is returned.
"""


def _sharded_pass(
    self: Any, context: SeqParContext, inputs: _Inputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]
) -> CausalLMOutputWithPast:
    """Text and frames dealt to the ranks."""
    agree_on_inputs(context.comm, inputs, lambda: inputs.check(self, kwargs))
    text, layout, positions = text_shards(context, inputs), inputs.layout(self), inputs.positions()
    features = local_features(self, context, inputs, self.encode_frames)
    frames = None if features is None else _visual_shards(context, inputs, layout, text, features)
    call = SeqParCall(context, text=text, frames=frames)
    held = text.local if call.shards_text else inputs.length
    start, stop = frame_bounds(inputs.total_frames, context.comm.size)[context.comm.rank]
    context.report_shares((held, inputs.length), (stop - start, inputs.total_frames))
    ids, embeds = inputs.input_ids, inputs.inputs_embeds
    # a mapping is taken as it is, and empty here: the text masks of a sharded pass are the call's own
    mask: Any = dict.fromkeys(self.config.layer_types)
    if call.shards_text:
        positions = text.shard(positions, 1)
        ids, embeds = (None if x is None else text.shard(x, 1) for x in (ids, embeds))
    else:
        mask = whole_text_mask(inputs)
    outputs = self.language_model.model(
        inputs_embeds=self.get_input_embeddings()(ids) if embeds is None else embeds,
        position_ids=positions,
        attention_mask=mask,
        use_cache=False,
        seqpar=call,
        **kwargs,
    )
    return sharded_outputs(
        call,
        inputs,
        outputs.last_hidden_state,
        outputs.hidden_states,
        lm_head=self.language_model.lm_head,
        loss_function=self.loss_function,
        vocab_size=self.config.vocab_size,
        num_items=kwargs.get("num_items_in_batch"),
        logits_to_keep=logits_to_keep,
    )


def _visual_shards(
    context: SeqParContext, inputs: Inputs, layout: MediaLayout, text: TextShards, features: Tensor
) -> VisualShards:
    total, tokens = inputs.total_frames, features.shape[1]
    if total == 0:  # the one frame that is there only to keep the ranks in step, and that nobody sees
        nobody = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
        index = torch.zeros(features.shape[0], dtype=torch.long, device=features.device)
        return VisualShards.of(
            SharedVisual(features, index, 1), FrameMask.from_intervals(nobody, nobody, tokens, 1), text
        )
    start, stop = frame_bounds(total, context.comm.size)[context.comm.rank]
    visual = SharedVisual(features, layout.frame_position[start:stop].to(features.device), total)
    first, last = layout.rows(0, inputs.length)
    return VisualShards.of(visual, FrameMask.from_intervals(first, last, tokens, total), text)


def _replicated_pass(
    self: Any, context: SeqParContext, inputs: _Inputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]
) -> CausalLMOutputWithPast:
    """All text on every rank, frames dealt out; the first pass of a prompt, and every step of decoding."""
    cache, past = inputs.past_key_values, inputs.past_length
    if cache is None:
        cache = DynamicCache(config=self.config)
    if past == 0:
        cache.visual = None  # of an earlier text, when the cache was reset
    if past == 0 or inputs.input_ids is None or inputs.input_ids.shape[1] > 1:  # not each step of decoding
        agree_on_inputs(context.comm, inputs, lambda: inputs.check(self, kwargs))
    visual, mask = _replicated_visual(self, context, inputs, cache)
    embeds = inputs.inputs_embeds
    outputs = self.language_model.model(
        inputs_embeds=self.get_input_embeddings()(inputs.input_ids) if embeds is None else embeds,
        position_ids=inputs.positions(),
        attention_mask=inputs.attention_mask,
        past_key_values=cache,
        use_cache=True,
        visual=visual,
        seqpar=SeqParCall(context, frame_mask=mask),
        **kwargs,
    )
    hidden = outputs.last_hidden_state[:, kept_rows(logits_to_keep)]
    if hidden.shape[1] == 1 and not hidden.requires_grad:
        # ranks that pick tokens from different bits would drift apart and then hang: all take rank 0's
        hidden = context.comm.broadcast(hidden, "hidden")
    logits = self.language_model.lm_head(hidden)
    targets, loss = inputs.target_labels(), None
    if targets is not None:
        num_items = kwargs.get("num_items_in_batch")
        loss = whole_text_loss(logits, targets, self.loss_function, self.config.vocab_size, num_items)
    return CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
    )


def _replicated_visual(self: Any, context: SeqParContext, inputs: _Inputs, cache: Any) -> tuple[Any, FrameMask | None]:
    """(the frames of this pass or of the cache, what its rows see of them); (None, None) without any."""
    kept: VisualCache | None = visual_cache(cache)
    past, total = inputs.past_length, inputs.total_frames
    if total and kept is not None:
        raise ShapeError(
            f"{total} frames were passed with a cache that holds {kept.layout.total_frames} already; pass new frames "
            "with the whole conversation and without the cache"
        )
    features = None
    if total or past == 0:
        layout = inputs.layout(self)
        features = local_features(self, context, inputs, self.encode_frames)  # FSDP wants it without frames, too
    if total:
        assert features is not None
        offset = past if inputs.media_layout is None else 0
        kept = cache.visual = VisualCache(layout, row_offset=offset, tokens_per_frame=features.shape[1])
    if kept is None:
        return None, None
    visual = kept.inputs(past, inputs.length, features if total else None)
    if total:
        start, stop = frame_bounds(total, context.comm.size)[context.comm.rank]
        visual.frame_position = layout.frame_position[start:stop]  # K and V are those of this rank's frames
    return visual, FrameMask.from_intervals(visual.first, visual.stop, kept.tokens_per_frame, kept.layout.total_frames)
