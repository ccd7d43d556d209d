"""mPLUG-Owl3 (https://arxiv.org/abs/2408.04840) for transformers 5, loaded from its published checkpoints.

Names load on first use, so that `models.auto_classes` imports the configuration without the model.
"""

from typing import TYPE_CHECKING

from mllm_seqpar._lazy_names import lazy_names

if TYPE_CHECKING:
    from .configuration import MPlugOwl3Config
    from .hyper_attention import HyperAttention, HyperDecoderLayer, VisualInputs
    from .image_processing import MPlugOwl3ImageProcessor
    from .media import MediaLayout, media_layout
    from .modeling import MPlugOwl3ForConditionalGeneration
    from .processing import MPlugOwl3Processor

__all__ = ["MPlugOwl3Config", "MPlugOwl3ForConditionalGeneration", "MPlugOwl3ImageProcessor", "MPlugOwl3Processor"]
__all__ += ["HyperAttention", "HyperDecoderLayer", "MediaLayout", "VisualInputs", "media_layout"]

lazy_names(
    __name__,
    {
        "HyperAttention": "hyper_attention",
        "HyperDecoderLayer": "hyper_attention",
        "MPlugOwl3Config": "configuration",
        "MPlugOwl3ForConditionalGeneration": "modeling",
        "MPlugOwl3ImageProcessor": "image_processing",
        "MPlugOwl3Processor": "processing",
        "MediaLayout": "media",
        "VisualInputs": "hyper_attention",
        "media_layout": "media",
    },
)
