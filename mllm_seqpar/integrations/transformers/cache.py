"""What a patched model changes in a transformers cache: it appends its state, and replaces layers with sharded K and V.

The state is a layer of the caller's own cache object (`models.cache`). It therefore lives as long as the conversation,
follows the cache's row operations, and is copied with the cache. A cache that was reset has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.cache import SequenceParallelCacheState, attach
from mllm_seqpar.runtime.text import TextKVCache, TextShards


def begin_prompt(cache: Cache, batch: int, group: tuple[int, int], model_layers: int) -> SequenceParallelCacheState:
    """Restore the original layers of a cache that an earlier text has used, and attach a new state."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ShardedLayer):
            cache.layers[index] = layer.original
            layer.original.reset()
    state = SequenceParallelCacheState(batch, group)
    attach(cache, state, model_layers)
    return state


def supports_sharded_text(cache: Cache) -> bool:
    """Return whether text K and V can be sharded in this cache. Static, quantised and offloaded caches cannot."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def shard_cached_text(cache: Cache, state: SequenceParallelCacheState, shards: TextShards, model_layers: int) -> None:
    """Replace the text layers of the cache, so that each rank stores K and V of its shard of the text."""
    state.text = TextKVCache(shards)
    _replace_layers(cache, state, range(model_layers), state.text)


def mark_visual_layers(cache: Cache, state: SequenceParallelCacheState, indices: list[int]) -> None:
    """Replace layers in which the unpatched model stores K and V of frames, so that it fails with a message on this
    cache."""
    _replace_layers(cache, state, indices, None)


def _replace_layers(
    cache: Cache, state: SequenceParallelCacheState, indices: Iterable[int], text: TextKVCache | None
) -> None:
    for index in indices:
        layer = cache.layers[index]
        if not isinstance(layer, ShardedLayer):
            cache.layers[index] = ShardedLayer(layer, state, text)


class ShardedLayer(DynamicLayer):
    """Replaces one of the model's own layers whose K and V are not all on this rank. After `reset`, an ordinary layer.

    A layer of sharded text stores the K and V of this rank's tokens. A layer of frames stores none, because
    `SequenceParallelCacheState.visual` has them. An unpatched model would lack the others, and gets a ConfigError.

    Args:
        original: the layer that is replaced.
        state: the state of the cache.
        text: the tokens whose K and V this rank stores; None for a layer of frames.
    """

    supports_early_init = False

    def __init__(self, original: Any, state: SequenceParallelCacheState, text: TextKVCache | None) -> None:
        super().__init__()
        self.original, self._text = original, text
        self.is_compileable = original.is_compileable  # by which transformers recognises a static cache
        self._state: SequenceParallelCacheState | None = state
        self._length = 0  # tokens on all ranks
        if text is None:
            self.lazy_initialization(torch.empty(0), torch.empty(0))

    def _require_patched_model(self, what: str) -> None:
        if self._state is not None and not self._state.active:
            raise ConfigError(
                f"the cache holds K and V in the form of the patched model that filled it; {what}. Continue it with "
                "that model, on the same ranks and while it is patched, or begin with a new cache"
            )

    @property
    def _holds_frames(self) -> bool:
        return self._text is None and self._state is not None and self._state.visual is not None

    @property
    def keys(self) -> Any:
        """K of this rank; of a layer of frames it is empty, and only a pass of the patched model may read it."""
        if self._holds_frames:
            self._require_patched_model("the K and V of the frames are among them")
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._keys = keys

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this rank's part of K and V, and return the tensors that attention computes with.

        The first call takes (B, G, s, D), this rank's shard of the prompt, and returns it with its padding. Later calls
        take (B, G, L, D), new tokens that every rank has, and return all K and V that this rank stores.
        """
        if self._text is None:
            _ = self.keys  # raises if the K and V of other frames are in the state
            return super().update(key_states, value_states)
        self._require_patched_model("each rank holds only its own tokens")
        prompt, self._length = self._length == 0, self._text.total
        fresh = self._text.fresh
        stored = super().update(key_states[:, :, fresh], value_states[:, :, fresh])
        return (key_states, value_states) if prompt else stored

    def get_seq_length(self) -> int:
        """Return the number of tokens of the whole text, on all ranks.

        For frames it is -1. Their keys are not tokens, but transformers must not take the layer for an empty one.
        """
        if self._holds_frames:
            return -1
        return super().get_seq_length() if self._text is None else self._length

    def reset(self) -> None:
        if self._text is None:
            self.is_initialized = False
        self._state, self._text, self._length = None, None, 0
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of the whole text, whichever rank stores them."""
        if self._holds_frames:
            return None
        if self._text is None:
            return super().crop(tokens_to_remove)
        tokens_to_remove = int(tokens_to_remove)  # some callers pass a tensor
        if tokens_to_remove > 0:  # older callers pass the length that remains
            tokens_to_remove = min(0, tokens_to_remove - self._length)
        if tokens_to_remove == 0 or self._length == 0:
            return None
        self._length += tokens_to_remove
        self._text.crop(self._length)
        count = self._text.positions.numel()
        self.keys, self.values = self.keys[:, :, :count], self.values[:, :, :count]  # type: ignore[has-type]
        return None
