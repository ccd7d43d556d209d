"""mPLUG-Owl3 (https://arxiv.org/abs/2408.04840) for transformers 5, loaded from its published checkpoints.

Importing this package registers the model with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from .configuration import MPlugOwl3Config
from .hyper_attention import HyperAttention, HyperDecoderLayer
from .image_processing import MPlugOwl3ImageProcessor
from .media import MediaLayout, media_layout
from .modeling import MPlugOwl3ForConditionalGeneration
from .processing import MPlugOwl3Processor
from .visual_inputs import VisualCache, VisualInputs

__all__ = ["MPlugOwl3Config", "MPlugOwl3ForConditionalGeneration", "MPlugOwl3ImageProcessor", "MPlugOwl3Processor"]
__all__ += ["HyperAttention", "HyperDecoderLayer", "MediaLayout", "VisualCache", "VisualInputs"]
__all__ += ["media_layout", "register"]


def register() -> None:
    """Register `mplugowl3` with transformers' Auto classes. Repeated calls change nothing."""
    AutoConfig.register(MPlugOwl3Config.model_type, MPlugOwl3Config, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText):
        auto.register(MPlugOwl3Config, MPlugOwl3ForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(MPlugOwl3Config, MPlugOwl3Processor, exist_ok=True)


register()
