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
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.attention.block_math import BlockMath, PartialResult
from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.integrations.transformers import attention as hf_attention
from mllm_seqpar.integrations.transformers.family import VISUAL_SHARD, Visibility
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs, flat_places, makes_cache
from mllm_seqpar.integrations.transformers.passes import forward_of
from mllm_seqpar.integrations.transformers.text_masks import causal_rectangles
from mllm_seqpar.masks import FrameMask, GivenBlockMask
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState, as_attended
from mllm_seqpar.runtime.selection import CrossAttentionShape
from mllm_seqpar.runtime.visual_features import Projection
from mllm_seqpar.sharding import FrameShard

from .cache import MediaLayoutCache, Note, run_with_native_cache

_MODELS = "mllm_seqpar.models.mplug_owl3."


class MPlugOwl3Adapter:
    """The adapter of the native mPLUG-Owl3, all published generations."""

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
            # itself, or in what wraps it and hands its attributes on (PEFT's modules_to_save)
            found = any(isinstance(part, HyperAttention) for part in layer.self_attn.modules())
            if found is not (index in hyper):
                raise AdapterError(
                    f"layer {index} has {type(layer.self_attn).__name__}, but config.hyper_layers is "
                    f"{model.config.hyper_layers} (counted from 1)"
                )

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the forward of the model and of its hyper layers, and selects the text's attention function."""
        decoder = model.language_model.model
        hf_attention.select(patch, [layer.self_attn for layer in decoder.layers])
        for number in model.config.hyper_layers:
            attention = decoder.layers[number - 1].self_attn
            patch.set(attention, "forward", _hyper_forward(attention))
        chunk_forwards(patch, (layer.mlp for layer in decoder.layers))
        patch.guard(model, (layer.self_attn for layer in decoder.layers))
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
        seqpar: ForwardState | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Hyper attention of this rank's tokens (sharded pass) or of all tokens (replicated) over all ranks' frames."""
        if seqpar is None:
            return unpatched(
                hidden_states, position_embeddings, attention_mask, past_key_values, visual, visual_norm, **kwargs
            )
        q, k, v = self.project_text(hidden_states, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if seqpar.text is not None:
            q, k, v = as_attended(q, k, v)
            return self.output(_sharded(self, q, k, v, visual_norm, seqpar)), None
        return self.output(_replicated(self, q, k, v, attention_mask, visual_norm, seqpar)), None

    return types.MethodType(forward, attention)


def _sharded(self: Any, q: Tensor, k: Tensor, v: Tensor, visual_norm: Any, seqpar: ForwardState) -> Tensor:
    """(B, s, C) before `o_proj`; text keys go by the self-attention's schedule, visual ones by the strategy."""
    if self._dropout:
        hf_attention.refuse_dropout(self._dropout)
    assert seqpar.text is not None
    shards_text = seqpar.shards_text
    if not shards_text:  # the text lives whole on every rank: its rows are shared out for this attention only
        q, k, v = (seqpar.text.shard(x, 2) for x in (q, k, v))
    text = seqpar.text_keys(k, v, self.sliding_window, q.shape[1])
    if seqpar.frames is None:
        o = _channels(seqpar.attend(q, [text], self.scaling))
    else:
        project, modules = _projection(self, visual_norm), [visual_norm, self.v_kv_proj]
        visual = seqpar.visual_keys(q, self.layer_idx, project, modules)
        if self.fused:
            o = _channels(seqpar.attend(q, [text, visual], self.scaling))
        else:
            text_out = _channels(seqpar.attend(q, [text], self.scaling))
            visual_out = _channels(seqpar.attend(q, [visual], self.scaling))
            o = self.mix(text_out, visual_out, seqpar.frames.any_frame_visible.to(q.device))
    return o if shards_text else seqpar.text.unshard(o, 1)


def _replicated(
    self: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, visual_norm: Any, seqpar: ForwardState
) -> Tensor:
    """(B, L, C) before `o_proj`, the same on every rank; the frames' K and V stay where they are."""
    hf_attention.refuse_dropout(self._dropout)
    if seqpar.visual_cache is None and seqpar.cached_text is None:
        return self._attend_text(q, k, v, attention_mask)[0]
    q, k, v = as_attended(q, k, v)
    text: tuple[Tensor, Tensor] | None = None
    if seqpar.cached_text is not None:
        text = seqpar.attend_cached_text(q, k, v, self.scaling, self.sliding_window)
    if seqpar.visual_cache is None:
        assert text is not None
        return _channels(text[0].to(q.dtype))
    keys = seqpar.visual_cache.keys_values(self.layer_idx, _projection(self, visual_norm), q.dtype)
    if self.fused and seqpar.requires_backward(q, k, v, *keys):
        k, v = k[:, :, : seqpar.tokens], v[:, :, : seqpar.tokens]
        source = seqpar.local_source(q, k, v, GivenBlockMask(tuple(causal_rectangles(attention_mask, q, k))))
        return _channels(seqpar.attend(q, [source, seqpar.cached_visual_source(q, *keys)], self.scaling))
    o_visual, lse_visual = seqpar.attend_replicated(q, *keys, self.scaling)
    if not self.fused:
        text_out = self._attend_text(q, k, v, attention_mask)[0] if text is None else _channels(text[0].to(q.dtype))
        return self.mix(text_out, _channels(o_visual), seqpar.rows["sees"])
    partial = PartialResult(q, torch.promote_types(torch.float32, q.dtype))
    if text is None:
        math = BlockMath(seqpar.context.config.kernel, self.scaling)
        k, v = k[:, :, : seqpar.tokens], v[:, :, : seqpar.tokens]  # what comes after in a static cache is empty
        math.forward(q, k, v, causal_rectangles(attention_mask, q, k), partial)
    else:
        partial.add(*text)
    partial.add(o_visual, lse_visual)
    return _channels(partial.value[0].to(q.dtype))


def _projection(self: Any, visual_norm: Any) -> Projection:
    """Frames' features (f, tokens, width) and positions (f,) to k, v by the layer's own norm and projection."""
    return lambda features, frame_position: self.project_visual(visual_norm(features), frame_position)


def _channels(o: Tensor) -> Tensor:
    """(B, H, s, D) -> (B, s, H * D)."""
    return o.transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class _Inputs(ForwardInputs):
    """With what mPLUG-Owl3 is told about the places of the frames."""

    model: Any
    media_offset: Any
    media_layout: MediaLayout | None

    @functools.cached_property
    def note(self) -> Note:
        """The layout; raises what the unpatched model would raise."""
        inclusive = self.model.config.gate is None
        if self.media_layout is None:
            layout = self.model.media_layout(
                self.total_frames,
                input_ids=self.input_ids,
                media_offset=self.media_offset,
                position_ids=self.positions(),
            )
            return Note(layout, self.past_length, inclusive)
        samples, frames = self.media_layout.first.shape[0], self.media_layout.total_frames
        if (samples, frames) != (self.batch, self.total_frames):
            raise ShapeError(
                f"media_layout is for {samples} samples and {frames} frames; the call has {self.batch} samples and "
                f"{self.total_frames} frames"
            )
        return Note(self.media_layout, 0, inclusive)


class MPlugOwl3Family(MediaLayoutCache):
    """mPLUG-Owl3: SigLIP frames in one flat list, a rotary position per frame."""

    def cross_shape(self) -> CrossAttentionShape:
        """Grouped queries, as in the text."""
        config = self.text_config
        heads, layers = config.num_attention_heads, len(self.model.config.hyper_layers)
        return CrossAttentionShape(heads, config.num_key_value_heads, config.hidden_size // heads, layers)

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """(f, 3, H, W) -> (f, tokens, hidden)."""
        return self.model.encode_frames(frames)

    def blank(self) -> tuple[Tensor, ...]:
        """A black frame of the tower's size."""
        vision, weight = self.model.config.vision_config, self.embedding_weight()
        shape = (1, vision.num_channels, vision.image_size, vision.image_size)
        return (torch.zeros(shape, device=weight.device, dtype=weight.dtype),)

    def note(self, inputs: ForwardInputs) -> Note:
        """The prompt's layout, for later passes."""
        assert isinstance(inputs, _Inputs)
        return inputs.note

    def index(self, inputs: ForwardInputs, units: int) -> Tensor:
        """The frames' rotary positions."""
        return self.note(inputs).layout.frame_position if inputs.total_frames else super().index(inputs, units)

    def view(self, inputs: ForwardInputs, units: int, tokens: int, note: Note) -> Visibility:
        """The layout's rows."""
        rows = inputs.rows.to(note.layout.first.device)
        first, stop = (x[rows] for x in note.layout.rows(inputs.past_length - note.row_offset, inputs.length))
        return self._view(FrameMask.from_intervals(first, stop, tokens, units))

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return a causal mask for each kind of layer."""
        decoder = self.model.language_model.model
        if isinstance(mask, dict):
            return mask
        config = decoder.layers[0].self_attn.config
        made = {"full_attention": hf_attention.causal_mask(config, embeds, mask, positions, cache)}
        if decoder.has_sliding_layers:
            sliding = hf_attention.causal_mask(config, embeds, mask, positions, cache, sliding=True)
            made["sliding_attention"] = sliding
        return made

    def empty_visibility(self, inputs: ForwardInputs, units: int, tokens: int) -> Visibility:
        """As for all families, with the fact that the layers read."""
        return self._view(super().empty_visibility(inputs, units, tokens).mask)

    def _view(self, mask: FrameMask) -> Visibility:
        return Visibility(mask, {"sees": mask.sees_any().to(self.embedding_weight().device)})

    def check(self, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
        """What only one rank may have got wrong, and must not leave the others waiting for it."""
        super().check(inputs, kwargs)
        width = self.model.config.hidden_size
        if inputs.frames is not None and inputs.frames_are_features and inputs.frames.shape[2:] != (width,):
            raise ShapeError(
                f"image_embeds has shape {tuple(inputs.frames.shape)}; expected (frames, tokens, {width}), the frames "
                "of all samples one after another"
            )

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, call: ForwardState, **kwargs: Any
    ) -> Any:
        """The Qwen2 decoder."""
        return self.model.language_model.model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
            seqpar=call,
            **kwargs,
        )


def _model_forward(model: Any, context: SeqParContext) -> Any:
    unpatched, family = model.forward, MPlugOwl3Family(model, context)

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
        caches = makes_cache(context, self, self.config, use_cache, past_key_values, labels)
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
            use_cache=past_key_values is not None or bool(caches and unpatched_caches),
            packed=not unpatched_caches,
            model=self,
            media_offset=media_offset,
            media_layout=media_layout,
        )
        return run_with_native_cache(family, inputs, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + VISUAL_SHARD.format(frames="`pixel_values` or `image_embeds`")
    return forward_of(model, forward)
