"""IDEFICS (`IdeficsForVisionText2Text` of transformers): its sites, what its tokens see, and its sharded forward.

Sites: the model's forward and that of its decoder; the attention of the gated cross-attention blocks; the decoder
layers' attention function. A row sees the images that `image_attention_mask` names; one that sees none gets exactly
zero from the cross-attention (`cross_attention_gate`).

Shape legend: B samples, I images of each, L text tokens, f images of this rank in the flat list of all B * I.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.integrations.transformers import attention as hf_attention
from mllm_seqpar.integrations.transformers.family import VISUAL_SHARD, Family, Visibility
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs, flat_places, makes_cache
from mllm_seqpar.integrations.transformers.passes import forward_of, run_pass
from mllm_seqpar.integrations.transformers.visual_masks import sample_mask
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import CrossAttentionShape
from mllm_seqpar.runtime.visual_features import Projection
from mllm_seqpar.sharding import FrameShard

_FRAMES = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings")


class IdeficsAdapter:
    """The adapter of IDEFICS, with and without resampler."""

    name = "IDEFICS"

    def matches(self, model: nn.Module) -> bool:
        """Whether it is `IdeficsForVisionText2Text`, also after `fully_shard` made it a class of its own."""
        return any(
            c.__name__ == "IdeficsForVisionText2Text" and c.__module__.startswith("transformers.")
            for c in type(model).__mro__
        )

    def check(self, model: Any, context: SeqParContext) -> None:
        """The blocks' attention must be the cross-attention that the patch knows."""
        for index, block in enumerate(model.model.gated_cross_attn_layers):
            if not getattr(block.cross_attn, "is_cross_attention", False):
                raise AdapterError(f"gated_cross_attn_layers[{index}].cross_attn is not a cross-attention")

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the forwards, and selects the text's attention function."""
        decoder = model.model
        hf_attention.select(patch, [layer.self_attn for layer in decoder.layers])
        for index, block in enumerate(decoder.gated_cross_attn_layers):
            patch.set(block.cross_attn, "forward", _cross_attention_forward(block.cross_attn, index))
        chunk_forwards(patch, (layer.mlp for layer in [*decoder.layers, *decoder.gated_cross_attn_layers]))
        text = [layer.self_attn for layer in decoder.layers]
        patch.guard(model, [*text, *(block.cross_attn for block in decoder.gated_cross_attn_layers)])
        patch.set(decoder, "forward", _decoder_forward(decoder))
        patch.set(model, "forward", _model_forward(model, context))
        patch_generate(model, context, patch, frames=_FRAMES)


def adapter() -> IdeficsAdapter:
    """The adapter of this family."""
    return IdeficsAdapter()


def _cross_attention_forward(attention: Any, block: int) -> Any:
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState | None = None, **kwargs: Any) -> Any:
        """This pass's rows (B, s, C) over all ranks' images -> (B, s, C)."""
        if seqpar is None:
            return unpatched(hidden_states, *args, **kwargs)
        hf_attention.refuse_dropout(self.dropout if self.training else 0.0)
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        if self.qk_layer_norms:
            q = self.q_layer_norm(q)
        modules = [self.k_proj, self.v_proj, *([self.k_layer_norm] if self.qk_layer_norms else [])]
        o = seqpar.cross_attend(q, block, _projection(self), modules, self.scaling)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None

    return types.MethodType(forward, attention)


def _projection(self: Any) -> Projection:
    def project(features: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        flat, heads = features.flatten(0, 1)[None], (self.num_heads, self.head_dim)
        k = self.k_proj(flat).unflatten(-1, heads).transpose(1, 2)
        v = self.v_proj(flat).unflatten(-1, heads).transpose(1, 2)
        return (self.k_layer_norm(k) if self.qk_layer_norms else k), v

    return project


def _decoder_forward(decoder: Any) -> Any:
    unpatched = decoder.forward

    @capture_outputs
    def layers(
        self: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Cache | None,
        seqpar: ForwardState,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Cross-attention block `i` goes before decoder layer ``i * cross_layer_interval``."""
        mask = create_causal_mask(
            config=self.layers[0].self_attn.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden, images = inputs_embeds, inputs_embeds.new_empty(0)  # the blocks want some; the call has the real ones
        for number, layer in enumerate(self.layers):
            if number % self.cross_layer_interval == 0:
                block = self.gated_cross_attn_layers[number // self.cross_layer_interval]
                hidden = block(hidden, mask, images, cross_attention_gate=seqpar.rows["gate"], seqpar=seqpar, **kwargs)
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                seqpar=seqpar,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    @functools.wraps(unpatched)
    def forward(self: Any, *args: Any, seqpar: ForwardState | None = None, **kwargs: Any) -> Any:
        return unpatched(*args, **kwargs) if seqpar is None else layers(self, seqpar=seqpar, **kwargs)

    return types.MethodType(forward, decoder)


@dataclass(frozen=True, kw_only=True)
class _Inputs(ForwardInputs):
    """With what IDEFICS is told about its images."""

    image_attention_mask: Tensor
    interpolate_pos_encoding: bool
    resampled: bool


class IdeficsFamily(Family):
    """IDEFICS: images of all samples in one flat list, a table of which row sees which."""

    repeats_frames = True

    def cross_shape(self) -> CrossAttentionShape:
        """Every key head has one query head."""
        blocks = self.model.model.gated_cross_attn_layers
        heads = blocks[0].cross_attn.num_heads
        return CrossAttentionShape(heads, heads, blocks[0].cross_attn.head_dim, len(blocks))

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """(f, 3, H, W) pixels, or (f, patches, width) of the tower -> (f, tokens, width)."""
        decoder = self.model.model
        frames = frames.to(device=self.embedding_weight().device, dtype=self.model.dtype)
        if frames.dim() == 4:
            other_size = tuple(frames.shape[2:]) != self._size
            frames = decoder.vision_model(pixel_values=frames, interpolate_pos_encoding=other_size).last_hidden_state
        return decoder.perceiver_resampler(frames) if self.model.config.use_resampler else frames

    @property
    def _size(self) -> tuple[int, int]:
        size = self.model.config.vision_config.image_size
        return size, size

    def blank(self) -> tuple[Tensor, ...]:
        """A black image of the tower's size."""
        return (torch.zeros((1, 3, *self._size), device=self.embedding_weight().device),)

    def check(self, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
        """What only one rank may have got wrong, and must not leave the others waiting for it."""
        super().check(inputs, kwargs)
        assert isinstance(inputs, _Inputs)
        if inputs.resampled and not self.model.config.use_resampler:
            raise ShapeError("perceiver_embeddings were passed to a model without resampler (config.use_resampler)")

    def note(self, inputs: ForwardInputs) -> int:
        """Check the images' size and the table's shape; return the rows of the images' own pass."""
        assert isinstance(inputs, _Inputs)
        mask, frames = inputs.image_attention_mask, inputs.frames
        if frames is None:
            raise ShapeError(f"IDEFICS needs images: pass one of {', '.join(_FRAMES)}")
        if frames.dim() == 4 and tuple(frames.shape[2:]) != self._size and not inputs.interpolate_pos_encoding:
            raise ShapeError(
                f"pixel_values: images of {tuple(frames.shape[2:])}, but the vision tower was made for {self._size}; "
                "resize them, or pass interpolate_pos_encoding=True"
            )
        if mask is None or mask.dim() != 3 or tuple(mask.shape[:2]) != (inputs.batch, inputs.length):
            found = "nothing" if mask is None else tuple(mask.shape)
            raise ShapeError(
                f"image_attention_mask: expected (samples, text tokens, images of a sample) with {inputs.batch} "
                f"samples and {inputs.length} tokens, got {found}"
            )
        return inputs.batch

    def in_order(self, inputs: ForwardInputs, note: int) -> bool:
        """Whether each row's sample is the one at its place; beams move within theirs."""
        assert isinstance(inputs, _Inputs)
        own = inputs.image_attention_mask.shape[2] or 1
        beams = max(1, note * own // inputs.total_frames)
        here = torch.arange(inputs.batch)
        return inputs.batch == note and torch.equal(inputs.rows // beams, here // beams)

    def view(self, inputs: ForwardInputs, units: int, tokens: int, note: Any) -> Visibility:
        """As `image_attention_mask` says; the gate closes rows that see no image."""
        assert isinstance(inputs, _Inputs)
        visible = inputs.image_attention_mask.bool()
        gate = visible.any(-1).to(device=self.embedding_weight().device, dtype=self.model.dtype)
        return Visibility(sample_mask(visible, tokens, units, inputs.rows, note), {"gate": gate})

    def empty_visibility(self, inputs: ForwardInputs, units: int, tokens: int) -> Visibility:
        """With every gate closed."""
        gate = torch.zeros(inputs.batch, inputs.length, device=self.embedding_weight().device, dtype=self.model.dtype)
        return Visibility(super().empty_visibility(inputs, units, tokens).mask, {"gate": gate})

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, call: ForwardState, **kwargs: Any
    ) -> Any:
        """Cross-attention blocks and decoder layers."""
        if "gate" not in call.rows:
            raise ShapeError(f"IDEFICS needs images: none of {', '.join(_FRAMES)} holds one")
        return self.model.model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            return_dict=True,
            seqpar=call,
            **kwargs,
        )

    def output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: ForwardInputs) -> Any:
        """With `image_hidden_states`, which one process has whole; on several, nobody has all images."""
        from transformers.models.idefics.modeling_idefics import IdeficsCausalLMOutputWithPast

        assert isinstance(inputs, _Inputs)
        whole, alone = None, self.context.comm.size == 1 and inputs.visual_shard is None
        if features is not None and alone and inputs.total_frames:
            whole = features.unflatten(0, (-1, inputs.image_attention_mask.shape[2]))
        return IdeficsCausalLMOutputWithPast(**out, image_hidden_states=whole)


def _model_forward(model: Any, context: SeqParContext) -> Any:
    unpatched, family = model.forward, IdeficsFamily(model, context)

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_encoder_embeddings: Tensor | None = None,
        perceiver_embeddings: Tensor | None = None,
        image_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        interpolate_pos_encoding: bool | None = False,
        logits_to_keep: int | Tensor = 0,
        visual_shard: FrameShard | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        given = [x for x in (pixel_values, image_encoder_embeddings, perceiver_embeddings) if x is not None]
        frames = given[0] if given else None
        if frames is not None and visual_shard is None:
            frames = frames.flatten(0, 1)
        ready = perceiver_embeddings is not None or (
            image_encoder_embeddings is not None and not self.config.use_resampler
        )
        inputs = _Inputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=_positions(attention_mask, position_ids, input_ids, inputs_embeds),
            labels=labels,
            shift_labels=shift_labels,
            frames=frames,
            frames_are_features=ready,
            both_kinds=len(given) > 1,
            visual_shard=visual_shard,
            places=flat_places(image_attention_mask),
            past_key_values=past_key_values,
            use_cache=makes_cache(context, self, self.config, use_cache, past_key_values, labels),
            packed=False,  # the unpatched model makes a mask of ones where none is given
            frame_names=_FRAMES,
            compare_frames=pixel_values is not None,
            image_attention_mask=image_attention_mask,  # type: ignore[arg-type]
            interpolate_pos_encoding=bool(interpolate_pos_encoding),
            resampled=perceiver_embeddings is not None,
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + VISUAL_SHARD.format(frames=", ".join(_FRAMES))
    return forward_of(model, forward)


def _positions(mask: Tensor | None, positions: Tensor | None, ids: Tensor | None, embeds: Tensor | None) -> Any:
    """Rotary positions count real tokens only, as the unpatched model makes them from the attention mask."""
    text = ids if ids is not None else embeds
    if positions is not None or mask is None or text is None or mask.dim() != 2:
        return positions
    counted = mask.long().cumsum(-1) - 1
    return counted.masked_fill(mask == 0, 1)[:, -text.shape[1] :]
