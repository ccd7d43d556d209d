from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from .configuration import MPlugOwl3Config
from .modeling import MPlugOwl3ForConditionalGeneration
from .processing import MPlugOwl3Processor


def register() -> None:
    """Makes `mplugowl3` known to transformers' Auto classes. Doing it again changes nothing."""
    AutoConfig.register(MPlugOwl3Config.model_type, MPlugOwl3Config, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText):
        auto.register(MPlugOwl3Config, MPlugOwl3ForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(MPlugOwl3Config, MPlugOwl3Processor, exist_ok=True)
