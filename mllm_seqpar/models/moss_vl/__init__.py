"""MOSS-VL (https://arxiv.org/abs/2608.15045) for transformers 5, loaded from its published checkpoints.

Names load on first use, so that `models.auto_classes` imports the configuration without the model.
"""

from mllm_seqpar._lazy_names import lazy_names

__all__ = lazy_names(__name__, __file__)
