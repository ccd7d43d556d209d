"""The names of the package and the modules that define them; `__init__.py` reads this file."""

from mllm_seqpar.processors.mplug_owl3.image_processing import MPlugOwl3ImageProcessor as MPlugOwl3ImageProcessor
from mllm_seqpar.processors.mplug_owl3.processing import MPlugOwl3Processor as MPlugOwl3Processor

from .configuration import MPlugOwl3Config as MPlugOwl3Config
from .hyper_attention import HyperAttention as HyperAttention
from .hyper_attention import HyperDecoderLayer as HyperDecoderLayer
from .hyper_attention import VisualInputs as VisualInputs
from .media import MediaLayout as MediaLayout
from .media import media_layout as media_layout
from .modeling import MPlugOwl3ForConditionalGeneration as MPlugOwl3ForConditionalGeneration
