"""Masks over frames and tokens as rules, cut into rectangles; see `mllm_seqpar.masks.rectangles`."""

from .block_masks import BlockMasks, CausalBlockMasks, FullBlockMasks, GivenBlockMask, RowSubset
from .frame_mask import FrameBlockMasks, FrameMask
from .rectangles import Rectangle, clip_rows, full_rectangle

__all__ = [
    "BlockMasks",
    "CausalBlockMasks",
    "FrameBlockMasks",
    "FrameMask",
    "FullBlockMasks",
    "GivenBlockMask",
    "Rectangle",
    "RowSubset",
    "clip_rows",
    "full_rectangle",
]
