"""Qwen2.5-VL (transformers `Qwen2_5_VLForConditionalGeneration`): the names of its classes, and its masks.

Its layers may have windows of two kinds, so its decoder takes one mask for each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mllm_seqpar.adapting.transformers import causal_mask

from ..qwen_vl import QwenVLFamily
from ..qwen_vl_chat import QwenVLChats
from .sizes import model_sizes


class Qwen2_5_VLChats(QwenVLChats):
    """`Qwen2_5_VLProcessor` and `Qwen2_5_VLForConditionalGeneration`."""

    passes_times = True


class Qwen2_5_VLFamily(QwenVLFamily):
    """Qwen2.5-VL."""

    name = "Qwen2.5-VL"
    model_class = "Qwen2_5_VLForConditionalGeneration"
    package = "transformers.models.qwen2_5_vl."
    processors = ("Qwen2_5_VLProcessor",)
    chat = Qwen2_5_VLChats
    model_types = ("qwen2_5_vl",)
    model_sizes = staticmethod(model_sizes)
    position_arguments = ("second_per_grid_ts",)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        if isinstance(mask, dict):  # prepared by `generate`
            return mask
        decoder = self.model.model.language_model
        config = decoder.layers[0].self_attn.config  # names the patched attention
        kinds = {"full_attention": False} | ({"sliding_attention": True} if decoder.has_sliding_layers else {})
        return {
            name: causal_mask(config, embeds, mask, positions[0], cache, sliding) for name, sliding in kinds.items()
        }
