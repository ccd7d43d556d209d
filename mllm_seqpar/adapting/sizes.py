"""The sizes of a model for the planner, as a family's `model_sizes(config, name)` returns them."""

from mllm_seqpar.planner.model_sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes
