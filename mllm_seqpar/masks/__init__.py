"""Masks as rules over frames and tokens, cut into tiles; see `mllm_seqpar.masks.tiles`."""

from .causal import CausalBlocks
from .frame import FrameBlocks, FrameMask
from .tiles import Blocks, FullBlocks, Tile, clip_rows, full_tile

__all__ = ["Blocks", "CausalBlocks", "FrameBlocks", "FrameMask", "FullBlocks", "Tile", "clip_rows", "full_tile"]
