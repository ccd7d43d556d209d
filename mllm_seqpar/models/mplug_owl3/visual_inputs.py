"""Visual features and visibility that the hyper layers of a forward pass share, and the visual KV cache.

Shape legend: B samples, L text tokens of this pass, F frames of all samples, T tokens per frame, G KV heads, D head
dim.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.cache_rows import RowsLayer, detach, layer_of
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
        frame_position: (F,) int64, the rotary position of each frame's keys.
        first, stop: (B, L) int64. A row attends to the frames first <= f < stop, by global number.
    """

    def __init__(
        self, *, embeds: Tensor | None, frame_position: Tensor, first: Tensor, stop: Tensor, tokens_per_frame: int
    ) -> None:
        self.embeds, self.frame_position, self.tokens_per_frame = embeds, frame_position, tokens_per_frame
        self.first, self.stop = first, stop

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


class VisualCache(RowsLayer):
    """The visual KV cache: K and V of each hyper layer, projected once at prefill and kept with the text cache.

    It is an additional layer of that cache and follows its row operations. Copies of the cache share K and V. A patched
    model stores its frames here as well, so that on one process both models can continue the caches of each other.

    Attributes:
        layout: the layout of the text that was passed with the frames, cropped as the text was.
        row_offset: number of tokens in the cache before that text.
        inclusive: whether a placeholder attends to its own frame.
        states: for each layer index, k (rotated) and v, (1, G, F * T, D).
        patched: the same K and V in the form of a patched model, if one has used this cache.
        is_complete: False if `states` contains only this rank's frames, because a patched model filled the cache.
    """

    def __init__(self, layout: MediaLayout, *, row_offset: int, tokens_per_frame: int, inclusive: bool) -> None:
        super().__init__(layout.first.shape[0])
        self.layout, self.row_offset = layout, row_offset
        self.tokens_per_frame, self.inclusive = tokens_per_frame, inclusive
        self.states: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.frame_fingerprints: set[tuple[int, ...]] = set()
        self.patched: VisualKVCache | None = None
        self.is_complete = True

    def inputs(self, past_length: int, length: int, batch: int, embeds: Tensor | None = None) -> VisualInputs:
        """Return the visual inputs of the `length` tokens that follow `past_length` cached tokens."""
        if not self.is_complete:
            raise ConfigError(
                "the cache holds K and V of the frames of one rank only, because a patched model filled it; "
                "continue it with that model while it is patched, or begin with a new cache"
            )
        features = embeds if embeds is not None else next(iter(self.states.values()), (self.layout.first,))[0]
        self.layout = self.layout.to(features.device)  # a patched model leaves it on the CPU
        rows = self.rows_of(batch).to(features.device)
        first, stop = (bound[rows] for bound in self.layout.rows(past_length - self.row_offset, length))
        position, tokens = self.layout.frame_position, self.tokens_per_frame
        return VisualInputs(embeds=embeds, frame_position=position, first=first, stop=stop, tokens_per_frame=tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "VisualCache":
        copied = copy.copy(self)  # All operations replace rows, layout and states; none changes them in place.
        copied.states = dict(self.states)
        return copied


def visual_cache(cache: Any) -> VisualCache | None:
    """Return the visual KV cache that is kept with a text cache, or None."""
    return layer_of(cache, VisualCache)


def continued_visual_cache(cache: Any, past_length: int) -> VisualCache | None:
    """Return the visual KV cache that a pass after `past_length` cached tokens continues, or None.

    Its layout is cropped to the text that is still in the cache. It is removed if the text that its frames came with is
    no longer in the cache, which was reset or cropped.
    """
    cached = visual_cache(cache)
    if cached is None:
        return None
    if past_length <= cached.row_offset:
        detach(cache, VisualCache)
        return None
    cached.layout = cached.layout.cropped(past_length - cached.row_offset, cached.inclusive)
    return cached


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
