"""Qwen3-VL (transformers `Qwen3VLForConditionalGeneration`): the names of its classes, and deepstack.

The vision tower returns features of several of its layers besides the last one. Each is added to the hidden states of
the visual tokens after one of the first decoder layers. They travel with the embeddings, in one exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import VisualTokens

from ..qwen_vl import QwenVLFamily
from ..qwen_vl_chat import QwenVLChats
from .sizes import model_sizes


class Qwen3VLChats(QwenVLChats):
    """`Qwen3VLProcessor` and `Qwen3VLForConditionalGeneration`."""

    budget_of_video = True


class Qwen3VLFamily(QwenVLFamily):
    """Qwen3-VL."""

    name = "Qwen3-VL (dense)"
    model_class = "Qwen3VLForConditionalGeneration"
    package = "transformers.models.qwen3_vl."
    processors = ("Qwen3VLProcessor",)
    chat = Qwen3VLChats
    model_types = ("qwen3_vl",)
    model_sizes = staticmethod(model_sizes)
    packs_by_positions = True

    @property
    def deepstack(self) -> int:  # type: ignore[override]
        return len(self.model.config.vision_config.deepstack_visual_indexes)

    def embeddings_of(self, out: Any) -> Tensor:
        return torch.cat([out.pooler_output, *out.deepstack_features], -1)

    def further_embeddings(self, embeds: Tensor, further: list[VisualTokens]) -> dict[str, Any]:
        if not further:
            return {}
        mask = further[0].mask(*embeds.shape[:2])
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": [tokens.embeddings for tokens in further]}
