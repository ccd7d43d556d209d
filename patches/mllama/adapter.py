"""Llama 3.2 Vision (transformers `MllamaForConditionalGeneration`): its sites, what tokens see, facts of its layers.

The mask speaks of tiles. The vision tower attends across the tiles of an image, so an image is what one rank holds
whole; features that the caller encoded beforehand are dealt out by tiles.

A row whose mask shows nothing attends to everything of its sample, and only its MLP part is left out: transformers sets
the additive mask of such a row to zeros. That is a fact of the whole row, decided before tiles are dealt to ranks.

Whole decoder layers look at images. The decoder skips them without visual states, so a pass that has visual keys hands
it the call in their place. K and V of tiles never enter transformers' cache: the core keeps them, each rank its own.

Without a mask every row sees every tile of its sample, as transformers' eager attention has it. Its sdpa takes such a
call for causal attention over text, and lets row i see the first i + 1 patches: a mistake that is not repeated here.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar._logging import get_logger
from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.integrations.transformers import attention as hf_attention
from mllm_seqpar.integrations.transformers.cache import SequenceParallelCacheState, mark_layers
from mllm_seqpar.integrations.transformers.family import Family, Visibility
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs, flat_places, makes_cache
from mllm_seqpar.integrations.transformers.passes import forward_of, run_pass
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import CrossAttentionShape
from mllm_seqpar.sharding import FrameShard

from .generation import patch_image_arguments
from .inputs import ASPECT_RATIOS, MllamaInputs, image_list

_log = get_logger(__name__)
_MODELS = "transformers.models.mllama."


class MllamaAdapter:
    """The adapter of Llama 3.2 Vision."""

    name = "Llama 3.2 Vision"

    def matches(self, model: nn.Module) -> bool:
        """Whether it is `MllamaForConditionalGeneration`, also after `fully_shard` made it a class of its own."""
        return any(
            c.__name__ == "MllamaForConditionalGeneration" and c.__module__.startswith(_MODELS)
            for c in type(model).__mro__
        )

    def check(self, model: Any, context: SeqParContext) -> None:
        """Every decoder layer must be of the kind that the config says, and the first one must see text."""
        decoder = model.model.language_model
        crossing = set(decoder.cross_attention_layers)
        if 0 in crossing:
            raise AdapterError(
                f"cross_attention_layers is {sorted(crossing)}: transformers counts cached tokens by layer 0, which "
                "must be a self-attention layer"
            )
        for index, layer in enumerate(decoder.layers):
            if hasattr(layer, "cross_attn") is not (index in crossing):
                raise AdapterError(
                    f"layer {index} is {type(layer).__name__}, but cross_attention_layers is {sorted(crossing)}"
                )

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the forward of the model and its cross-attention, and selects the text's attention function."""
        decoder = model.model.language_model
        crossing = [layer.cross_attn for layer in decoder.layers if hasattr(layer, "cross_attn")]
        text = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
        hf_attention.select(patch, text)
        for attention in crossing:
            patch.set(attention, "forward", _cross_forward(attention))
        chunk_forwards(patch, (layer.mlp for layer in decoder.layers))
        patch.guard(model, [*crossing, *text])
        patch.set(model, "forward", _model_forward(model, context))
        patch_image_arguments(model, patch)
        patch_generate(model, context, patch)


def adapter() -> MllamaAdapter:
    """The adapter of this family."""
    return MllamaAdapter()


def _cross_forward(attention: Any) -> Any:
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(
        self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, s, C) of this rank's rows, over all ranks' tiles -> (B, s, C), no weights."""
        if seqpar is None:
            return unpatched(hidden_states, *args, **kwargs)
        hf_attention.refuse_dropout(self.dropout if self.training else 0.0)
        q = self.q_norm(_heads(self.q_proj(hidden_states), self.head_dim))
        modules = [self.k_proj, self.v_proj, self.k_norm]
        o = seqpar.cross_attend(q, self.layer_idx, functools.partial(_keys_values, self), modules, self.scaling)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None

    return types.MethodType(forward, attention)


def _keys_values(attention: Any, features: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles (t, patches, C) -> k, v (1, G, t * patches, D)."""
    flat = features.flatten(0, 1)[None]
    k, v = (_heads(project(flat), attention.head_dim) for project in (attention.k_proj, attention.v_proj))
    return attention.k_norm(k), v


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, s, heads * D) -> (B, heads, s, D)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class MllamaFamily(Family):
    """Llama 3.2 Vision: images of `max_num_tiles` tiles, seen by tiles."""

    _told = False  # that a mask is missing

    def cross_shape(self) -> CrossAttentionShape:
        """Grouped queries, as in the text."""
        config = self.text_config
        heads, layers = config.num_attention_heads, len(config.cross_attention_layers)
        return CrossAttentionShape(heads, config.num_key_value_heads, config.hidden_size // heads, layers)

    def units_per_frame(self, inputs: ForwardInputs) -> int:
        """The tiles of an image; features come by tiles."""
        assert isinstance(inputs, MllamaInputs)
        return inputs.units_per_frame

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """(f, tiles, 3, H, W), aspect ratio ids (f,) and mask (f, tiles) -> (f * tiles, patches, C)."""
        named = dict(zip(("pixel_values", *ASPECT_RATIOS), (frames, *extras), strict=True))
        states = self.model.model.vision_model(**{name: x[None] for name, x in named.items()}).last_hidden_state
        return self.model.model.multi_modal_projector(states).flatten(0, 2)

    def blank(self) -> tuple[Tensor, ...]:
        """A black image of one tile, as the processor pads with."""
        vision, weight = self.model.config.vision_config, self.embedding_weight()
        shape = (1, vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        ratio = torch.zeros(1, vision.max_num_tiles, dtype=torch.long, device=weight.device)
        ratio[:, 0] = 1
        return torch.zeros(shape, device=weight.device, dtype=weight.dtype), ratio.new_zeros(1), ratio

    def note(self, inputs: ForwardInputs) -> tuple[int, Tensor]:
        """Return the number of samples that the images belong to, and the sample of each row of this pass."""
        assert isinstance(inputs, MllamaInputs)
        return inputs.samples, torch.arange(inputs.batch) // (inputs.batch // inputs.samples)

    def view(self, inputs: ForwardInputs, units: int, tokens: int, note: tuple[int, Tensor]) -> Visibility:
        """The mask's tiles of the row's own sample; all of them for a row that it shows none."""
        assert isinstance(inputs, MllamaInputs)
        samples, sample_of = note
        per_sample, sample = units // samples, sample_of[inputs.rows]
        seen = inputs.seen(per_sample)
        if seen is None:
            first = (sample * per_sample)[:, None].expand(-1, inputs.length)
            return Visibility(FrameMask.from_intervals(first, first + per_sample, tokens, units))
        sees = seen.any(-1)
        visible = seen.new_zeros(inputs.batch, inputs.length, samples, per_sample)
        visible[torch.arange(inputs.batch), :, sample] = seen | ~sees[..., None]
        return Visibility(FrameMask.from_dense(visible.flatten(2), tokens), self._rows(sees))

    def empty_visibility(self, inputs: ForwardInputs, units: int, tokens: int) -> Visibility:
        """Attention gives nothing and the MLP part is left out: what a skipped layer gives."""
        nothing = torch.zeros(inputs.batch, inputs.length, dtype=torch.bool)
        return Visibility(super().empty_visibility(inputs, units, tokens).mask, self._rows(nothing))

    def adopt(self, cache: Any, beside: SequenceParallelCacheState) -> None:
        """Refuse a cache in which the unpatched model keeps K and V of tiles, whole on every rank."""
        filled = [i for i in self._crossing(cache) if cache.layers[i].is_initialized and cache.layers[i].keys.numel()]
        if filled:
            raise ConfigError(
                f"past_key_values holds K and V of images that an unpatched model computed (layers {filled}); continue "
                "it with the unpatched model, or begin with a new cache"
            )

    def mark_cache(self, cache: Any, beside: SequenceParallelCacheState) -> None:
        """Mark the cross-attention layers: the unpatched model would skip them where they hold nothing."""
        mark_layers(cache, beside, self._crossing(cache))

    def _crossing(self, cache: Any) -> list[int]:
        return [i for i in self.text_config.cross_attention_layers if i < len(cache.layers)]

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return a causal mask."""
        return hf_attention.causal_mask(self.attention_config, embeds, mask, positions, cache)

    @property
    def attention_config(self) -> Any:
        """The config as the text's attention reads it."""
        return self.model.model.language_model.layers[0].self_attn.config

    def _rows(self, sees: Tensor) -> dict[str, Tensor]:
        return {"sees": sees.to(self.embedding_weight().device)}

    def check(self, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
        """What only one rank may have got wrong, and must not leave the others waiting for it."""
        super().check(inputs, kwargs)
        assert isinstance(inputs, MllamaInputs)
        inputs.check()
        unmasked = inputs.total_frames and inputs.cross_attention_mask is None
        if unmasked and not self._told and self.text_config._attn_implementation == "sdpa":
            self._told = True
            _log.warning(
                "cross_attention_mask is missing: every token sees every tile of its sample. transformers' sdpa "
                "attention would take tiles for text and hide most of them; the processor's mask says what is meant"
            )

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, call: ForwardState, **kwargs: Any
    ) -> Any:
        """The decoder of self- and cross-attention layers."""
        sees = call.rows.get("sees")
        return self.model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions,
            cross_attention_states=call if call.frames is not None or call.visual_cache is not None else None,
            full_text_row_masked_out_mask=None if sees is None else sees[:, None, :, None].to(self.model.dtype),
            past_key_values=cache,
            use_cache=cache is not None,
            seqpar=call,
            **kwargs,
        )


def _model_forward(model: Any, context: SeqParContext) -> Any:
    unpatched, family = model.forward, MllamaFamily(model, context)

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        visual_shard: FrameShard | None = None,
        visual_samples: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        text, vision = input_ids if input_ids is not None else inputs_embeds, self.model.vision_model
        samples = visual_samples or (0 if text is None else text.shape[0])
        ratios = (aspect_ratio_ids, aspect_ratio_mask)
        frames, extras = image_list(
            pixel_values, ratios, cross_attention_states, visual_shard, samples, vision.num_patches
        )
        everyones = () if visual_shard is not None else extras
        inputs = MllamaInputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            frames=frames,
            frames_are_features=cross_attention_states is not None,
            both_kinds=pixel_values is not None and cross_attention_states is not None,
            visual_shard=visual_shard,
            places=flat_places(None if cross_attention_mask is None else cross_attention_mask == 1, *everyones),
            past_key_values=past_key_values,
            use_cache=makes_cache(context, self, family.text_config, use_cache, past_key_values, labels),
            packed=not _unpatched_caches(self, past_key_values, use_cache),
            extras=extras,
            frame_names=("pixel_values", "cross_attention_states"),
            cross_attention_mask=cross_attention_mask,
            samples=samples,
            tiles=vision.max_num_tiles,
            patches=vision.num_patches,
            width=family.text_config.hidden_size,
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD
    return forward_of(model, forward)


_VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that the images passed are only this rank's of
        `visual_shard.total`, all samples' images (padding images included) in one list: `pixel_values` (f, tiles,
        channels, height, width), `aspect_ratio_ids` (f,), `aspect_ratio_mask` (f, tiles). With
        `cross_attention_states` (f, tiles, patches, width) it counts images, with (t, patches, width) tiles.
        `visual_samples` is what `generate` passes with beams: samples that the images belong to.
"""


def _unpatched_caches(model: Any, past: Cache | None, use_cache: bool | None) -> bool:
    """Whether the unpatched model would use a cache: then it does not look at positions for packed sequences."""
    decoder = model.model.language_model
    if past is not None:
        return True
    wanted = model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    return bool(wanted) and not (decoder.gradient_checkpointing and decoder.training)
