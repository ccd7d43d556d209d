"""IDEFICS (`IdeficsForVisionText2Text` of transformers): its sites, what its rows may attend to, its sharded forward,
and the dialogue format of its instructed models.

Sites: the forward of the model and of its decoder; the attention of the gated cross-attention blocks; the attention
function of the decoder layers. A row attends to the images that `image_attention_mask` names. For a row without images
the cross-attention is exactly zero (`cross_attention_gate`).

Shape legend: B samples, I images of each, L text tokens, s of them on this rank, f images of this rank in the flat list
of all B * I, H heads, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.models.idefics.modeling_idefics import IdeficsCausalLMOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from mllm_seqpar.adapting import (
    AdapterError,
    Family,
    ForwardInputs,
    ForwardState,
    FrameMask,
    KVProjection,
    Patch,
    SeqParContext,
    SequenceParallelCacheState,
    ShapeError,
    as_compared_tensors,
    cache_argument,
    copy_to_device,
    mask_over_samples,
    merge_heads,
    refuse_dropout,
    require_shape,
    split_heads,
    takes_cache,
)

_FRAME_ARGUMENTS = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings")


def _cross_attention(
    self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState, index: int, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from this pass's rows (B, s, C) to the images of all ranks; return (B, s, C) and no weights."""
    refuse_dropout(self.dropout if self.training else 0.0)
    q = split_heads(self.q_proj(hidden_states), self.head_dim)
    if self.qk_layer_norms:
        q = self.q_layer_norm(q)
    norm = self.k_layer_norm if self.qk_layer_norms else None
    project = KVProjection((self.k_proj, self.v_proj), self.head_dim, key_norm=norm)
    o = seqpar.attend(q, [seqpar.frame_keys(q, index, project)], self.scaling)
    return self.o_proj(merge_heads(o)), None


@capture_outputs
@takes_cache
def _run_decoder_layers(
    self: Any,
    inputs_embeds: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    cache: Cache | None,
    use_cache: bool,
    seqpar: ForwardState,
    **kwargs: Any,
) -> BaseModelOutputWithPast:
    """Run cross-attention block `i` before decoder layer ``i * cross_layer_interval``."""
    text = {"attention_mask": attention_mask, "position_ids": position_ids, **cache_argument(cache)}
    hidden = inputs_embeds
    no_images = hidden.new_empty(0)  # the blocks take images, but patched ones read the state
    for number, layer in enumerate(self.layers):
        if number % self.cross_layer_interval == 0:
            block = self.gated_cross_attn_layers[number // self.cross_layer_interval]
            gate = seqpar.row_facts["gate"]
            hidden = block(hidden, attention_mask, no_images, cross_attention_gate=gate, seqpar=seqpar, **kwargs)
        hidden = layer(hidden, seqpar=seqpar, **text, **kwargs)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@dataclass(frozen=True, kw_only=True)
class _IdeficsInputs(ForwardInputs):
    image_attention_mask: Tensor
    interpolate_pos_encoding: bool
    resampled: bool
    """Whether `frames` are the output of the resampler."""

    @property
    def is_decoding_step(self) -> bool:
        """As for other families; `generate` also repeats the frames that are in the cache with every token."""
        state = self.cache_state
        repeats = self.frames is None or (state is not None and state.frames is not None)
        return self.past_length > 0 and self.length == 1 and repeats


class IdeficsFamily(Family[_IdeficsInputs]):
    """IDEFICS. The images of all samples are one flat list; a table says which row attends to which image."""

    name = "IDEFICS"
    model_class = "IdeficsForVisionText2Text"
    parts = {
        "vision": ("model.vision_model",),
        "projector": ("model.perceiver_resampler",),
        "language": (
            *("model.embed_tokens", "model.layers", "model.gated_cross_attn_layers", "model.norm"),
            "lm_head",
        ),
    }
    frame_arguments = visual_arguments = _FRAME_ARGUMENTS
    output_class = IdeficsCausalLMOutputWithPast
    repeats_frames = True

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        for index, block in enumerate(model.model.gated_cross_attn_layers):
            if not getattr(block.cross_attn, "is_cross_attention", False):
                raise AdapterError(
                    f"gated_cross_attn_layers[{index}].cross_attn is not a cross-attention; only models of "
                    "transformers' own IDEFICS classes can be patched"
                )

    @property
    def decoder(self) -> Any:
        return self.model.model

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        for index, block in enumerate(self.decoder.gated_cross_attn_layers):
            yield block.cross_attn, functools.partial(_cross_attention, index=index)

    def mlps(self) -> Iterable[nn.Module]:
        return [*super().mlps(), *(block.mlp for block in self.decoder.gated_cross_attn_layers)]

    def install_more(self, patch: Patch) -> None:
        patch.set_forward(self.decoder, _run_decoder_layers)

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        decoder = self.decoder
        resampler = [decoder.perceiver_resampler] if self.model.config.use_resampler else []
        return [*super().called_modules, decoder.vision_model, *resampler]

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, 3, height, width) pixels, or (f, patches, width) of the tower, to (f, tokens, width)."""
        decoder = self.model.model
        frames = frames.to(device=self.embedding_weight().device, dtype=self.model.dtype)
        if frames.dim() == 4:
            other_size = tuple(frames.shape[2:]) != self._image_size
            frames = decoder.vision_model(pixel_values=frames, interpolate_pos_encoding=other_size).last_hidden_state
        return decoder.perceiver_resampler(frames) if self.model.config.use_resampler else frames

    @property
    def _image_size(self) -> tuple[int, int]:
        return (self.model.config.vision_config.image_size,) * 2

    def check_inputs(self, inputs: _IdeficsInputs) -> None:
        if inputs.resampled and not self.model.config.use_resampler:
            raise ShapeError(
                "perceiver_embeddings were passed to a model without resampler (config.use_resampler); pass "
                "pixel_values or image_encoder_embeddings"
            )

    def check_new_frames(self, inputs: _IdeficsInputs) -> None:
        frames = inputs.frames
        if frames is None:
            raise ShapeError(f"IDEFICS needs images: pass one of {', '.join(_FRAME_ARGUMENTS)}")
        if frames.dim() == 4 and tuple(frames.shape[2:]) != self._image_size and not inputs.interpolate_pos_encoding:
            raise ShapeError(
                f"pixel_values: images of {tuple(frames.shape[2:])}, but the vision tower was made for "
                f"{self._image_size}; resize them, or pass interpolate_pos_encoding=True"
            )
        self._check_mask(inputs)

    def _check_mask(self, inputs: _IdeficsInputs) -> None:
        mask, note = inputs.image_attention_mask, ", a row for each token of each sample"
        dims = {"samples": inputs.batch, "tokens": inputs.length, "images of a sample": None}
        require_shape("image_attention_mask", None if mask is None else mask.shape, note, **dims)

    def continue_cache(self, inputs: _IdeficsInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Drop the frames of the cache, so that those of this pass are encoded, if a row now continues another sample.

        Beams may continue other beams of their sample. Frames that follow those of the cache leave it as it is.
        """
        if cache_state.visual_kv is None:
            return
        self._check_mask(inputs)
        if not inputs.total_frames or self.appends_frames(inputs, known=False):
            return
        prompt_batch = cache_state.prompt_batch
        images = (inputs.image_attention_mask.shape[2] or 1) - self._images(*cache_state.earlier)
        beams = max(1, prompt_batch * images // inputs.total_frames)
        rows = torch.arange(inputs.batch)
        if inputs.batch != prompt_batch or not torch.equal(inputs.prompt_rows // beams, rows // beams):
            cache_state.drop_frames()

    @staticmethod
    def _images(*states: SequenceParallelCacheState) -> int:
        """Return the number of images of each sample that came with these passes."""
        return sum(state.units_of_sample() for state in states)

    def appends_frames(self, inputs: _IdeficsInputs, known: bool) -> bool:
        """Return whether the mask has columns for the images of the cache, and for these after them.

        Otherwise rows attend to the images that come with the pass, as in the unpatched model.
        """
        state = inputs.cache_state
        if state is None or state.frames is None:
            return False
        further = inputs.image_attention_mask.shape[2] - self._images(*state.earlier, state)
        samples = torch.unique(inputs.prompt_rows // (state.prompt_batch // (state.samples or 1))).numel()
        return further > 0 and inputs.total_frames == further * samples

    def complete_cache(self, inputs: _IdeficsInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        further = inputs.image_attention_mask.shape[2] - self._images(*cache_state.earlier)
        cache_state.samples = inputs.total_frames // further if further else None

    def visibility(self, inputs: _IdeficsInputs, units: int, tokens: int) -> FrameMask:
        visible = inputs.on_host("image_attention_mask")
        assert visible is not None
        state = inputs.cache_state
        if state is not None and state.samples:
            visible = visible[..., inputs.unit_columns]
        return mask_over_samples(visible, tokens, units, inputs.prompt_rows, inputs.prompt_batch)

    def row_facts(self, inputs: _IdeficsInputs, mask: FrameMask) -> dict[str, Tensor]:
        """Return `gate` (B, L), which becomes `cross_attention_gate`: 0 for rows that attend to no image."""
        attends = copy_to_device(mask.any_frame_visible(), self.embedding_weight().device)
        return {"gate": attends.to(self.model.dtype)}

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        if "gate" not in state.row_facts:
            raise ShapeError(f"IDEFICS needs images: none of {', '.join(_FRAME_ARGUMENTS)} holds one")
        return super().run_decoder(embeds, positions, mask, cache, state, return_dict=True, **kwargs)

    def model_output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: _IdeficsInputs) -> Any:
        """Add `image_hidden_states` if this process has all of them; transformers 5.24 has `image_outputs` instead."""
        output = super().model_output(out, features, inputs)
        has_all = self.context.comm.size == 1 and inputs.visual_shard is None and inputs.total_frames > 0
        if features is not None and has_all and "image_hidden_states" in {field.name for field in fields(output)}:
            output.image_hidden_states = features.unflatten(0, (-1, inputs.image_attention_mask.shape[2]))
        return output

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        image_encoder_embeddings: Tensor | None = None,
        perceiver_embeddings: Tensor | None = None,
        image_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
    ) -> _IdeficsInputs:
        given = [x for x in (pixel_values, image_encoder_embeddings, perceiver_embeddings) if x is not None]
        frames = given[0] if given else None
        if frames is not None and text["visual_shard"] is None and frames.dim() > (3 if pixel_values is None else 4):
            frames = frames.flatten(0, 1)  # (B, I, ...); since transformers 5.24, features may come as one list
        from_tower = image_encoder_embeddings is not None and not self.model.config.use_resampler
        names = ("attention_mask", "position_ids", "input_ids", "inputs_embeds")
        return _IdeficsInputs(
            **text | {"position_ids": _positions(*(text[name] for name in names)), "detects_packing": False},
            frames=frames,
            frames_are_features=from_tower or perceiver_embeddings is not None,
            pixels_and_features=len(given) > 1,
            compared_tensors=as_compared_tensors(
                image_attention_mask=None if image_attention_mask is None else image_attention_mask.bool()
            ),
            compare_frames=pixel_values is not None,
            image_attention_mask=image_attention_mask,  # type: ignore[arg-type]
            interpolate_pos_encoding=bool(interpolate_pos_encoding),
            resampled=perceiver_embeddings is not None,
        )


def _positions(mask: Tensor | None, positions: Tensor | None, ids: Tensor | None, embeds: Tensor | None) -> Any:
    """Return rotary positions that count real tokens only, as the unpatched model derives them from the mask."""
    text = ids if ids is not None else embeds
    if positions is not None or mask is None or text is None or mask.dim() != 2:
        return positions
    counted = mask.long().cumsum(-1) - 1
    return counted.masked_fill(mask == 0, 1)[:, -text.shape[1] :]
