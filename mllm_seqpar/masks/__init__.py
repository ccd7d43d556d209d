"""Masks as rules over frames and tokens, cut into tiles; see `mllm_seqpar.masks.tiles`."""

from .causal import CausalBlocks
from .frame import FrameBlocks, FrameMask
from .rows import Rows
from .tiles import Blocks, FullBlocks, GivenBlock, Tile, clip_rows, full_tile

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
