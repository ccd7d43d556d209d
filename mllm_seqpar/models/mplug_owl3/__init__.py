"""mPLUG-Owl3 (https://arxiv.org/abs/2408.04840) for transformers 5, loaded from its published checkpoints.

Names load on first use, so that `models.auto_classes` imports the configuration without the model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import MPlugOwl3Config
    from .hyper_attention import HyperAttention, HyperDecoderLayer
    from .image_processing import MPlugOwl3ImageProcessor
    from .media import MediaLayout, media_layout
    from .modeling import MPlugOwl3ForConditionalGeneration
    from .processing import MPlugOwl3Processor
    from .visual_inputs import VisualCache, VisualInputs

__all__ = ["MPlugOwl3Config", "MPlugOwl3ForConditionalGeneration", "MPlugOwl3ImageProcessor", "MPlugOwl3Processor"]
__all__ += ["HyperAttention", "HyperDecoderLayer", "MediaLayout", "VisualCache", "VisualInputs", "media_layout"]

_DEFINED_IN = {
    "HyperAttention": "hyper_attention",
    "HyperDecoderLayer": "hyper_attention",
    "MPlugOwl3Config": "configuration",
    "MPlugOwl3ForConditionalGeneration": "modeling",
    "MPlugOwl3ImageProcessor": "image_processing",
    "MPlugOwl3Processor": "processing",
    "MediaLayout": "media",
    "VisualCache": "visual_inputs",
    "VisualInputs": "visual_inputs",
    "media_layout": "media",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
