"""MOSS-Video-Preview (`mllm_seqpar.models.video_mllama`): Llama 3.2 Vision whose frames have positions.

A frame is an image of one tile, and the units of masks are frames. Queries and keys are rotated: each rank rotates its
rows by their positions, and the keys of its frames by the positions of these, before their norm. What a row may attend
to, and what a row that sees no frame does, is as in `patches.mllama`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.adapting import (
    ForwardState,
    KVProjection,
    Spans,
    as_compared_tensors,
    copy_to_device,
    merge_heads,
    refuse_dropout,
    split_heads,
    take_spans,
)
from mllm_seqpar.models.video_mllama.modeling import Rotation, check_frame_positions, rotated, rotated_keys

from .mllama import MllamaFamily, MllamaInputs, cross_attentions


def _cross_attention(
    self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState, query_rotation: Rotation, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from this rank's rows (B, s, C) to the frames of all ranks; return (B, s, C) and no weights."""
    refuse_dropout(self.dropout if self.training else 0.0)
    q = rotated(self.q_norm(split_heads(self.q_proj(hidden_states), self.head_dim)), query_rotation)
    project = KVProjection(
        (self.k_proj, self.v_proj), self.head_dim, key_norm=self.k_norm, rotate=rotated_keys, rotates_first=True
    )
    o = seqpar.attend(q, [seqpar.frame_keys(q, self.layer_idx, project)], self.scaling)
    return self.o_proj(merge_heads(o)), None


@dataclass(frozen=True, kw_only=True)
class VideoMllamaInputs(MllamaInputs):
    """The inputs of one pass, with the positions of its frames: (B, images of a sample), or None."""

    vision_position_ids: Tensor | None

    def check(self) -> None:
        """Raise ShapeError or MaskError if frames, their positions and the text do not fit together."""
        super().check()
        if self.total_frames and self.vision_position_ids is not None:
            check_frame_positions(self.vision_position_ids, self.samples, self.total_frames // self.samples)


class VideoMllamaFamily(MllamaFamily):
    """MOSS-Video-Preview. A frame is an image of one tile, and a unit is a frame."""

    name = "MOSS-Video-Preview"
    model_class = "VideoMllamaForConditionalGeneration"
    package = "mllm_seqpar.models.video_mllama."
    parts = MllamaFamily.parts | {"projector": ("model.multi_modal_projector", "model.patch_merger")}
    visual_arguments = (*MllamaFamily.visual_arguments, "vision_position_ids")
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that the frames passed are only this rank's of
        `visual_shard.total`, all samples' frames (padding frames included) in one list: `pixel_values` (f, 1, channels,
        height, width), `aspect_ratio_ids` (f,), `aspect_ratio_mask` (f, 1), or `cross_attention_states` (f, tokens,
        width). `vision_position_ids` (B, frames of a sample) are those of all frames, on every rank.
        `visual_samples` is passed by `generate` with beams: the number of samples that the frames belong to.
"""

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        return ((module, _cross_attention) for module in cross_attentions(self.decoder))

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The tower calls its layers and its tables of embeddings one by one."""
        inner = self.model.model
        tower, merger = inner.vision_model, inner.patch_merger
        places = tower.gated_positional_embedding
        tables = [tower.pre_tile_positional_embedding, tower.post_tile_positional_embedding, places]
        layers = [*tower.transformer.layers, *tower.global_transformer.layers]
        parts = [*(table.embedding for table in tables[:2]), places.tile_embedding, *layers]
        return [*super().called_modules, *parts, *([] if merger is None else [merger])]

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, 1, 3, height, width) to (f, tokens, C).

        The extras are the aspect ratio ids (f,), and the aspect ratio mask, which has no effect.
        """
        return self.model.model.encode_frames(frames[None], extras[0][None])

    def blank_frame(self) -> tuple[Tensor, ...]:
        frames, ids, ratio_mask = super().blank_frame()
        return frames[:, :1], ids, ratio_mask[:, :1]

    def check_inputs(self, inputs: MllamaInputs) -> None:
        inputs.check()  # without a mask, the unpatched model attends to the same frames

    def unit_index(self, inputs: Any, frames: Spans) -> Tensor:
        """Return the rotations of the frames, (units, 2, head_dim), for all layers.

        Without positions, the frames of each sample are counted, those of the cache first.
        """
        weight, state = self.embedding_weight(), inputs.cache_state
        if not inputs.total_frames:  # the empty frame
            positions = torch.zeros(1, 1, dtype=torch.long)
        elif inputs.vision_position_ids is None:
            seen = 0 if state is None or state.frames is None else state.frames.total_frames // inputs.samples
            positions = torch.arange(seen, seen + inputs.total_frames // inputs.samples).expand(inputs.samples, -1)
        else:
            positions = inputs.vision_position_ids.expand(inputs.samples, -1)
        positions = positions.reshape(1, -1)  # of all ranks: frequencies may depend on the largest
        if positions.device != weight.device:
            positions = copy_to_device(positions, weight.device)
        return take_spans(torch.cat(self.decoder.rotary_emb(weight, positions)).transpose(0, 1), frames)

    def target_weights(self, targets: Tensor) -> Tensor | None:
        return self.model.target_weights(targets)

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        visual_samples: int | None = None,
        vision_position_ids: Tensor | None = None,
    ) -> VideoMllamaInputs:
        if aspect_ratio_mask is None and aspect_ratio_ids is not None:
            aspect_ratio_mask = torch.ones_like(aspect_ratio_ids)[..., None]
        images = (pixel_values, (aspect_ratio_ids, aspect_ratio_mask), cross_attention_states)
        fields = self.input_fields(text, *images, cross_attention_mask, visual_samples)
        fields["compared_tensors"] |= as_compared_tensors(vision_position_ids=vision_position_ids)
        return VideoMllamaInputs(**fields, vision_position_ids=vision_position_ids)
