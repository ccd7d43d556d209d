"""Llama 3.2 Vision (transformers `MllamaForConditionalGeneration`): its sites, visibility, and sharded forward.

Masks are made of tiles. The vision tower attends across the tiles of an image, so a rank holds whole images; features
that the caller encoded beforehand are sharded by tiles.

A row without a visible tile attends to all tiles of its sample, and only its MLP part is skipped: transformers sets the
additive mask of such a row to zeros. It is decided for the whole row, before tiles are sharded.

The decoder skips its cross-attention layers without visual states, so a pass that has visual keys passes it the
`ForwardState` in their place. K and V of tiles never enter transformers' cache: each rank stores those of its tiles.

Without a mask every row attends to every tile of its sample, as in transformers' eager attention. Its sdpa attention
treats such a call as causal attention over text, and row i attends to the first i + 1 patches only. That mistake is not
reproduced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.adapting import (
    AdapterError,
    ConfigError,
    CrossAttentionShape,
    ForwardState,
    FrameMask,
    FrameShard,
    KVProjection,
    Patch,
    SeqParContext,
    copy_to_device,
    get_logger,
)
from mllm_seqpar.adapting.transformers import (
    Family,
    SequenceParallelCacheState,
    as_compared_tensors,
    causal_mask,
    decoder_arguments,
    makes_cache,
    mark_visual_layers,
    merge_heads,
    refuse_dropout,
    run_pass,
    split_heads,
)

from .generation import patch_image_arguments
from .inputs import ASPECT_RATIOS, MllamaInputs, flat_images

_log = get_logger(__name__)


def _cross_attention(
    self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from this rank's rows (B, s, C) to the tiles of all ranks; return (B, s, C) and no weights."""
    refuse_dropout(self.dropout if self.training else 0.0)
    q = self.q_norm(split_heads(self.q_proj(hidden_states), self.head_dim))
    project = KVProjection((self.k_proj, self.v_proj), self.head_dim, key_norm=self.k_norm)
    o = seqpar.attend(q, [seqpar.frame_keys(q, self.layer_idx, project)], self.scaling)
    return self.o_proj(merge_heads(o)), None


class MllamaFamily(Family[MllamaInputs]):
    """Llama 3.2 Vision. A frame is an image of `max_num_tiles` tiles, and a unit is a tile.

    The placement is (number of samples that the images belong to, sample of each row of the images' pass).
    """

    name = "Llama 3.2 Vision"
    model_class = "MllamaForConditionalGeneration"
    package = "transformers.models.mllama."
    frame_arguments = ("pixel_values", "cross_attention_states")
    frame_layout = "zigzag"
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that the images passed are only this rank's of
        `visual_shard.total`, all samples' images (padding images included) in one list: `pixel_values` (f, tiles,
        channels, height, width), `aspect_ratio_ids` (f,), `aspect_ratio_mask` (f, tiles). With
        `cross_attention_states` (f, tiles, patches, width) it counts images, with (t, patches, width) tiles.
        `visual_samples` is passed by `generate` with beams: the number of samples that the images belong to.
"""

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        decoder = model.model.language_model
        cross_layers = set(decoder.cross_attention_layers)
        if 0 in cross_layers:
            raise AdapterError(
                f"cross_attention_layers is {sorted(cross_layers)}: transformers counts cached tokens by layer 0, "
                "which must be a self-attention layer"
            )
        for index, layer in enumerate(decoder.layers):
            if hasattr(layer, "cross_attn") is not (index in cross_layers):
                found = f"layer {index} is {type(layer).__name__}"
                raise AdapterError(f"{found}, but cross_attention_layers is {sorted(cross_layers)}")

    def text_attention(self) -> Iterable[nn.Module]:
        return (layer.self_attn for layer in self.model.model.language_model.layers if hasattr(layer, "self_attn"))

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        layers = self.model.model.language_model.layers
        return ((layer.cross_attn, _cross_attention) for layer in layers if hasattr(layer, "cross_attn"))

    def mlps(self) -> Iterable[nn.Module]:
        return (layer.mlp for layer in self.model.model.language_model.layers)

    def install_more(self, patch: Patch) -> None:
        patch_image_arguments(self.model, patch)

    _warned_of_missing_mask = False

    def cross_attention_shape(self) -> CrossAttentionShape:
        config = self.text_config
        heads, layers = config.num_attention_heads, len(config.cross_attention_layers)
        return CrossAttentionShape(heads, config.num_key_value_heads, config.hidden_size // heads, layers)

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        inner = self.model.model
        return [*super().called_modules, inner.vision_model, inner.multi_modal_projector, inner.language_model]

    def units_per_frame(self, inputs: MllamaInputs) -> int:
        return inputs.units_per_frame

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, tiles, 3, height, width) to (f * tiles, patches, C).

        The extras are the aspect ratio ids (f,) and the aspect ratio mask (f, tiles).
        """
        arguments = zip(("pixel_values", *ASPECT_RATIOS), (frames, *extras), strict=True)
        states = self.model.model.vision_model(**{name: x[None] for name, x in arguments}).last_hidden_state
        return self.model.model.multi_modal_projector(states).flatten(0, 2)

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return a black image of one tile, as the processor pads with."""
        vision, weight = self.model.config.vision_config, self.embedding_weight()
        shape = (1, vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        ratio_mask = torch.zeros(1, vision.max_num_tiles, dtype=torch.long, device=weight.device)
        ratio_mask[:, 0] = 1
        return torch.zeros(shape, device=weight.device, dtype=weight.dtype), ratio_mask.new_zeros(1), ratio_mask

    def placement(self, inputs: MllamaInputs) -> tuple[int, Tensor]:
        return inputs.samples, torch.arange(inputs.batch) // (inputs.batch // inputs.samples)

    def visibility(self, inputs: MllamaInputs, units: int, tokens: int, placement: tuple[int, Tensor]) -> FrameMask:
        samples, sample_of_row = placement
        per_sample, sample = units // samples, sample_of_row[inputs.prompt_rows]
        in_mask = inputs.visible_tiles(per_sample)
        if in_mask is None:
            first = (sample * per_sample)[:, None].expand(-1, inputs.length)
            return FrameMask.from_intervals(first, first + per_sample, tokens, units)
        visible = in_mask | ~_any_tile(in_mask)[..., None]
        if samples > 1:
            table = in_mask.new_zeros(inputs.batch, inputs.length, samples, per_sample)
            table[torch.arange(inputs.batch), :, sample] = visible
            visible = table.flatten(2)
        return FrameMask.from_dense(visible, tokens)

    def row_facts(self, inputs: MllamaInputs, mask: FrameMask, placement: tuple[int, Tensor]) -> dict[str, Tensor]:
        """Return the row tensor `full_text_row_masked_out_mask` is made of: False skips the MLP of the row.

        In a pass without images no row attends, and the layers give what the skipped layers of the unpatched model
        give.
        """
        attends = mask.any_frame_visible()
        if bool(attends.any()):
            in_mask = inputs.visible_tiles(mask.total_frames // placement[0])
            if in_mask is None:
                return {}
            attends = _any_tile(in_mask)
        return {"mlp_gate": copy_to_device(attends, self.embedding_weight().device)}

    def adopt_cache(self, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Refuse a cache in which the unpatched model stored K and V of tiles, all of them on every rank."""
        layers = {i: cache.layers[i] for i in self._cross_layers(cache)}
        filled = [i for i, layer in layers.items() if layer.is_initialized and layer.keys.numel()]
        if filled:
            raise ConfigError(
                f"past_key_values holds K and V of images that an unpatched model computed (layers {filled}); continue "
                "it with the unpatched model, or begin with a new cache"
            )

    def mark_cache(self, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Mark the cross-attention layers, which the unpatched model would skip because they hold nothing."""
        mark_visual_layers(cache, cache_state, self._cross_layers(cache))

    def _cross_layers(self, cache: Any) -> list[int]:
        return [i for i in self.text_config.cross_attention_layers if i < len(cache.layers)]

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        config = self.model.model.language_model.layers[0].self_attn.config  # names the patched attention
        return causal_mask(config, embeds, mask, positions, cache)

    def check_inputs(self, inputs: MllamaInputs, kwargs: Mapping[str, Any]) -> None:
        super().check_inputs(inputs, kwargs)
        inputs.check()
        unmasked = inputs.total_frames and inputs.cross_attention_mask is None
        if unmasked and not self._warned_of_missing_mask and self.text_config._attn_implementation == "sdpa":
            self._warned_of_missing_mask = True
            _log.warning(
                "cross_attention_mask is missing: every token attends to every tile of its sample. transformers' sdpa "
                "attention would treat tiles as text and hide most of them; pass the processor's mask"
            )

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        gate = state.rows.get("mlp_gate")
        return self.model.model.language_model(
            **decoder_arguments(embeds, positions, mask, cache, state),
            cross_attention_states=None if state.frames is None else state,
            full_text_row_masked_out_mask=None if gate is None else gate[:, None, :, None].to(self.model.dtype),
            **kwargs,
        )

    def forward(
        self,
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
        text, vision = input_ids if input_ids is not None else inputs_embeds, self.model.model.vision_model
        samples = visual_samples or (0 if text is None else text.shape[0])
        images = (pixel_values, (aspect_ratio_ids, aspect_ratio_mask), cross_attention_states)
        frames, extras = flat_images(*images, visual_shard, samples, vision.num_patches)
        mask = None if cross_attention_mask is None else cross_attention_mask == 1
        ratios = {} if visual_shard is not None else dict(zip(ASPECT_RATIOS, extras, strict=False))
        inputs = MllamaInputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            frames=frames,
            frames_are_features=cross_attention_states is not None,
            pixels_and_features=pixel_values is not None and cross_attention_states is not None,
            visual_shard=visual_shard,
            compared_tensors=as_compared_tensors(cross_attention_mask=mask, **ratios),
            past_key_values=past_key_values,
            use_cache=makes_cache(self.context, self.model, self.text_config, use_cache, past_key_values, labels),
            detects_packing=not _unpatched_caches(self.model, past_key_values, use_cache),
            extras=extras,
            frame_names=("pixel_values", "cross_attention_states"),
            cross_attention_mask=mask,
            samples=samples,
            tiles=vision.max_num_tiles,
            patches=vision.num_patches,
            width=self.text_config.hidden_size,
        )
        return run_pass(self, inputs, logits_to_keep, kwargs)


def _any_tile(visible: Tensor) -> Tensor:
    """(B, L, tiles) -> (B, L): whether a row attends to any tile."""
    return visible.view(torch.uint8).amax(-1).bool()  # `any` takes 30 times as long


def _unpatched_caches(model: Any, past: Cache | None, use_cache: bool | None) -> bool:
    """Return whether the unpatched model would use a cache; it then does not detect packed sequences by positions."""
    decoder = model.model.language_model
    wanted = model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    return past is not None or (bool(wanted) and not (decoder.gradient_checkpointing and decoder.training))


adapter = MllamaFamily
