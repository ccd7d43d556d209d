"""What a patched model keeps with a transformers cache: the frames' K and V, and text K and V that stay dealt to ranks.

It hangs on the caller's own cache object, so it lives and dies with the conversation; a cache that was reset, or made
anew, has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from mllm_seqpar.cached_text import CachedText
from mllm_seqpar.text import TextShards
from mllm_seqpar.visual import KeptVisual

_ATTRIBUTE = "_mllm_seqpar"


@dataclass
class Remembered:
    """Beside a cache.

    Attributes:
        kept: the frames' K and V.
        text: where the cached text tokens stand, when their K and V are dealt to the ranks.
        layers: the cache's own layers, whose place those of the dealt text have taken.
        seen: fingerprints of the frames, where the family passes them again with every token.
    """

    kept: KeptVisual | None = None
    text: CachedText | None = None
    layers: list[Any] | None = None
    seen: set[tuple[int, ...]] = field(default_factory=set)


def remembered(cache: Cache) -> Remembered:
    """What is kept with this cache; empty at first."""
    if _ATTRIBUTE not in vars(cache):
        setattr(cache, _ATTRIBUTE, Remembered())
    return vars(cache)[_ATTRIBUTE]


def begin_prompt(cache: Cache) -> Remembered:
    """Forgets an earlier text's frames and gives the cache its own layers back."""
    before = remembered(cache)
    if before.layers is not None:
        cache.layers = before.layers
        for layer in cache.layers:
            layer.reset()
    setattr(cache, _ATTRIBUTE, Remembered())
    return vars(cache)[_ATTRIBUTE]


def can_be_dealt(cache: Cache) -> bool:
    """Whether text K and V can stay dealt to the ranks in this cache: not in static, quantised or offloaded ones."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def deal_text(cache: Cache, shards: TextShards, layers: int) -> None:
    """From now on each rank keeps its part of the text's K and V in this cache of `layers` layers."""
    beside = remembered(cache)
    text = beside.text = CachedText(shards)
    beside.layers, cache.layers = cache.layers, [DealtTextLayer(text) for _ in range(layers)]


class DealtTextLayer(DynamicLayer):
    """One layer's K and V of the text tokens that this rank keeps."""

    def __init__(self, text: CachedText) -> None:
        super().__init__()
        self._text = text
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """First (B, G, s, D) of this rank's share of the prompt, then (B, G, L, D) of new tokens, whole on every rank.

        Returns:
            What attention computes with: the share as it is, padding included; later all that this rank keeps.
        """
        fresh = self._text.fresh.to(key_states.device)
        if self._length == 0:
            super().update(key_states.index_select(2, fresh), value_states.index_select(2, fresh))
            self._length = self._text.total
            return key_states, value_states
        self._length += key_states.shape[2]
        return super().update(key_states.index_select(2, fresh), value_states.index_select(2, fresh))

    def get_seq_length(self) -> int:
        """Tokens of the whole text, on all ranks."""
        return self._length

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self._length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens of the whole text, wherever they are kept."""
        tokens_to_remove = int(tokens_to_remove)  # some callers pass a tensor
        if tokens_to_remove > 0:  # older ones mean the length that remains
            tokens_to_remove = min(0, tokens_to_remove - self._length)
        if tokens_to_remove == 0 or self._length == 0:
            return
        self._length += tokens_to_remove
        self._text.crop(self._length)
        left = self._text.positions.numel()
        self.keys, self.values = _first(self.keys, left), _first(self.values, left)  # type: ignore[has-type]


def _first(x: Any, count: int) -> Any:
    """(B, G, k, D) -> (B, G, count, D)."""
    return x[:, :, :count]
