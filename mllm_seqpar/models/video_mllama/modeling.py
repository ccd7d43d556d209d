"""MOSS-Video-Preview for transformers 5: Llama 3.2 Vision with positions of frames, and with pooled patches.

What differs from transformers' Mllama:

- A frame is an image of one tile. The vision tower attends without a mask, so the zero rows that pad its patches to a
  multiple of 8 take part. The patches are pooled before the projector; the class token is kept in front of them.
- In cross-attention, queries are rotated by the position of their token, after their norm, and keys by the position of
  their frame, before their norm. All tokens of a frame have one position.
- The loss of silence tokens has a weight.

Decoded tokens rotate their queries as the tokens of a prompt do. The published code leaves that out, so that its
decoding differs from a pass over the same tokens.

Shape legend: B samples, L text tokens, F frames of a sample, T tokens of a frame, C hidden size, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mllama.modeling_mllama import (
    MllamaCrossAttentionDecoderLayer,
    MllamaForConditionalGeneration,
    MllamaModel,
    MllamaTextCrossAttention,
    MllamaTextModel,
    MllamaVisionModel,
    eager_attention_forward,
)
from transformers.utils import can_return_tuple

from mllm_seqpar._compat import cache_argument, cache_name, takes_cache
from mllm_seqpar.errors import IMAGE_DIMS, ShapeError, require_shape
from mllm_seqpar.models.causal_lm import NativeModelMixin, rotate
from mllm_seqpar.runtime.loss import IGNORE, mean_over_targets, shifted, summed_cross_entropy

from .configuration import VideoMllamaConfig

_PUBLISHED_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.language_model.",
    r"^vision_model\.": "model.vision_model.",
    r"^multi_modal_projector\.": "model.multi_modal_projector.",
    r"^patch_merger\.": "model.patch_merger.",
}
"""The names of weights here by those in published checkpoints, which are Mllama's of transformers 4."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (B or 1, tokens, D) each."""


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads (B, H, tokens, D)."""
    return rotate(x, (part[:, None] for part in rotation))


def rotated_keys(k: Tensor, rotation: Tensor, transposed: bool = False) -> Tensor:
    """Rotate the keys (F, T, G, D) of frames by `rotation` (F, 2, D), or apply the transpose of this linear map."""
    return rotate(k, rotation.to(k.dtype)[:, :, None, None].unbind(1), transposed)


class VideoMllamaTextCrossAttention(MllamaTextCrossAttention):
    """Cross-attention to frames, with rotated queries and keys."""

    is_causal = False  # without a mask, sdpa would hide keys as if they were text

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        cross_attention_states: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        query_rotation: Rotation,
        frame_rotation: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from rows (B, L, C) to frames, given here (B * F, T, C) or in the cache."""
        batch = hidden_states.shape[0]

        def heads(x: Tensor) -> Tensor:
            return x.view(batch, -1, x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)

        q = rotated(self.q_norm(heads(self.q_proj(hidden_states))), query_rotation)
        if cross_attention_states is None:
            layer = cache.layers[self.layer_idx]
            k, v = layer.keys, layer.values
        else:
            assert frame_rotation is not None
            k = self.k_norm(rotated(heads(self.k_proj(cross_attention_states)), frame_rotation))
            v = heads(self.v_proj(cross_attention_states))
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(batch, -1, self.num_heads * self.head_dim)), weights


class VideoMllamaCrossAttentionDecoderLayer(MllamaCrossAttentionDecoderLayer):
    """Mllama's layer, which passes the rotation of its rows on to cross-attention."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.cross_attn = VideoMllamaTextCrossAttention(config, layer_idx)

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: Rotation | None = None, **kwargs: Any
    ) -> Any:
        return super().forward(hidden_states, *args, query_rotation=position_embeddings, **kwargs)


class VideoMllamaTextModel(MllamaTextModel):
    """Mllama's decoder with `VideoMllamaCrossAttentionDecoderLayer`; all layers get the further keyword arguments."""

    _supports_flex_attn = False
    _no_split_modules = [
        "VideoMllamaCrossAttentionDecoderLayer",
        "MllamaSelfAttentionDecoderLayer",
        "MllamaVisionEncoderLayer",
    ]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index in config.cross_attention_layers:
            self.layers[index] = VideoMllamaCrossAttentionDecoderLayer(config, index)
        self.post_init()


class VideoMllamaVisionModel(MllamaVisionModel):
    """Mllama's vision tower for frames of one tile, without attention masks.

    Of the embeddings of tiles and aspect ratios, those of the first tile are used.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.max_num_tiles = 1
        for layer in [*self.transformer.layers, *self.global_transformer.layers]:
            layer.self_attn.is_causal = False  # what sdpa reads without a mask

    def forward(
        self, pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Encode frames (B, F, 1, 3, H, W) with aspect ratio ids (B, F) to (B, F, 1, patches + 1, width)."""
        note = ", one tile to a frame: set max_image_tiles=1 in the image processor"
        require_shape("pixel_values", pixel_values.shape, note, batch=None, frames=None, tiles=1, **IMAGE_DIMS)
        batch, frames = pixel_values.shape[:2]
        ids, weight = aspect_ratio_ids.flatten(), self.patch_embedding.weight

        def first_tile(table: nn.Embedding, tokens: int) -> Tensor:
            return table(ids).unflatten(1, (-1, tokens, self.hidden_size))[:, 0]

        x = self.patch_embedding(pixel_values.flatten(0, 2).to(weight)).flatten(2).transpose(1, 2)
        before, after = self.pre_tile_positional_embedding, self.post_tile_positional_embedding
        x = self.apply_class_embedding(x + first_tile(before.embedding, 1) * before.gate.tanh())
        place, tokens = self.gated_positional_embedding, x.shape[1]
        gate = place.gate.tanh()
        x = x + (1 - gate) * place.embedding + gate * first_tile(place.tile_embedding, tokens)
        x = F.pad(self.layernorm_pre(x), (0, 0, 0, -tokens % 8))
        inputs = []  # of each layer, which `intermediate_layers_indices` count; transformers 5.24 counts outputs
        for layer in self.transformer.layers:
            inputs.append(x)
            x = layer(x)
        states = torch.stack([[*inputs, x][index] for index in self.intermediate_layers_indices], dim=-1)
        x = self.layernorm_post(x) + first_tile(after.embedding, 1) * after.gate.tanh()
        for layer in self.global_transformer.layers:
            x = layer(x)
        out = torch.cat([x, states.flatten(2)], dim=-1)[:, :tokens]
        return BaseModelOutput(last_hidden_state=out.unflatten(0, (batch, frames))[:, :, None])


class VideoMllamaModel(MllamaModel):
    """The vision tower, pooling, projector and decoder of MOSS-Video-Preview."""

    config: VideoMllamaConfig

    def __init__(self, config: VideoMllamaConfig) -> None:
        super().__init__(config)
        self.vision_model = VideoMllamaVisionModel._from_config(config.vision_config)
        self.language_model = VideoMllamaTextModel._from_config(config.text_config)
        self.vision_model.num_patches = config.tokens_per_frame  # what the mask repeats for each frame
        self.patch_merger: nn.Conv2d | None = None
        if config.pool_mode == "channelFusion":
            width, stride = self.vision_output_dim, config.stride or 1
            self.patch_merger = nn.Conv2d(width, width, stride, stride, bias=False)
        self.post_init()

    def pooled(self, states: Tensor) -> Tensor:
        """Pool the patches of frames (..., 1 + patches, width) to (..., T, width); the class token stays in front."""
        mode, stride, side = self.config.pool_mode, self.config.stride, self.config.patches_per_side
        if mode is None:
            return states
        assert stride is not None
        cls, patches = states[..., :1, :], states[..., 1:, :]
        x = patches.flatten(0, -3).transpose(1, 2).unflatten(2, (side, side))
        if mode == "channelFusion":
            assert self.patch_merger is not None
            x = self.patch_merger(x)
        elif mode == "bilinear":
            x = F.interpolate(x, size=(-(-side // stride),) * 2, mode="bilinear")
        else:
            x = (F.avg_pool2d if mode == "average" else F.max_pool2d)(x, stride)
        x = x.flatten(2).transpose(1, 2).reshape(*cls.shape[:-2], -1, cls.shape[-1])
        return torch.cat([cls, x], dim=-2)

    def encode_frames(self, pixel_values: Tensor, aspect_ratio_ids: Tensor) -> Tensor:
        """Encode frames (B, F, 1, 3, H, W) to features (B * F, T, C), which `cross_attention_states` takes."""
        states = self.vision_model(pixel_values=pixel_values, aspect_ratio_ids=aspect_ratio_ids).last_hidden_state
        return self.multi_modal_projector(self.pooled(states)).flatten(0, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        vision_position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model without its head; the arguments are those of the class with the head."""
        tokens = inputs_embeds if input_ids is None else input_ids
        if pixel_values is not None:
            if cross_attention_states is not None:
                raise ShapeError("pass either pixel_values or cross_attention_states, not both")
            if aspect_ratio_ids is None:
                raise ShapeError("pixel_values was given without aspect_ratio_ids; pass what the processor returns")
            cross_attention_states = self.encode_frames(pixel_values, aspect_ratio_ids)
        if cross_attention_states is not None and tokens is not None:
            kwargs["frame_rotation"] = self._frame_rotation(
                cross_attention_states, tokens.shape[0], vision_position_ids, kwargs.get(cache_name())
            )
        return super().forward(
            input_ids=input_ids, inputs_embeds=inputs_embeds, cross_attention_states=cross_attention_states, **kwargs
        )

    def _frame_rotation(self, states: Tensor, batch: int, positions: Tensor | None, cache: Any) -> Rotation:
        """Return the rotations of the keys of new frames: by their positions, or by their number without any."""
        per_frame = self.config.tokens_per_frame
        frames = states[..., 0].numel() // (batch * per_frame)
        if positions is None:
            layer, seen = self.language_model.cross_attention_layers[0], 0
            if cache is not None:
                seen = int(cache.get_seq_length(layer)) // per_frame
            positions = torch.arange(seen, seen + frames, device=states.device)[None]
        check_frame_positions(positions, batch, frames)
        cos, sin = self.language_model.rotary_emb(states, positions)
        return cos.repeat_interleave(per_frame, 1), sin.repeat_interleave(per_frame, 1)


def check_frame_positions(positions: Tensor, batch: int, frames: int) -> None:
    """Raise ShapeError unless there is a position for each frame of each sample."""
    if positions.shape not in ((batch, frames), (1, frames)):
        raise ShapeError(
            f"vision_position_ids has shape {tuple(positions.shape)}; expected {(batch, frames)}, the position of each "
            "frame of each sample, padding included"
        )


class VideoMllamaForConditionalGeneration(NativeModelMixin, MllamaForConditionalGeneration):
    """MOSS-Video-Preview. `from_pretrained` requires exactly the weights of the model, by their published names."""

    config: VideoMllamaConfig
    config_class = VideoMllamaConfig

    def __init__(self, config: VideoMllamaConfig) -> None:
        super().__init__(config)
        self.model = VideoMllamaModel(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict[str, str] | None = None, **kwargs: Any) -> Self:
        """Load a model; see `NativeModelMixin.from_pretrained`."""
        return super().from_pretrained(*args, key_mapping=_PUBLISHED_NAMES | (key_mapping or {}), **kwargs)

    @can_return_tuple
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
        vision_position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Compute the logits of the text, and the loss if labels are given.

        Args:
            input_ids: (B, L), with one image token for each frame.
            pixel_values: (B, F, 1, 3, height, width).
            aspect_ratio_mask: what the image processor returns; it has no effect on frames of one tile.
            aspect_ratio_ids: (B, F), 1, or 0 for a frame that pads a sample.
            attention_mask: (B, L) text mask, 0 at padding.
            cross_attention_mask: (B, L, F, 1), 1 where a row attends to a frame; None: rows attend to all of them.
            cross_attention_states: (B * F, T, C), the result of `encode_frames`, instead of `pixel_values`.
            position_ids: (B, L); image tokens count.
            vision_position_ids: (B, F), the position of each frame, that of its image token; None: 0, 1, 2, ...
            inputs_embeds: (B, L, C) instead of `input_ids`.
            labels: (B, L), not shifted; the loss ignores -100.
            use_cache: whether a cache is filled.
            logits_to_keep: number of last positions, or the positions, to compute logits for; 0 for all.
            **kwargs: the cache, and further arguments of the decoder and the loss.
        """
        weighted = labels is not None and self.target_weights(labels) is not None
        out = super().forward(
            input_ids=input_ids,
            pixel_values=pixel_values,
            aspect_ratio_mask=aspect_ratio_mask,
            aspect_ratio_ids=aspect_ratio_ids,
            attention_mask=attention_mask,
            cross_attention_mask=cross_attention_mask,
            cross_attention_states=cross_attention_states,
            position_ids=position_ids,
            vision_position_ids=vision_position_ids,
            inputs_embeds=inputs_embeds,
            labels=None if weighted else labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        if weighted:
            assert labels is not None
            given, ignore = kwargs.get("shift_labels"), kwargs.get("ignore_index", IGNORE)
            targets = shifted(labels, ignore) if given is None else given
            total = summed_cross_entropy(out.logits, targets, ignore, self.target_weights(targets))
            out.loss = mean_over_targets(total, targets, kwargs.get("num_items_in_batch"), ignore)
        return out

    def target_weights(self, targets: Tensor) -> Tensor | None:
        """Return the weight of the loss of each target, or None if all are 1."""
        token, weight = self.config.silence_token_id, self.config.silence_token_weight
        if token is None or token < 0 or weight == 1:
            return None
        return torch.where(targets == token, weight, 1.0)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat each sample for its beams, with all of its frames; features have one row for each frame."""
        states, embeds = model_kwargs.get("cross_attention_states"), model_kwargs.get("inputs_embeds")
        text = input_ids if embeds is None else embeds
        if states is not None and text is not None and model_kwargs.get("visual_shard") is None:
            model_kwargs["cross_attention_states"] = states.reshape(text.shape[0], -1, states.shape[-1])
        return super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )

    @takes_cache
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, cache: Any = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare the inputs as transformers does; positions of frames are passed with the frames only."""
        kwargs |= {**cache_argument(cache), "inputs_embeds": inputs_embeds}
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if inputs.get("pixel_values") is None and inputs.get("cross_attention_states") is None:
            inputs.pop("vision_position_ids", None)
        return inputs
