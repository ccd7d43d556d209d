"""Masks as rules over frames and tokens, cut into tiles; see `mllm_seqpar.masks.rectangles`."""

from .causal import CausalBlocks
from .frame_mask import FrameBlocks, FrameMask
from .rectangles import Blocks, FullBlocks, GivenBlock, Tile, clip_rows, full_tile
from .row_subset import Rows

__all__ = [
    "Blocks",
    "CausalBlocks",
    "FrameBlocks",
    "FrameMask",
    "FullBlocks",
    "GivenBlock",
    "Rows",
    "Tile",
    "clip_rows",
    "full_tile",
]
