"""Visual features and visibility that the hyper layers of a forward pass share, and the frames of a cache.

Shape legend: B samples, L text tokens of this pass, F frames of all samples, T tokens per frame, G KV heads, D head
dim.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor

from mllm_seqpar.models.cache import SequenceParallelCacheState, cache_state_of
from mllm_seqpar.runtime.frames import VisualKVCache

from .media import MediaLayout

MASK_ELEMENTS = 1 << 24
"""The largest boolean mask (rows x keys) of one block. The s_q x s_kv mask of a long video is never materialised."""

SHORT_RUN = 32
"""More consecutive rows than this with the same interval form a block without a mask."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Rows [start, stop) of one sample, and the frames [first_frame, stop_frame) that at least one of them attends
    to."""

    start: int
    stop: int
    first_frame: int
    stop_frame: int
    uniform: bool
    """Every row attends to all of these frames, so no mask is needed. True for a block without frames."""


class VisualInputs:
    """The visual features and their visibility for each text row; one object for all layers of a forward pass.

    This class is deliberately neither a dataclass nor a pytree: FSDP, checkpointing and device placement traverse
    containers of tensors and would cast or copy the features once per layer.

    Attributes:
        embeds: (F, T, hidden), the output of `vision2text_model`; None while decoding, when K and V are cached.
        cached: the K and V of each hyper layer, projected once at prefill; None in a pass without a cache.
        frame_position: (F,) int64, the rotary position of each frame's keys.
        first, stop: (B, L) int64. A row attends to the frames first <= f < stop, by global number.
    """

    def __init__(
        self,
        layout: MediaLayout,
        rows: tuple[Tensor, Tensor],
        tokens_per_frame: int,
        embeds: Tensor | None = None,
        cached: VisualKVCache | None = None,
    ) -> None:
        self.frame_position, (self.first, self.stop) = layout.frame_position, rows
        self.tokens_per_frame, self.embeds, self.cached = tokens_per_frame, embeds, cached

    @classmethod
    def of_cache(cls, state: SequenceParallelCacheState, past_length: int, length: int, batch: int) -> "VisualInputs":
        """Return the inputs of the `length` tokens that follow `past_length` cached ones, whose frames are cached."""
        (layout, row_offset), visual = state.media_position, state.visual
        assert visual is not None
        device = next(iter(visual.states.values()), (layout.first,))[0].device
        layout = layout.to(device)  # a patched model leaves it on the CPU
        state.media_position = layout, row_offset
        rows = state.rows_of(batch).to(device)
        first, stop = (bound[rows] for bound in layout.rows(past_length - row_offset, length))
        return cls(layout, (first, stop), visual.tokens_per_unit, cached=visual)

    @cached_property
    def has_frames(self) -> Tensor:
        """(B, L) bool: whether a row attends to any frame."""
        return self.stop > self.first

    def keys_of(self, block: RowBlock) -> slice:
        return slice(block.first_frame * self.tokens_per_frame, block.stop_frame * self.tokens_per_frame)

    @cached_property
    def blocks(self) -> list[list[RowBlock]]:
        """The row blocks of each sample, computed once for all hyper layers."""
        bounds = zip(self.first.tolist(), self.stop.tolist(), strict=True)
        return [row_blocks(first, stop, self.tokens_per_frame) for first, stop in bounds]


def cached_frames(cache: Any) -> SequenceParallelCacheState | None:
    """Return the state of a cache that has frames, or None."""
    state = cache_state_of(cache)
    return state if state is not None and state.frames is not None else None


def crop_frames(state: SequenceParallelCacheState, past_length: int, inclusive: bool) -> None:
    """Crop the layout of the frames to the `past_length` tokens that are still in the cache.

    The frames are removed if the text that they came with is no longer in the cache, which was reset or cropped.
    `inclusive` says whether a placeholder attends to its own frame.
    """
    if state.frames is None:
        return
    layout, row_offset = state.media_position
    if past_length <= row_offset:
        state.drop_frames()
    else:
        state.media_position = layout.cropped(past_length - row_offset, inclusive), row_offset


def row_blocks(first: list[int], stop: list[int], tokens_per_frame: int) -> list[RowBlock]:
    """Split the rows of one sample into blocks: long runs of equal rows need no mask, the other masks are bounded.

    Either all rows of a block attend to a frame or none does, so a mask has no empty row, for which kernels differ.
    """
    blocks: list[RowBlock] = []
    begin = 0
    intervals = [(f, s) if f < s else (0, 0) for f, s in zip(first, stop, strict=True)]
    for (low, high), run in groupby(intervals):
        end = begin + sum(1 for _ in run)
        block = RowBlock(start=begin, stop=end, first_frame=low, stop_frame=high, uniform=True)
        if blocks and _can_join(blocks[-1], block, tokens_per_frame):
            block = _join(blocks.pop(), block)
        blocks.append(block)
        begin = end
    return blocks


def _can_join(left: RowBlock, right: RowBlock, tokens_per_frame: int) -> bool:
    both_see = left.first_frame < left.stop_frame and right.first_frame < right.stop_frame
    if not both_see or right.stop - right.start > SHORT_RUN or (left.uniform and left.stop - left.start > SHORT_RUN):
        return False
    union = _join(left, right)
    return (union.stop - union.start) * (union.stop_frame - union.first_frame) * tokens_per_frame <= MASK_ELEMENTS


def _join(left: RowBlock, right: RowBlock) -> RowBlock:
    low, high = min(left.first_frame, right.first_frame), max(left.stop_frame, right.stop_frame)
    return replace(left, stop=right.stop, first_frame=low, stop_frame=high, uniform=False)
