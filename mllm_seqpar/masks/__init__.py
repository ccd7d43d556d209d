"""Masks as rules over frames and tokens, cut into tiles; see `mllm_seqpar.masks.rectangles`."""

from .causal import CausalBlockMasks
from .frame_mask import FrameBlockMasks, FrameMask
from .rectangles import BlockMasks, FullBlockMasks, GivenBlockMask, Rectangle, clip_rows, full_rectangle
from .row_subset import RowSubset

__all__ = [
    "BlockMasks",
    "CausalBlockMasks",
    "FrameBlockMasks",
    "FrameMask",
    "FullBlockMasks",
    "GivenBlockMask",
    "RowSubset",
    "Rectangle",
    "clip_rows",
    "full_rectangle",
]
