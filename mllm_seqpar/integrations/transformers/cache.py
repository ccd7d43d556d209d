"""What a patched model keeps with a transformers cache: the frames' K and V, and text K and V that stay sharded.

It is a layer of the caller's own cache object (`cache_rows`), so it lives and dies with the conversation, follows the
cache's row operations, and is copied with it; a cache that was reset has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.cache_rows import RowsLayer, attach, layer_of
from mllm_seqpar.runtime.text_kv_cache import TextKVCache
from mllm_seqpar.runtime.text_shards import TextShards
from mllm_seqpar.runtime.visual_features import VisualKVCache

ELSEWHERE = (
    "past_key_values holds K and V in the form of the patched model that filled it, {what}; continue it with that "
    "model, on the same ranks and while it is patched, or begin with a new cache"
)


class SequenceParallelCacheState(RowsLayer):
    """Beside a cache.

    Attributes:
        kept: the frames' K and V; copies of the cache share them.
        note: what the family's `note` returned for the text that came with the frames.
        text: which cached text tokens this rank keeps, when their K and V are sharded.
        replaced: the cache's own layers whose places others have taken.
        seen: fingerprints of the frames.
        group: (rank, size) of the group that the K and V are sharded over.
        active: whether a pass of the patched model is under way.
    """

    def __init__(self, batch: int, comm: Communicator) -> None:
        super().__init__(batch)
        self.kept: VisualKVCache | None = None
        self.note: Any = None
        self.text: TextKVCache | None = None
        self.replaced: dict[int, Any] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.group = comm.rank, comm.size
        self.active = False

    def keep(self, kept: VisualKVCache, note: Any, batch: int) -> None:
        """Hold K and V of frames that a pass of `batch` rows brings."""
        self.kept, self.note, self.rows = kept, note, torch.arange(batch)

    def check_group(self, comm: Communicator) -> None:
        """Raise ConfigError unless what is kept is sharded over this group."""
        if (self.kept or self.text) and self.group != (comm.rank, comm.size):
            what = "rank {} of {} ranks then, rank {} of {} now".format(*self.group, comm.rank, comm.size)
            raise ConfigError(ELSEWHERE.format(what=what))

    def reset(self) -> None:
        """Forget the text and the frames."""
        super().reset()
        self.kept = self.note = self.text = None
        self.seen = set()


def cache_state(cache: Any) -> SequenceParallelCacheState | None:
    """Return what a patched model keeps with this cache, if one has filled it."""
    return layer_of(cache, SequenceParallelCacheState)


def begin_prompt(cache: Cache, batch: int, comm: Communicator, own_layers: int) -> SequenceParallelCacheState:
    """Forget an earlier text's frames, give the cache its own layers back, and start a new record."""
    before = cache_state(cache)
    for index, layer in ({} if before is None else before.replaced).items():
        cache.layers[index] = layer
        layer.reset()
    beside = SequenceParallelCacheState(batch, comm)
    attach(cache, beside, own_layers)
    return beside


def supports_sharded_text(cache: Cache) -> bool:
    """Whether text K and V can stay sharded in this cache: not in static, quantised or offloaded ones."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def shard_cached_text(cache: Cache, shards: TextShards, layers: int) -> None:
    """From now on each rank keeps its shard of the text's K and V in this cache of `layers` layers."""
    beside = cache_state(cache)
    assert beside is not None
    text = beside.text = TextKVCache(shards)
    for index in range(layers):
        beside.replaced.setdefault(index, cache.layers[index])
        cache.layers[index] = ShardedTextLayer(text)


def mark_layers(cache: Cache, beside: SequenceParallelCacheState, indices: list[int]) -> None:
    """Make the unpatched model fail clearly in layers where it would look for the frames' K and V, and find none."""
    for index in indices:
        beside.replaced.setdefault(index, cache.layers[index])
        cache.layers[index] = VisualLayerPlaceholder(cache.layers[index], beside)


class VisualLayerPlaceholder(CacheLayerMixin):
    """Stands for a layer of the cache while K and V of its frames are kept in the record."""

    def __init__(self, own: Any, beside: SequenceParallelCacheState) -> None:
        self._own, self._beside = own, beside
        for name in ("is_compileable", "is_croppable", "is_sliding"):  # transformers makes masks by these
            setattr(self, name, getattr(own, name, False))

    @property
    def is_initialized(self) -> bool:
        """Whether there are K and V, here or in the record."""
        return self._beside.kept is not None or bool(self._own.is_initialized)

    @property
    def keys(self) -> Any:
        """K of the layer itself; nothing in a pass of the patched model, which takes the record's.

        Raises:
            ConfigError: the unpatched model asks, and the frames' K are in the record.
        """
        if self._beside.kept is None:
            return self._own.keys
        if not self._beside.active:
            raise ConfigError(ELSEWHERE.format(what="the frames' K and V among them"))
        return torch.empty(0)

    @property
    def values(self) -> Any:
        """V of the layer itself, under the rules of `keys`."""
        return self._own.values if self._beside.kept is None else self.keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Delegate to the cache's own layer."""
        self._own.lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Delegate to the cache's own layer, once the record is empty."""
        _ = self.keys  # raises where K and V of other frames are in the record
        return self._own.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Keys of all frames, by which older versions of transformers see that there are some."""
        kept = self._beside.kept
        return self._own.get_seq_length() if kept is None else kept.units * kept.tokens_per_unit

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Delegate to the cache's own layer."""
        return self._own.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Delegate to the cache's own layer."""
        return self._own.get_max_length()

    def get_max_cache_shape(self) -> int:
        """Delegate to the cache's own layer, under the name that older versions of transformers have."""
        return self._own.get_max_cache_shape()

    def reset(self) -> None:
        """Delegate to the cache's own layer."""
        self._own.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """The record follows the rows; here is nothing to move, or only what an unpatched model cached since."""
        self._own.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """As `reorder_cache`."""
        self._own.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As `reorder_cache`."""
        self._own.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Keep all frames: they are not tokens of the text."""

    def offload(self) -> None:
        """Leave K and V of frames where they are."""

    prefetch = offload


class ShardedTextLayer(DynamicLayer):
    """One layer's K and V of the text tokens that this rank keeps; after `reset` an ordinary layer."""

    def __init__(self, text: TextKVCache) -> None:
        super().__init__()
        self._text: TextKVCache | None = text
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """First (B, G, s, D) of this rank's shard of the prompt, then (B, G, L, D) of new tokens, whole on every rank.

        Returns:
            What attention computes with: the shard unchanged, padding included; later all that this rank keeps.

        Raises:
            ConfigError: the unpatched model calls, for which K and V of other ranks would be missing.
        """
        if self._text is None:
            return super().update(key_states, value_states)
        fresh = self._text.fresh.to(key_states.device)
        if self._length == 0:
            super().update(key_states.index_select(2, fresh), value_states.index_select(2, fresh))
            self._length = self._text.total
            return key_states, value_states
        if self._length + key_states.shape[2] != self._text.total:
            raise ConfigError(ELSEWHERE.format(what="each rank its own tokens' only"))
        self._length += key_states.shape[2]
        return super().update(key_states.index_select(2, fresh), value_states.index_select(2, fresh))

    def get_seq_length(self) -> int:
        """Tokens of the whole text, on all ranks."""
        return super().get_seq_length() if self._text is None else self._length

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._text, self._length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of the whole text, wherever they are kept."""
        if self._text is None:
            return super().crop(tokens_to_remove)
        tokens_to_remove = int(tokens_to_remove)  # some callers pass a tensor
        if tokens_to_remove > 0:  # older ones mean the length that remains
            tokens_to_remove = min(0, tokens_to_remove - self._length)
        if tokens_to_remove == 0 or self._length == 0:
            return None
        self._length += tokens_to_remove
        self._text.crop(self._length)
        left = self._text.positions.numel()
        self.keys, self.values = _first(self.keys, left), _first(self.values, left)  # type: ignore[has-type]
        return None


def _first(x: Any, count: int) -> Any:
    """(B, G, k, D) -> (B, G, count, D)."""
    return x[:, :, :count]
