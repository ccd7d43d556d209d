"""mPLUG-Owl3 (`mllm_seqpar.models.mplug_owl3`): its sites, what its rows may attend to, its forward and chats.

Sites: the model's forward; the attention of every decoder layer. The attention of hyper layers also attends to frames.

Shape legend: B samples, L text tokens, s of them on this rank, f frames of this rank, H heads, D head_dim, C = H * D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mllm_seqpar.adapting import (
    AdapterError,
    ChatFamily,
    ChatText,
    ConfigError,
    DataError,
    Family,
    ForwardInputs,
    ForwardState,
    FrameMask,
    FrameShard,
    FrameSource,
    ImageListSource,
    ImageTensorSource,
    Messages,
    SeqParContext,
    SequenceParallelCacheState,
    ShapeError,
    as_compared_tensors,
    check_range,
    copy_to_device,
    media_of,
    merge_heads,
    model_attention,
    refuse_dropout,
    takes_cache,
)
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention
from mllm_seqpar.models.mplug_owl3.media import MediaLayout, check_layout, crop_frames

_ENDS = ("<|im_end|>", "<|endoftext|>")


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
        found = super().read_by_host()
        if self.media_layout is None and not (self.past_length and self.frames is None):
            given = {"input_ids": self.input_ids, "position_ids": self.position_ids}
            found |= {name: x for name, x in given.items() if x is not None}
        return found


@dataclass(frozen=True)
class CutImageSource(FrameSource):
    """The tiles of a still image as frames: the grid row by row, then the whole image.

    Attributes:
        image: the image.
        grid: (rows, columns).
        image_processor: cuts the image into tiles of its own image size, which need no further resizing.
    """

    image: ImageListSource | ImageTensorSource
    grid: tuple[int, int]
    image_processor: Any = field(compare=False)

    def __len__(self) -> int:
        return self.grid[0] * self.grid[1] + 1

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each tile."""
        return [(self.image_processor.image_size,) * 2] * len(self)

    @property
    def name(self) -> str:
        return self.image.name

    def key(self) -> str:
        return f"{self.image.key()} {self.grid}"

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield tiles start <= i < stop, as uint8 tensors (at most `batch`, 3, S, S)."""
        check_range(start, stop, len(self), batch)
        if size not in (None, self.sizes()[0]):
            raise ConfigError(f"size is {size}; tiles of an image are {self.sizes()[0]}: leave size out")
        if start < stop:
            (image,) = next(self.image.read(0, 1))
            yield from self.image_processor.tiles(image, self.grid)[start:stop].split(batch)


class MPlugOwl3Chats(ChatFamily):
    """The chat format of `MPlugOwl3Processor`, whose `encode` tokenizes chats without their frames; of models with
    `encode_frames`."""

    processors = ("MPlugOwl3Processor",)
    marks = ("<|image|>", "<|video|>", "<|im_start|>", "<|im_end|>")
    feature_weights = ("vision_model.", "vision2text_model.")
    tower = ("vision_model", "penultimate")
    always_sharded = False

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """Tokenize conversations by the processor's `encode`; `media_offset` is among the extras."""
        pairs = [
            pair for messages, sources in zip(conversations, media, strict=True) for pair in media_of(messages, sources)
        ]
        grids = [_grid(source) for kind, source in pairs if kind == "image"]
        encoded = self.processor.encode(
            conversations,
            frames_per_video=[len(source) for kind, source in pairs if kind == "video"],
            **({"image_grids": grids} if grids else {}),
            add_generation_prompt=add_generation_prompt,
            return_labels=labels,
            padding_side=padding_side,
        )
        return ChatText(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            labels=encoded["labels"] if labels else None,
            slots=range(sum(len(source) for sources in media for source in sources)),
            extras={"media_offset": encoded["media_offset"]},
        )

    def check(self, model: Any) -> None:
        """Raise AdapterError for a model that cannot encode frames."""
        if not hasattr(model, "encode_frames"):
            raise AdapterError(
                f"{type(model).__name__} with a {type(self.processor).__name__}: it has no method encode_frames, so "
                "frames cannot be encoded; if it is of another family, copy the processor files of that family into "
                "the model directory"
            )

    def arguments(self, text: ChatText) -> dict[str, Tensor]:
        """Return the text arguments, without `media_offset` if there are no frames."""
        arguments = super().arguments(text)
        if not text.slots:
            del arguments["media_offset"]
        return arguments

    def still_frames(self, image: ImageListSource | ImageTensorSource) -> FrameSource:
        if not getattr(self.processor, "cut_enable", False):
            return image
        (size,) = image.sizes()
        return CutImageSource(image, self.processor.image_grid(*size), self.processor.image_processor)

    def generation(self, model: Any) -> dict[str, Any]:
        """Return the tokens that end an answer as published, and the padding token 0."""
        vocabulary = self.tokenizer.get_vocab()
        ends = [vocabulary[mark] for mark in _ENDS if mark in vocabulary]
        return {"eos_token_id": ends, "pad_token_id": 0} if ends else {}

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return (n, 3, S, S)."""
        return (self.processor.image_processor(frames)["pixel_values"],)

    def blank(self) -> tuple[Tensor, ...]:
        """Return a black image."""
        return self.pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))

    def tower_states(self, output: Tensor) -> Tensor:
        return output

    def tower_output(self, states: Tensor) -> Tensor:
        return states

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {"image_embeds": features, "visual_shard": shard}


def _grid(source: FrameSource) -> tuple[int, int] | None:
    """Return the grid that an image is cut into, or None for an image that is one frame."""
    grid = getattr(source, "grid", None)
    if grid is None and len(source) != 1:
        raise DataError(f"an image was given {len(source)} frames; pass one image, or show several as a video")
    return grid


class MPlugOwl3Family(Family[Any]):
    """The native mPLUG-Owl3, all published generations. Every frame has a rotary position."""

    name = "mPLUG-Owl3"
    model_class = "MPlugOwl3ForConditionalGeneration"
    package = "mllm_seqpar.models.mplug_owl3."
    chat = MPlugOwl3Chats
    parts = {"vision": ("vision_model",), "projector": ("vision2text_model",), "language": ("language_model",)}
    frame_arguments = ("pixel_values", "image_embeds")
    frame_layout = "zigzag"

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        hyper_layers = {number - 1 for number in model.config.hyper_layers}
        for index, layer in enumerate(model.language_model.model.layers):
            # A wrapper that passes on attributes (PEFT's modules_to_save) contains the attention.
            found = any(isinstance(module, HyperAttention) for module in layer.self_attn.modules())
            if found is not (index in hyper_layers):
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
        return ((layers[number - 1].self_attn, _hyper_attention) for number in self.model.config.hyper_layers)

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The modules within the tower are called one by one. A model that only takes features has no tower."""
        tower = self.model.vision_model
        parts = [] if tower is None else [tower.embeddings, *tower.encoder.layers]
        return [*super().called_modules, *parts, self.model.vision2text_model]

    @property
    def frame_modules(self) -> Iterable[nn.Module | None]:
        """Hyper attention also computes with text."""
        found: list[nn.Module | None] = self.model.frame_modules
        return found

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, 3, height, width) to (f, tokens, hidden)."""
        return self.model.encode_frames(frames)

    def check_new_frames(self, inputs: _MPlugOwl3Inputs) -> None:
        _ = inputs.layout  # raises if the frames do not fit the text

    def unit_index(self, inputs: _MPlugOwl3Inputs, units: int) -> Tensor:
        """Return the rotations of the frames by their positions, (units, 2, head_dim), for all layers."""
        index = inputs.layout.frame_position if inputs.total_frames else super().unit_index(inputs, units)
        attention = self.decoder.layers[self.model.config.hyper_layers[0] - 1].self_attn
        return attention.visual_rotation(copy_to_device(index, self.embedding_weight().device))

    def visibility(self, inputs: _MPlugOwl3Inputs, units: int, tokens: int) -> FrameMask:
        state = inputs.cache_state
        layout = inputs.layout if state is None else state.media_layout
        assert layout is not None
        first, stop = (x[inputs.prompt_rows] for x in layout.rows(inputs.past_length, inputs.length))
        return FrameMask.from_intervals(first, stop, tokens, units)

    def row_facts(self, inputs: ForwardInputs, mask: FrameMask) -> dict[str, Tensor]:
        return {"attends_to_frames": copy_to_device(mask.any_frame_visible(), self.embedding_weight().device)}

    def check_inputs(self, inputs: ForwardInputs) -> None:
        width = self.model.config.hidden_size
        if inputs.frames is not None and inputs.frames_are_features and inputs.frames.shape[2:] != (width,):
            raise ShapeError(
                f"image_embeds has shape {tuple(inputs.frames.shape)}; expected (frames, tokens, {width}), the frames "
                "of all samples one after another"
            )

    def continue_cache(self, inputs: ForwardInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Remove the frames whose text was cropped from the cache, as the native model does."""
        crop_frames(cache_state, inputs.past_length, inclusive=self.model.config.gate is None)
        if cache_state.media_layout is not None:
            cache_state.media_layout = cache_state.media_layout.to("cpu")  # the native model leaves it on its device

    def complete_cache(self, inputs: _MPlugOwl3Inputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        cache_state.media_layout = inputs.layout

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
