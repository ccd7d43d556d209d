"""The state that a patched model stores in a transformers cache: K and V of the frames, sharded K and V of the text.

It is stored in a layer of the caller's own cache object (`models.cache_rows`). It therefore lives as long as the
conversation, follows the cache's row operations, and is copied with the cache. A cache that was reset has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.cache_rows import RowsLayer, attach, layer_of
from mllm_seqpar.runtime.frames import VisualKVCache
from mllm_seqpar.runtime.text import TextKVCache, TextShards

_OTHER_MODEL = (
    "the cache holds K and V in the form of the patched model that filled it; {what}. Continue it with that "
    "model, on the same ranks and while it is patched, or begin with a new cache"
)


class SequenceParallelCacheState(RowsLayer):
    """A cache layer with the sequence-parallel cache state of a patched model.

    Attributes:
        visual: K and V of the frames. Copies of the cache share them.
        media_position: what `Family.media_position` returned for the text that came with the frames.
        position_offsets: (rows of the prompt, 1) int64 on the CPU: how far the positions of later tokens are from their
            number, in a decoder-only model whose visual tokens share positions.
        text: the text tokens whose K and V this rank stores, if the text is sharded.
        replaced_layers: the cache's original layers that were replaced, by index.
        group: (rank, size) of the group that K and V are sharded over.
        active: whether a pass of the patched model is running.
    """

    def __init__(self, batch: int, comm: Communicator) -> None:
        super().__init__(batch)
        self.visual: VisualKVCache | None = None
        self.media_position: Any = None
        self.position_offsets: Tensor | None = None
        self.text: TextKVCache | None = None
        self.replaced_layers: dict[int, Any] = {}
        self.frame_fingerprints: set[tuple[int, ...]] = set()
        self.group = comm.rank, comm.size
        self.active = False

    def store_frames(self, visual: VisualKVCache, media_position: Any, batch: int) -> None:
        """Store K and V of frames that came with a pass of `batch` rows."""
        self.visual, self.media_position, self.rows = visual, media_position, torch.arange(batch)

    def continue_in(self, comm: Communicator) -> None:
        """Set the group of the passes that follow.

        Raises:
            ConfigError: K and V are sharded over a group of another size, or belong to another rank.
        """
        if (self.visual or self.text) and self.group != (comm.rank, comm.size):
            what = "this was rank {} of {} ranks and is rank {} of {} now".format(*self.group, comm.rank, comm.size)
            raise ConfigError(_OTHER_MODEL.format(what=what))
        self.group = comm.rank, comm.size

    def reset(self) -> None:
        super().reset()
        self.visual = self.media_position = self.position_offsets = self.text = None
        self.frame_fingerprints = set()


def cache_state_of(cache: Any) -> SequenceParallelCacheState | None:
    return layer_of(cache, SequenceParallelCacheState)


def begin_prompt(cache: Cache, batch: int, comm: Communicator, model_layers: int) -> SequenceParallelCacheState:
    """Restore the original layers of a cache that an earlier text has used, and attach a new state."""
    earlier = cache_state_of(cache)
    for index, layer in ({} if earlier is None else earlier.replaced_layers).items():
        cache.layers[index] = layer
        layer.reset()
    state = SequenceParallelCacheState(batch, comm)
    attach(cache, state, model_layers)
    return state


def supports_sharded_text(cache: Cache) -> bool:
    """Return whether text K and V can be sharded in this cache. Static, quantised and offloaded caches cannot."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def shard_cached_text(cache: Cache, state: SequenceParallelCacheState, shards: TextShards, model_layers: int) -> None:
    """Replace the text layers of the cache, so that each rank stores K and V of its shard of the text."""
    state.text = TextKVCache(shards)
    for index in range(model_layers):
        state.replaced_layers.setdefault(index, cache.layers[index])
        cache.layers[index] = ShardedTextLayer(state.text)


def mark_visual_layers(cache: Cache, state: SequenceParallelCacheState, indices: list[int]) -> None:
    """Replace layers in which the unpatched model stores K and V of frames, so that it fails with a message on this
    cache."""
    for index in indices:
        state.replaced_layers.setdefault(index, cache.layers[index])
        cache.layers[index] = VisualLayerPlaceholder(cache.layers[index], state)


def _delegated(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self._original, name)(*args, **kwargs)


class VisualLayerPlaceholder(CacheLayerMixin):
    """Replaces a cache layer while K and V of its frames are in the `SequenceParallelCacheState`.

    Row operations act on the original layer, which holds only what an unpatched model has cached since; the state is a
    separate layer and follows them as well.
    """

    def __init__(self, original: Any, state: SequenceParallelCacheState) -> None:
        self._original, self._state = original, state
        for name in ("is_compileable", "is_croppable", "is_sliding"):  # transformers reads these to make masks
            setattr(self, name, getattr(original, name, False))

    lazy_initialization = _delegated("lazy_initialization")
    get_mask_sizes = _delegated("get_mask_sizes")
    get_max_length = _delegated("get_max_length")
    get_max_cache_shape = _delegated("get_max_cache_shape")  # the name before transformers 5.20
    reset = _delegated("reset")
    reorder_cache = _delegated("reorder_cache")
    batch_select_indices = _delegated("batch_select_indices")
    batch_repeat_interleave = _delegated("batch_repeat_interleave")

    @property
    def is_initialized(self) -> bool:
        return self._state.visual is not None or bool(self._original.is_initialized)

    @property
    def keys(self) -> Any:
        """K of the original layer; empty in a pass of the patched model; ConfigError if only the state has K."""
        if self._state.visual is None:
            return self._original.keys
        if not self._state.active:
            raise ConfigError(_OTHER_MODEL.format(what="the K and V of the frames are among them"))
        return torch.empty(0)

    @property
    def values(self) -> Any:
        return self._original.values if self._state.visual is None else self.keys

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        _ = self.keys  # raises if the K and V of other frames are in the state
        return self._original.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Return the number of visual keys; older versions of transformers test for frames by it."""
        visual = self._state.visual
        return self._original.get_seq_length() if visual is None else visual.units * visual.tokens_per_unit

    def crop(self, tokens_to_remove: int) -> None:
        """Keep all frames: they are not tokens of the text."""

    def offload(self) -> None:
        """Leave the K and V of frames where they are."""

    prefetch = offload


class ShardedTextLayer(DynamicLayer):
    """K and V of one decoder layer, of the text tokens that this rank stores. After `reset`, an ordinary layer."""

    def __init__(self, text: TextKVCache) -> None:
        super().__init__()
        self._text: TextKVCache | None = text
        self._length = 0  # tokens on all ranks

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this rank's part of K and V, and return the tensors that attention computes with.

        The first call takes (B, G, s, D), this rank's shard of the prompt, and returns it with its padding. Later calls
        take (B, G, L, D), new tokens that every rank has, and return all K and V that this rank stores. An unpatched
        model, which would lack the K and V of the other ranks, gets a ConfigError.
        """
        if self._text is None:
            return super().update(key_states, value_states)
        prompt = self._length == 0
        if not prompt and self._length + key_states.shape[2] != self._text.total:
            raise ConfigError(_OTHER_MODEL.format(what="each rank holds only its own tokens"))
        self._length = self._text.total
        fresh = self._text.fresh
        stored = super().update(key_states[:, :, fresh], value_states[:, :, fresh])
        return (key_states, value_states) if prompt else stored

    def get_seq_length(self) -> int:
        """Return the number of tokens of the whole text, on all ranks."""
        return super().get_seq_length() if self._text is None else self._length

    def reset(self) -> None:
        super().reset()
        self._text, self._length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of the whole text, whichever rank stores them."""
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
        keys, values = self.keys, self.values  # type: ignore[has-type]
        self.keys, self.values = keys[:, :, :count], values[:, :, :count]
        return None
