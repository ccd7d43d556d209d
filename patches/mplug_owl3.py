"""mPLUG-Owl3 (`mllm_seqpar.models.mplug_owl3`): its sites, what its rows may attend to, its forward and chats.

Sites: the model's forward; the attention of every decoder layer. The attention of hyper layers also attends to frames.

Shape legend: B samples, L text tokens, s of them on this rank, f frames of this rank, H heads, D head_dim, C = H * D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mllm_seqpar.adapting import (
    AdapterError,
    Family,
    ForwardInputs,
    ForwardState,
    FrameMask,
    SeqParContext,
    SequenceParallelCacheState,
    Spans,
    as_compared_tensors,
    copy_to_device,
    merge_heads,
    model_attention,
    refuse_dropout,
    require_shape,
    take_spans,
    takes_cache,
)
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention
from mllm_seqpar.models.mplug_owl3.media import MediaLayout, brings_frames, check_layout, crop_layout


@takes_cache
def _hyper_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    visual: Any = None,
    *,
    visual_norm: nn.Module,
    seqpar: ForwardState,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the layer of the native model, whose rows attend to the text and to the frames of all ranks."""
    refuse_dropout(self._dropout)
    q, k, v = self.project(hidden_states, position_embeddings, cache)
    text = seqpar.text_keys(
        q, k, v, window=self.sliding_window, mask=attention_mask, model_attention=model_attention(self)
    )
    if seqpar.frames is None:
        return self.o_proj(merge_heads(seqpar.attend(q, [text], self.scaling))), None
    frames = seqpar.frame_keys(q, self.layer_idx, self.visual_projection(visual_norm))
    if self.fused:
        return self.o_proj(merge_heads(seqpar.attend(q, [text, frames], self.scaling))), None
    text_out, visual_out = map(merge_heads, seqpar.attend_each(q, [[text], [frames]], self.scaling))
    return self.o_proj(self.mix(text_out, visual_out, seqpar.row_facts["attends_to_frames"])), None


@dataclass(frozen=True, kw_only=True)
class _MPlugOwl3Inputs(ForwardInputs):
    model: Any
    media_offset: Any
    media_layout: MediaLayout | None

    @functools.cached_property
    def layout(self) -> MediaLayout:
        """The frames of this pass that each row may attend to, on the CPU; raises what the unpatched model raises."""
        if self.media_layout is None:
            positions = self.on_host("position_ids")
            if positions is None:
                positions = torch.arange(self.past_length, self.past_length + self.length)[None]
            offset = self.media_offset
            if isinstance(offset, Tensor):
                offset = self.on_host("media_offset")
            elif offset is not None:
                listed = enumerate(offset)
                offset = [self.on_host(f"media_offset {i}") if isinstance(x, Tensor) else x for i, x in listed]
            where = {"input_ids": self.on_host("input_ids"), "media_offset": offset, "position_ids": positions}
            return replace(self.model.media_layout(self.total_frames, **where), past_length=self.past_length)
        check_layout(self.media_layout, self.batch, self.total_frames)
        on_host: dict[str, Any] = {name: self.on_host(name) for name in self.media_layout.tensors}
        return replace(self.media_layout, **on_host)

    def read_by_host(self) -> dict[str, Tensor]:
        """Return further what `layout` is made from, in a pass that makes it."""
        tensors = super().read_by_host()
        if self.media_layout is None and not (self.past_length and self.frames is None):
            tensors |= {} if self.position_ids is None else {"position_ids": self.position_ids}
        return tensors


class LayoutFamily(Family[Any]):
    """Base of the families whose inputs have a `layout`, the `MediaLayout` of the native model.

    It is stored with the frames of a cache as `frame_facts`.
    """

    frame_layout = "zigzag"

    @property
    def placeholder_attends(self) -> bool:
        """Whether a placeholder attends to its own frame."""
        return True

    def check_new_frames(self, inputs: Any) -> None:
        _ = inputs.layout  # raises if the frames do not fit the text

    def appends_frames(self, inputs: Any, known: bool) -> bool:
        """Return whether the text of this pass has placeholders, or the cache does not have these frames."""
        return brings_frames(known, inputs.on_host("input_ids"), self.model.config.image_token_id)

    def row_facts(self, inputs: ForwardInputs, mask: FrameMask) -> dict[str, Tensor]:
        return {"attends_to_frames": copy_to_device(mask.any_frame_visible(), self.embedding_weight().device)}

    def continue_cache(self, inputs: ForwardInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Remove the frames whose text was cropped from the cache, as the native model does."""
        crop_layout(cache_state, inputs.past_length, inclusive=self.placeholder_attends)
        if cache_state.frame_facts is not None:
            cache_state.frame_facts = cache_state.frame_facts.to("cpu")  # the native model leaves it on its device

    def complete_cache(self, inputs: Any, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        if inputs.total_frames:
            cache_state.frame_facts = inputs.layout


class MPlugOwl3Family(LayoutFamily):
    """The native mPLUG-Owl3, all published generations. Every frame has a rotary position."""

    name = "mPLUG-Owl3"
    model_class = "MPlugOwl3ForConditionalGeneration"
    package = "mllm_seqpar.models.mplug_owl3."
    parts = {"vision": ("vision_model",), "projector": ("vision2text_model",), "language": ("language_model",)}
    frame_arguments = ("pixel_values", "image_embeds")

    @property
    def placeholder_attends(self) -> bool:
        return bool(self.model.config.gate is None)

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        hyper_layers = {number - 1 for number in model.config.hyper_layers}
        for index, layer in enumerate(model.language_model.model.layers):
            # A wrapper that passes on attributes (PEFT's modules_to_save) contains the attention.
            is_hyper = any(isinstance(module, HyperAttention) for module in layer.self_attn.modules())
            if is_hyper is not (index in hyper_layers):
                raise AdapterError(
                    f"layer {index} has {type(layer.self_attn).__name__}, but config.hyper_layers is "
                    f"{model.config.hyper_layers} (counted from 1)"
                )

    @property
    def decoder(self) -> Any:
        return self.model.language_model.model

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        """Return the attention of hyper layers, to text and frames."""
        layers = self.decoder.layers
        return [(layers[number - 1].self_attn, _hyper_attention) for number in self.model.config.hyper_layers]

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The modules within the tower are called one by one. A model that only takes features has no tower."""
        tower = self.model.vision_model
        parts = [] if tower is None else [tower.embeddings, *tower.encoder.layers]
        return [*super().called_modules, *parts, self.model.vision2text_model]

    @property
    def frame_modules(self) -> Iterable[nn.Module | None]:
        """Hyper attention also computes with text."""
        modules: list[nn.Module | None] = self.model.frame_modules
        return modules

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, 3, height, width) to (f, tokens, hidden)."""
        return self.model.encode_frames(frames)

    def unit_index(self, inputs: _MPlugOwl3Inputs, frames: Spans) -> Tensor:
        """Return the rotations of the frames by their positions, (units, 2, head_dim), for all layers."""
        index = inputs.layout.frame_position if inputs.total_frames else torch.zeros(1, dtype=torch.long)
        attention = self.decoder.layers[self.model.config.hyper_layers[0] - 1].self_attn
        return attention.visual_rotation(copy_to_device(take_spans(index, frames), self.embedding_weight().device))

    def appends_frames(self, inputs: _MPlugOwl3Inputs, known: bool) -> bool:
        given = inputs.media_layout
        return (given is not None and given.past_length == inputs.past_length) or super().appends_frames(inputs, known)

    def visibility(self, inputs: _MPlugOwl3Inputs, units: int, tokens: int) -> FrameMask:
        state = inputs.cache_state
        layout = inputs.layout if state is None else state.frame_facts
        assert layout is not None
        rows = inputs.prompt_rows
        first, stop = [x[rows] for x in layout.rows(inputs.past_length, inputs.length)]
        return FrameMask.from_intervals(first, stop, tokens, units)

    def check_inputs(self, inputs: ForwardInputs) -> None:
        if inputs.frames is not None and inputs.frames_are_features:
            width = self.model.config.hidden_size
            require_shape("image_embeds", inputs.frames.shape, frames=None, tokens=None, width=width)

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_offset: Any = None,
        media_layout: MediaLayout | None = None,
    ) -> _MPlugOwl3Inputs:
        layout = {} if media_layout is None else media_layout.tensors
        return _MPlugOwl3Inputs(
            **text,
            frames=pixel_values if pixel_values is not None else image_embeds,
            frames_are_features=image_embeds is not None,
            pixels_and_features=pixel_values is not None and image_embeds is not None,
            compared_tensors=as_compared_tensors(media_offset=media_offset, **layout),
            model=self.model,
            media_offset=media_offset,
            media_layout=media_layout,
        )
