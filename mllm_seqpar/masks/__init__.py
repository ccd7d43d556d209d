"""Masks over frames and tokens, as one interval of keys for each row; see `mllm_seqpar.masks.intervals`."""

from .block_masks import BlockMasks, HeldKeys, RowSubset
from .frame_mask import FrameMask
from .intervals import BlockMask, Intervals

__all__ = ["BlockMask", "BlockMasks", "FrameMask", "HeldKeys", "Intervals", "RowSubset"]
