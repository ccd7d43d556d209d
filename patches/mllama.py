"""Llama 3.2 Vision (transformers `MllamaForConditionalGeneration`): its sites, what tokens see, facts of its layers.

The mask speaks of tiles. The vision tower attends across the tiles of an image, so an image is what one rank holds
whole; features that the caller encoded beforehand are dealt out by tiles.

A row whose mask shows nothing attends to everything of its sample, and only its MLP part is left out: transformers sets
the additive mask of such a row to zeros. That is a fact of the whole row, decided before tiles are dealt to ranks.

Whole decoder layers look at images. The decoder skips them without visual states, so a pass that has visual keys hands
it the call in their place. K and V of tiles never enter transformers' cache: the core keeps them, each rank its own.
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
from transformers.utils import can_return_tuple

from mllm_seqpar.call import SeqParCall
from mllm_seqpar.context import SeqParContext
from mllm_seqpar.errors import AdapterError, MaskError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.patching import Patch
from mllm_seqpar.sharding import FrameShard

from . import hf_attention
from .hf_generation import patch_generate
from .hf_inputs import Inputs, flat_places, makes_cache
from .hf_passes import Family, View, run_pass

_MODELS = "transformers.models.mllama."
_PIXELS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
_VISUAL = (*_PIXELS, "cross_attention_states", "visual_shard")
_BATCH_OF = "_maybe_initialize_input_ids_for_generation"


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
        hf_attention.select(patch, [decoder, *text])
        for attention in crossing:
            patch.set(attention, "forward", _cross_forward(attention))
        patch.set(model, "forward", _model_forward(model, context))
        patch.set(model, "prepare_inputs_for_generation", _prepare(model.prepare_inputs_for_generation))
        patch.set(model, "_expand_inputs_for_generation", _expand(model._expand_inputs_for_generation))
        patch.set(model, _BATCH_OF, _batch_of_text(getattr(model, _BATCH_OF)))
        patch_generate(model, context, patch)


def adapter() -> MllamaAdapter:
    """The adapter of this family."""
    return MllamaAdapter()


def _cross_forward(attention: Any) -> Any:
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(
        self: Any, hidden_states: Tensor, *args: Any, seqpar: SeqParCall | None = None, **kwargs: Any
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


@dataclass(frozen=True, kw_only=True)
class _Inputs(Inputs):
    """With what rows may see.

    Attributes:
        cross_attention_mask: (B, L or all tokens so far, images, tiles), 1 where a row sees a tile; None: everything.
        samples: samples that the frames belong to; each is `B / samples` rows of the batch (its beams).
    """

    cross_attention_mask: Tensor | None
    samples: int

    def seen(self, per_sample: int) -> Tensor | None:
        """(B, L, per_sample) bool: the tiles that the mask shows each row of this pass; None without a mask."""
        mask = self.cross_attention_mask
        if mask is None:
            return None
        if mask.dim() == 4 and mask.shape[1] != self.length:  # of the whole text: in a step of decoding, its last rows
            mask = mask[:, self.past_length : self.past_length + self.length]
        if mask.dim() != 4 or mask.shape[1] not in (1, self.length) or mask[0, 0].numel() != per_sample:
            raise MaskError(
                f"cross_attention_mask has shape {tuple(self.cross_attention_mask.shape)}; expected (batch, tokens, "  # type: ignore[union-attr]
                f"images, tiles): {self.batch} samples, {self.length} tokens after the {self.past_length} cached ones, "
                f"and {per_sample} tiles of all images of a sample"
            )
        return (mask == 1).flatten(2).expand(self.batch, self.length, -1)


class MllamaFamily(Family):
    """Llama 3.2 Vision: images of `max_num_tiles` tiles, seen by tiles."""

    def units_per_frame(self, inputs: Inputs) -> int:
        """The tiles of an image; features come by tiles."""
        return 1 if inputs.frames_are_features else self.model.config.vision_config.max_num_tiles

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """(f, tiles, 3, H, W), aspect ratio ids (f,) and mask (f, tiles) -> (f * tiles, patches, C)."""
        named = dict(zip(_PIXELS, (frames, *extras), strict=True))
        states = self.model.model.vision_model(**{name: x[None] for name, x in named.items()}).last_hidden_state
        return self.model.model.multi_modal_projector(states).flatten(0, 2)

    def blank(self) -> tuple[Tensor, ...]:
        """A black image of one tile, as the processor pads with."""
        vision, weight = self.model.config.vision_config, self.embedding_weight()
        shape = (1, vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        ratio = torch.zeros(1, vision.max_num_tiles, dtype=torch.long, device=weight.device)
        ratio[:, 0] = 1
        return torch.zeros(shape, device=weight.device, dtype=weight.dtype), ratio.new_zeros(1), ratio

    def note(self, inputs: Inputs) -> int:
        """The samples that the prompt's images belong to."""
        assert isinstance(inputs, _Inputs)
        return inputs.samples

    def view(self, inputs: Inputs, units: int, tokens: int, note: int) -> View:
        """The mask's tiles of the row's own sample; all of them for a row that it shows none."""
        assert isinstance(inputs, _Inputs)
        per_sample = units // note
        sample = torch.arange(inputs.batch) // (inputs.batch // note)
        seen = inputs.seen(per_sample)
        if seen is None:
            first = (sample * per_sample)[:, None].expand(-1, inputs.length)
            return View(FrameMask.from_intervals(first, first + per_sample, tokens, units))
        sees = seen.any(-1)
        visible = seen.new_zeros(inputs.batch, inputs.length, note, per_sample)
        visible[torch.arange(inputs.batch), :, sample] = seen | ~sees[..., None]
        return View(FrameMask.from_dense(visible.flatten(2), tokens), self._rows(sees))

    def nobody(self, inputs: Inputs, units: int, tokens: int) -> View:
        """Attention gives nothing and the MLP part is left out: what a skipped layer gives."""
        nothing = torch.zeros(inputs.batch, inputs.length, dtype=torch.bool)
        return View(super().nobody(inputs, units, tokens).mask, self._rows(nothing))

    def _rows(self, sees: Tensor) -> dict[str, Tensor]:
        return {"sees": sees.to(self.embedding_weight().device)}

    def check(self, inputs: Inputs, kwargs: dict[str, Any]) -> None:
        """What only one rank may have got wrong, and must not leave the others waiting for it."""
        super().check(inputs, kwargs)
        assert isinstance(inputs, _Inputs)
        if inputs.frames is None:
            return
        (self._check_features if inputs.frames_are_features else self._check_pixels)(inputs)
        units = inputs.total_frames * self.units_per_frame(inputs)
        if inputs.samples < 1 or inputs.batch % inputs.samples or units % inputs.samples:
            raise ShapeError(
                f"{units} tiles of {inputs.samples} samples were passed with a batch of {inputs.batch}; every sample "
                "needs as many images as the others, padding images included"
            )
        if units:
            inputs.seen(units // inputs.samples)

    def _check_pixels(self, inputs: _Inputs) -> None:
        vision, frames = self.model.config.vision_config, inputs.frames
        assert frames is not None
        missing = [name for name, x in zip(_PIXELS[1:], inputs.extras, strict=True) if x is None]
        if missing:
            raise ShapeError(f"pixel_values was given without {', '.join(missing)}; pass what the processor returns")
        lead = "(images of this rank" if inputs.visual_shard is not None else "(batch, images"
        shapes = [tuple(x.shape) for x in (frames, *inputs.extras)]
        if frames.dim() != 5 or shapes[0][1] != vision.max_num_tiles or shapes[1:] != [shapes[0][:1], shapes[0][:2]]:
            raise ShapeError(
                f"pixel_values, aspect_ratio_ids and aspect_ratio_mask have shapes {shapes} by images; expected "
                f"{lead}, {vision.max_num_tiles} tiles, channels, height, width), {lead}) and {lead}, tiles)"
            )

    def _check_features(self, inputs: _Inputs) -> None:
        shape, width = tuple(inputs.frames.shape), self.text_config.hidden_size  # type: ignore[union-attr]
        patches = self.model.model.vision_model.num_patches
        masked = inputs.cross_attention_mask is not None
        if len(shape) != 3 or shape[2] != width or (masked and shape[1] != patches):
            raise ShapeError(
                f"cross_attention_states has shape {shape}; expected (batch x images x tiles, patches, {width})"
                + (f" with {patches} patches, which cross_attention_mask counts on" if masked else "")
            )

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, call: SeqParCall, **kwargs: Any
    ) -> Any:
        """The decoder of self- and cross-attention layers."""
        sees = call.rows.get("sees")
        return self.model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions,
            cross_attention_states=call if call.frames is not None or call.kept is not None else None,
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
        text = input_ids if input_ids is not None else inputs_embeds
        samples = visual_samples or (0 if text is None else text.shape[0])
        frames, extras = pixel_values, ()
        if pixel_values is not None:
            extras = (aspect_ratio_ids, aspect_ratio_mask)
            if visual_shard is None:
                frames, extras = _flat(pixel_values), tuple(None if x is None else _flat(x) for x in extras)
        elif cross_attention_states is not None:
            patches = self.model.vision_model.num_patches
            frames = _by_tiles(cross_attention_states, samples, patches, visual_shard)
        whole = () if visual_shard is not None else extras
        inputs = _Inputs(
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
            places=flat_places(None if cross_attention_mask is None else cross_attention_mask == 1, *whole),
            past_key_values=past_key_values,
            use_cache=makes_cache(context, family.text_config, use_cache, past_key_values, labels),
            packed=not _unpatched_caches(self, past_key_values, use_cache),
            extras=extras,
            frame_names=("pixel_values", "cross_attention_states"),
            cross_attention_mask=cross_attention_mask,
            samples=samples,
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD
    return types.MethodType(can_return_tuple(forward), model)


_VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that the images passed are only this rank's of
        `visual_shard.total`, all samples' images (padding images included) in one list: `pixel_values` (f, tiles,
        channels, height, width), `aspect_ratio_ids` (f,), `aspect_ratio_mask` (f, tiles). With
        `cross_attention_states` (t, patches, width) it counts tiles. `visual_samples` is what `generate` passes with
        beams: samples that the images belong to.
"""


def _flat(x: Tensor) -> Tensor:
    """(B, images, ...) -> (B * images, ...); what has too few dimensions is left for the check to name."""
    return x.flatten(0, 1) if x.dim() > 1 else x


def _by_tiles(states: Tensor, samples: int, patches: int, shard: FrameShard | None) -> Tensor:
    """Visual states of any leading shape -> (tiles, patches, C); whole samples are cut into tiles where they divide."""
    if states.dim() > 3:
        states = states.flatten(0, -3)
    cut = shard is None and states.dim() == 3 and states.shape[1] != patches
    if cut and samples and states[..., 0].numel() % (samples * patches) == 0:
        return states.reshape(-1, patches, states.shape[2])
    return states


def _unpatched_caches(model: Any, past: Cache | None, use_cache: bool | None) -> bool:
    """Whether the unpatched model would use a cache: then it does not look at positions for packed sequences."""
    decoder = model.model.language_model
    if past is not None:
        return True
    wanted = decoder.config.use_cache if use_cache is None else use_cache
    return bool(wanted) and not (decoder.gradient_checkpointing and decoder.training)


def _prepare(unpatched: Any) -> Any:
    @functools.wraps(unpatched)
    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers'; what images came as goes in once when there is a cache, states and shards included."""
        inputs = unpatched(*args, **kwargs)
        if kwargs.get("use_cache") and not kwargs.get("is_first_iteration"):
            inputs |= dict.fromkeys(_VISUAL)
        return inputs

    return prepare_inputs_for_generation


def _expand(unpatched: Any) -> Any:
    @functools.wraps(unpatched)
    def _expand_inputs_for_generation(
        expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **model_kwargs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Repeats each sample for its beams, which share its images: those are encoded and kept once."""
        visual = {name: model_kwargs.pop(name) for name in _VISUAL if name in model_kwargs}
        embeds = model_kwargs.get("inputs_embeds")
        prompt = input_ids if embeds is None else embeds
        if visual and expand_size > 1 and prompt is not None:
            visual["visual_samples"] = prompt.shape[0]
        ids, others = unpatched(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        return ids, others | visual

    return _expand_inputs_for_generation


def _batch_of_text(unpatched: Any) -> Any:
    @functools.wraps(unpatched)
    def _maybe_initialize_input_ids_for_generation(
        inputs: Tensor | None, bos_token_id: Tensor | None, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """As transformers', which takes the batch from the first tensor it finds: this rank's images are not one."""
        return unpatched(inputs, bos_token_id, {k: x for k, x in model_kwargs.items() if k not in _VISUAL})

    return _maybe_initialize_input_ids_for_generation
