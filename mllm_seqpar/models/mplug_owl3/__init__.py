"""mPLUG-Owl3 (https://arxiv.org/abs/2408.04840) for transformers 5, from its published checkpoints.

Importing this package makes the model known to transformers' Auto classes.
"""

from .configuration import MPlugOwl3Config
from .hyper_attention import HyperAttention, HyperDecoderLayer
from .image_processing import MPlugOwl3ImageProcessor
from .media import MediaLayout, media_layout
from .modeling import MPlugOwl3ForConditionalGeneration
from .processing import MPlugOwl3Processor
from .registration import register
from .visual_inputs import VisualCache, VisualInputs

__all__ = [
    "HyperAttention",
    "HyperDecoderLayer",
    "MPlugOwl3Config",
    "MPlugOwl3ForConditionalGeneration",
    "MPlugOwl3ImageProcessor",
    "MPlugOwl3Processor",
    "MediaLayout",
    "VisualCache",
    "VisualInputs",
    "media_layout",
    "register",
]

register()
