"""What the hyper layers of one forward pass share about the frames, and what they keep of them for decoding.

Shape legend: B samples, L text tokens of this pass, F frames of all samples, T tokens a frame, G KV heads, D head dim.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.cache_rows import RowsLayer, layer_of

from .media import MediaLayout

MASK_ELEMENTS = 1 << 24
"""Largest boolean mask (rows x keys) of one block: the s_q x s_kv mask of a long video never exists."""

SHORT_RUN = 32
"""Rows with one and the same interval that are worth a block of their own, which then needs no mask."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Rows [start, stop) of one sample, and the frames [first_frame, stop_frame) that at least one of them sees.

    Attributes:
        uniform: every row sees all of those frames, so that no mask is needed. Without frames it is True.
    """

    start: int
    stop: int
    first_frame: int
    stop_frame: int
    uniform: bool


class VisualInputs:
    """The frames' features and which text rows see them; one object for all layers of one forward pass.

    Not a dataclass and not a pytree on purpose: FSDP, checkpointing and device placement walk through containers of
    tensors and would cast or copy the features once per layer.

    Attributes:
        embeds: (F, T, hidden), after `vision2text_model`; None while decoding, when K and V are in the cache.
        frame_position: (F,) int64, the rotary position of each frame's keys.
        first: (B, L) int64. A row sees the frames first <= f < stop, by global number.
        stop: (B, L) int64.
        tokens_per_frame: T.
    """

    def __init__(
        self, *, embeds: Tensor | None, frame_position: Tensor, first: Tensor, stop: Tensor, tokens_per_frame: int
    ) -> None:
        self.embeds = embeds
        self.frame_position = frame_position
        self.first = first
        self.stop = stop
        self.tokens_per_frame = tokens_per_frame

    @cached_property
    def sees(self) -> Tensor:
        """(B, L) bool: whether a row sees any frame."""
        return self.stop > self.first

    @cached_property
    def blocks(self) -> list[list[RowBlock]]:
        """For each sample, its rows cut into blocks, all rows in order. Computed once, used by every hyper layer."""
        return [
            row_blocks(first, stop, self.tokens_per_frame)
            for first, stop in zip(self.first.tolist(), self.stop.tolist(), strict=True)
        ]


class VisualCache(RowsLayer):
    """The visual K and V of each hyper layer, projected once at prefill and kept with the text cache.

    It is one more layer of that cache, so it follows the cache's row operations. Copies of the cache share K and V.

    Attributes:
        layout: of the text that came with the frames.
        row_offset: tokens that were in the cache before that text.
        tokens_per_frame: T.
        inclusive: whether a placeholder sees its own frame.
        states: by layer index, k and v of shape (1, G, F * T, D), k already rotated.
        seen: fingerprints of the frames.
        whole: whether `states` has all frames; a patched model keeps this rank's only.
    """

    def __init__(self, layout: MediaLayout, *, row_offset: int, tokens_per_frame: int, inclusive: bool) -> None:
        super().__init__(layout.first.shape[0])
        self.layout = layout
        self.row_offset = row_offset
        self.tokens_per_frame = tokens_per_frame
        self.inclusive = inclusive
        self.states: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.whole = True

    def inputs(self, past_length: int, length: int, batch: int, embeds: Tensor | None = None) -> VisualInputs:
        """The visual inputs of the `length` tokens that follow `past_length` cached ones.

        Raises:
            ConfigError: K and V of frames are on other ranks.
            ShapeError: the cache has another number of rows than the call.
        """
        if not self.whole:
            raise ConfigError(
                "past_key_values holds K and V of the frames of one rank only, as the patched model that filled it "
                "keeps them; continue it with that model while it is patched, or begin with a new cache"
            )
        rows = self.rows_of(batch).to(self.layout.first.device)
        self.layout = (
            self.layout.cropped(past_length - self.row_offset, self.inclusive) if embeds is None else self.layout
        )
        first, stop = (bound[rows] for bound in self.layout.rows(past_length - self.row_offset, length))
        return VisualInputs(
            embeds=embeds,
            frame_position=self.layout.frame_position,
            first=first,
            stop=stop,
            tokens_per_frame=self.tokens_per_frame,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "VisualCache":
        copied = copy.copy(self)  # operations replace rows, layout and states, and change none of them in place
        copied.states = dict(self.states)
        return copied


def visual_cache(past_key_values: Any) -> VisualCache | None:
    """The visual part kept with a text cache, if there is one."""
    return layer_of(past_key_values, VisualCache)


def row_blocks(first: list[int], stop: list[int], tokens_per_frame: int) -> list[RowBlock]:
    """Cuts the rows of one sample into blocks: no mask where rows agree, bounded masks elsewhere.

    A block's rows all see something, or all see nothing: a mask never has an empty row, on which kernels differ.
    """
    blocks: list[RowBlock] = []
    begin = 0
    intervals = [(f, s) if f < s else (0, 0) for f, s in zip(first, stop, strict=True)]
    for (low, high), run in groupby(intervals):
        end = begin + sum(1 for _ in run)
        block = RowBlock(start=begin, stop=end, first_frame=low, stop_frame=high, uniform=True)
        if blocks and _may_join(blocks[-1], block, tokens_per_frame):
            block = _joined(blocks.pop(), block)
        blocks.append(block)
        begin = end
    return blocks


def _may_join(left: RowBlock, right: RowBlock, tokens_per_frame: int) -> bool:
    both_see = left.first_frame < left.stop_frame and right.first_frame < right.stop_frame
    if not both_see or right.stop - right.start > SHORT_RUN or (left.uniform and left.stop - left.start > SHORT_RUN):
        return False
    union = _joined(left, right)
    return (union.stop - union.start) * (union.stop_frame - union.first_frame) * tokens_per_frame <= MASK_ELEMENTS


def _joined(left: RowBlock, right: RowBlock) -> RowBlock:
    return RowBlock(
        start=left.start,
        stop=right.stop,
        first_frame=min(left.first_frame, right.first_frame),
        stop_frame=max(left.stop_frame, right.stop_frame),
        uniform=False,
    )
