"""The sizes of a model for the planner. This module needs no torch."""

from mllm_seqpar.planner.model_sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes

__all__ = ["CrossAttentionSizes", "ModelSizes", "ResamplerSizes", "TextSizes", "VisionSizes"]
