"""The names of the package and the modules that define them; `__init__.py` reads this file."""

from mllm_seqpar.processors.video_mllama.processing import VideoMllamaProcessor as VideoMllamaProcessor

from .configuration import VideoMllamaConfig as VideoMllamaConfig
from .modeling import VideoMllamaForConditionalGeneration as VideoMllamaForConditionalGeneration
