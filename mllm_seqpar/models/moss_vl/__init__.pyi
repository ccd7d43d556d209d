"""The names of the package and the modules that define them; `__init__.py` reads this file."""

from mllm_seqpar.processors.moss_vl.image_processing import MossVLImageProcessor as MossVLImageProcessor
from mllm_seqpar.processors.moss_vl.processing import MossVLProcessor as MossVLProcessor

from .configuration import MossVLConfig as MossVLConfig
from .configuration import MossVLTextConfig as MossVLTextConfig
from .configuration import MossVLVisionConfig as MossVLVisionConfig
from .layout import MossVLLayout as MossVLLayout
from .layout import frame_grids as frame_grids
from .layout import moss_vl_layout as moss_vl_layout
from .modeling import MossVLForConditionalGeneration as MossVLForConditionalGeneration
