"""MOSS-VL (https://arxiv.org/abs/2608.15045) for transformers 5, loaded from its published checkpoints.

Names load on first use, so that `models.auto_classes` imports the configuration without the model.
"""

from typing import TYPE_CHECKING

from mllm_seqpar._lazy_names import lazy_names

if TYPE_CHECKING:
    from .configuration import MossVLConfig, MossVLTextConfig, MossVLVisionConfig
    from .image_processing import MossVLImageProcessor
    from .layout import MossVLLayout, frame_grids, moss_vl_layout
    from .modeling import MossVLForConditionalGeneration
    from .processing import MossVLProcessor

__all__ = ["MossVLConfig", "MossVLForConditionalGeneration", "MossVLImageProcessor", "MossVLProcessor"]
__all__ += ["MossVLLayout", "MossVLTextConfig", "MossVLVisionConfig", "frame_grids", "moss_vl_layout"]

lazy_names(
    __name__,
    {
        "MossVLConfig": "configuration",
        "MossVLForConditionalGeneration": "modeling",
        "MossVLImageProcessor": "image_processing",
        "MossVLLayout": "layout",
        "MossVLProcessor": "processing",
        "MossVLTextConfig": "configuration",
        "MossVLVisionConfig": "configuration",
        "frame_grids": "layout",
        "moss_vl_layout": "layout",
    },
)
