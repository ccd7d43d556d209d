"""MOSS-VL (`mllm_seqpar.models.moss_vl`): its sites, what its rows attend to, and its forward.

Sites: the model's forward; the cross-attention of the layers in `cross_attention_layers`, and the self-attention of the
others. All cross-attention layers project K and V from one sequence of features. A frame is an image or a frame of a
video, with the separator after it; its keys are rotated by positions (time, height, width), which follow from the whole
text (`models.moss_vl.layout`).

Shape legend: B samples, L text tokens, s of them on this rank, F frames of all samples and ranks (f on this
rank), C channels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mllm_seqpar.adapting import (
    ForwardInputs,
    ForwardState,
    FrameMask,
    FrameShard,
    FrameSizes,
    SeqParContext,
    SequenceParallelCacheState,
    ShapeError,
    Spans,
    as_compared_tensors,
    copy_to_device,
    decoder_arguments,
    merge_heads,
    refuse_dropout,
    require_shape,
    take_spans,
)
from mllm_seqpar.models.moss_vl.layout import MossVLLayout, frame_grids
from mllm_seqpar.models.moss_vl.modeling import (
    MASK,
    after_text,
    check_appended,
    later_positions,
    next_positions,
)

from .mllama import check_cross_layers, cross_attentions
from .mplug_owl3 import LayoutFamily

GRID, MEDIA, PIXELS, FEATURES = "grid_thw", "media_nums_per_sample", "pixel_values", "visual_embeds"


def _cross_attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, seqpar: ForwardState, **kwargs: Any
) -> Tensor:
    """Attend from this rank's rows (B, s, C) to the frames of all ranks."""
    refuse_dropout(self.dropout)
    q = self.queries(hidden_states, position_embeddings)
    frames = seqpar.frame_keys(q, self.layer_idx, self.visual_projection())
    attended: Tensor = self.o_proj(merge_heads(seqpar.attend(q, [frames], self.scaling)))
    return attended


@dataclass(frozen=True, kw_only=True)
class MossVLInputs(ForwardInputs):
    """The inputs of one pass. `frames` are rows of patches, or features (visual tokens, 1, C).

    Attributes:
        model: computes the layout.
    """

    model: Any

    @property
    def text_position_ids(self) -> Tensor | None:
        """None: the positions of this model separate no packed sequences."""
        return None

    @functools.cached_property
    def grids(self) -> tuple[Tensor | None, list[int]]:
        """(F, 2), height and width of each frame in patches, and the number of frames of each sample."""
        if self.frames is None:
            return None, []
        grid = self.on_host(GRID)
        if grid is None:
            raise ShapeError(f"frames were passed without {GRID}; pass what the processor returns")
        return frame_grids(grid.long(), self.on_host(MEDIA), self.batch)

    @property
    def total_frames(self) -> int:
        grids, _ = self.grids
        return 0 if grids is None else grids.shape[0]

    @functools.cached_property
    def units_per_frame(self) -> int | Tensor:
        """The visual tokens of each frame; without frames, those of the blank one."""
        grids, _ = self.grids
        return 2 if grids is None else self._tokens(grids)

    def _tokens(self, grids: Tensor) -> Tensor:
        """Return the visual tokens of frames, given their height and width in patches (n, 2)."""
        return grids.prod(1) // self.model.config.vision.spatial_merge_size**2 + 1

    @functools.cached_property
    def _passed(self) -> tuple[Tensor, FrameSizes]:
        """(f, 2), height and width in patches of each frame that was passed, and how many rows of `frames` it has."""
        grids, shard = self.grids[0], self.visual_shard
        assert grids is not None
        own = grids if shard is None else take_spans(grids, shard.spans)
        return own, FrameSizes(len(own), self._tokens(own) if self.frames_are_features else own.prod(1))

    def take(self, frames: Spans) -> tuple[Any, ...]:
        """Return the patches of frames, and a list of height and width of each in patches."""
        grids, rows = self._passed
        assert self.frames is not None
        return take_spans(self.frames, rows.units(frames)), take_spans(grids, frames).tolist()

    def blank_frames(self) -> tuple[Any, ...]:
        assert self.frames is not None
        merge = self.model.config.vision.spatial_merge_size
        blank = self.frames.new_zeros(merge**2, self.frames.shape[1]).requires_grad_(self.frames.requires_grad)
        return blank, [[merge, merge]]

    def check_shard(self, shard: FrameShard) -> None:
        if shard.total != self.total_frames:
            raise ShapeError(f"visual_shard: {shard}, but {GRID} has {self.total_frames} frames; give the same number")
        self.check_rows()

    def check_rows(self) -> None:
        """Raise ShapeError unless there is a row for each patch or visual token of the frames that were passed."""
        assert self.frames is not None
        if self.frames.shape[0] != (wanted := self._passed[1]).count():
            name, kind = (FEATURES, "visual tokens") if self.frames_are_features else (PIXELS, "patches")
            raise ShapeError(
                f"{name}: expected {wanted.count()} {kind}, those of {wanted.total} frames in {GRID}, got "
                f"{self.frames.shape[0]}"
            )

    @functools.cached_property
    def layout(self) -> MossVLLayout:
        """The layout of this pass on the CPU, after that of a text without frames in its cache.

        It raises what the unpatched model raises.
        """
        grids, frames = self.grids
        tokens = self.on_host("input_ids")
        if tokens is None:
            tokens = torch.empty(self.batch, self.length, 0)
        state, mask = self.cache_state, self.on_host("attention_mask")
        layout = self.model.layout(
            tokens,
            grids,
            frames,
            attention_mask=mask,
            cross_attention_mask=None if grids is None else self.on_host(MASK),
            position_ids=self.on_host("position_ids"),
            past_length=self.past_length,
            begin=next_positions(state, mask, self.past_length, self.batch, tokens.device),
        )
        return after_text(layout, state, mask, self.batch)

    @functools.cached_property
    def positions(self) -> Tensor:
        """(3, B, L), the rotary positions of the text (time, height, width)."""
        device, shape = self.tokens.device, (3, self.batch, self.length)
        if self.position_ids is not None:
            return self.position_ids.expand(shape)
        if not self.past_length or self.total_frames:
            return copy_to_device(self.layout.positions[:, :, -self.length :], device)
        sizes = self.past_length, self.length, self.batch
        return later_positions(self.cache_state, self.attention_mask, *sizes, device).expand(shape)

    def read_by_host(self) -> dict[str, Tensor]:
        """Return further what `layout` is made from, in a pass that makes it."""
        tensors = super().read_by_host()
        if self.position_ids is not None and not (self.past_length and self.frames is None):
            tensors["position_ids"] = self.position_ids
        return tensors


class MossVLFamily(LayoutFamily):
    """The native MOSS-VL."""

    name = "MOSS-VL"
    model_class = "MossVLForConditionalGeneration"
    package = "mllm_seqpar.models.moss_vl."
    parts = {
        "vision": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
        "projector": ("model.visual.merger", "model.separator_token"),
        "language": ("model.language_model", "lm_head"),
    }
    frame_arguments = (PIXELS, FEATURES)
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that {frames} hold only the rows of this rank's
        frames of `visual_shard.total`, those of all images and videos in the order of their placeholders in the text.
        `grid_thw`, `media_nums_per_sample` and the text are those of all ranks.
"""

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        check_cross_layers(model.model.language_model.layers, model.config.text.cross_attention_layers)

    @property
    def decoder(self) -> Any:
        return self.model.model.language_model

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        return ((module, _cross_attention) for module in cross_attentions(self.decoder))

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        return [*super().called_modules, self.model.model.visual]

    def encode(self, frames: Tensor, *extras: Any) -> Tensor:
        """Encode patches, given a list of height and width of each frame in patches, to (tokens, 1, C)."""
        grids = [[len(list(run)), *size] for size, run in itertools.groupby(extras[0])]
        features: Tensor = self.model.model.encode_frames(frames, torch.tensor(grids))
        return features.unsqueeze(1)

    def blank_frame(self) -> tuple[Any, ...]:
        """Return one black visual token."""
        vision, weight = self.model.config.vision, self.embedding_weight()
        merge, values = vision.spatial_merge_size, vision.in_channels * vision.patch_size**2
        blank = torch.zeros(merge**2, values, device=weight.device, dtype=weight.dtype)
        return blank, [[merge, merge]]

    def check_inputs(self, inputs: MossVLInputs) -> None:
        frames, width = inputs.frames, self.model.config.text.hidden_size
        if frames is not None and inputs.frames_are_features:
            rows = *frames.shape[:1], *frames.shape[2:]  # `inputs` made them (V, 1, C)
            require_shape(FEATURES, rows, visual_tokens=None, width=width)
        elif frames is not None:
            require_shape(PIXELS, frames.shape, patches=None, values=None)

    def check_new_frames(self, inputs: MossVLInputs) -> None:
        layout = inputs.layout  # raises if the frames do not fit the text
        if inputs.appends_frames:
            check_appended(layout, inputs.on_host("input_ids"), self.model.config.image_token_id)
        if inputs.frames is not None and inputs.visual_shard is None:
            inputs.check_rows()  # here, because the check of inputs would read the grids a second time

    def unit_index(self, inputs: MossVLInputs, frames: Spans) -> Tensor:
        """Return (visual tokens, 1, 3), their positions."""
        if not inputs.total_frames:
            return torch.zeros(inputs.sizes.count(frames), 1, 3, dtype=torch.int32)
        return inputs.layout.visual_positions(frames).unsqueeze(1)

    def visibility(self, inputs: MossVLInputs, units: int, tokens: int) -> FrameMask:
        state = inputs.cache_state
        layout: Any = inputs.layout if state is None or inputs.frames is not None else state.frame_facts
        rows = layout.rows(inputs.past_length, inputs.length)
        first, stop = (x[inputs.prompt_rows] for x in rows)
        return FrameMask.from_intervals(first, torch.maximum(first, stop), layout.tokens, layout.total_frames)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        return super().text_mask(embeds, mask, None, cache)  # type: ignore[arg-type]  # nothing is packed

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        rows = None if state.frames is None else state.row_facts["attends_to_frames"]
        arguments = decoder_arguments(embeds, positions, mask, cache, state)
        return self.decoder(**arguments, attends_to_frames=rows, **kwargs)

    def continue_cache(self, inputs: Any, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        if inputs.past_length:
            super().continue_cache(inputs, cache, cache_state)
        else:
            cache_state.frame_facts = inputs.layout  # later tokens of a padded text need it also without frames

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        grid_thw: Tensor | None = None,
        media_nums_per_sample: Any = None,
        cross_attention_mask: Tensor | None = None,
        vision_chunked_length: int | None = None,  # `vision_chunk_size` takes its place
        visual_embeds: Tensor | None = None,
    ) -> MossVLInputs:
        frames, shard = visual_embeds if pixel_values is None else pixel_values, text["visual_shard"]
        if frames is not None and not len(frames) and shard is None:
            frames = None
        if visual_embeds is not None and frames is visual_embeds and frames.dim() == 2:
            frames = frames.unsqueeze(1)
        media = None if media_nums_per_sample is None else torch.as_tensor(media_nums_per_sample)
        given = {GRID: grid_thw, MEDIA: media, MASK: cross_attention_mask} if frames is not None else {}
        return MossVLInputs(
            **text | {"detects_packing": False},
            frames=frames,
            frames_are_features=visual_embeds is not None,
            pixels_and_features=pixel_values is not None and visual_embeds is not None,
            compared_tensors=as_compared_tensors(**given),
            model=self.model.model,
        )
