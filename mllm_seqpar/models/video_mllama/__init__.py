"""MOSS-Video-Preview (https://github.com/OpenMOSS/MOSS-Video-Preview) for transformers 5: Llama 3.2 Vision for video.

Names load on first use, so that `models.auto_classes` imports the configuration without the model.
"""

from mllm_seqpar._lazy_names import lazy_names

__all__ = lazy_names(__name__, __file__)
