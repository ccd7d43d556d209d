"""What models store in a transformers cache besides the K and V of their text, and the layers that hold it.

`Cache` applies `reorder_cache`, `batch_select_indices`, `batch_repeat_interleave`, `crop` and `reset` to each of its
layers, and a copy of a cache copies its layers. `SequenceParallelCacheState`, a layer that is appended to the model's
own layers, therefore follows all of these operations, lives as long as the conversation, and nothing in transformers is
replaced. K and V of frames are not moved: only the row numbers change, so rows of one sample (beams) share the memory
of its frames. Patched models of all families have this layer, and so have the native mPLUG-Owl3 and MOSS-VL. On one
process the native and the patched model therefore continue the caches of each other.

Frames may come with several passes of a conversation. The attributes of the state are those of the last of these
passes; the state as it was before is among its `earlier` ones, until the text of that pass is cropped.

A `ShardedLayer` takes the place of one of the model's own layers, if its K and V are not all on this rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.runtime.text import TextKVCache, TextShards
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.runtime.visual_tokens import FrameTokens

ONE_PROCESS = (0, 1)
"""The group of a model that is not patched: it is rank 0 of 1."""


_OF_FRAMES = (
    *("rows", "prompt_batch", "first_token", "earlier", "visual_kv", "frame_fingerprints"),
    *("samples", "frame_facts"),
)
"""The attributes of a state that belong to the pass that brought frames."""


class SequenceParallelCacheState(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]
    """A cache layer with the frames of a text, and with what a patched model stores besides them.

    Attributes:
        rows: (rows of the cache,) on the CPU, the row of the prompt that each continues; None after `reset`.
        prompt_batch: the number of rows of the prompt, which is the pass that the frames came with.
        first_token: the number of tokens in the cache before that pass.
        earlier: the states before frames were appended to others, oldest first; their `rows` are those of the rows of
            the next pass that brought frames.
        visual_kv: K and V of the frames, after those of the earlier ones. Copies of the cache share them.
        frame_fingerprints: the fingerprints of the frames, one for each form in which they are known.
        samples: the number of samples that the frames belong to; ``prompt_batch / samples`` rows of the prompt are
            beams of one sample. None for mPLUG-Owl3 and MOSS-VL.
        frame_facts: what the family stores with the frames, such as which of them each token of the prompt attends to.
        frame_tokens: decoder-only models: the visual tokens of the text so far; None if they are not known.
        text_facts: what the family stores with the whole text, such as offsets of positions.
        text_kv: the text tokens whose K and V this rank stores, if the text is sharded.
        group: (rank, size) of the group that K and V are sharded over.
        active: whether a pass of the patched model is running.
    """

    is_initialized = True
    is_compileable = True
    is_croppable = True
    is_sliding = None  # neither True nor False: transformers uses the first layer of either kind to build masks
    supports_early_init = False
    keys = values = None

    def __init__(self, batch: int, group: tuple[int, int] = ONE_PROCESS) -> None:
        self.group, self.active = group, False
        self.rows: Tensor | None = torch.arange(batch)
        self.prompt_batch, self.first_token = batch, 0
        self.earlier: tuple[SequenceParallelCacheState, ...] = ()
        self.visual_kv: VisualKVCache | None = None
        self.frame_fingerprints: set[tuple[int, ...]] = set()
        self.samples: int | None = None
        self.frame_facts: Any = None
        self.frame_tokens: FrameTokens | None = None
        self.text_facts: Any = None
        self.text_kv: TextKVCache | None = None

    @property
    def frames(self) -> VisualKVCache | None:
        """`visual_kv`, or None if it has no frames: a pass without frames may store the K and V of an empty one."""
        return self.visual_kv if self.visual_kv is not None and self.visual_kv.total_frames else None

    def store_frames(
        self, visual_kv: VisualKVCache, batch: int, fingerprints: set[tuple[int, ...]], past_length: int
    ) -> None:
        """Store K and V of frames that came with a pass of `batch` rows, after `past_length` tokens.

        They take the place of the frames of the cache, or follow them (`VisualKVCache.earlier`); see the attributes.
        """
        before = () if visual_kv.earlier is None else (*self.earlier, copy.copy(self))
        self.visual_kv, self.frame_fingerprints = visual_kv, fingerprints
        self.rows, self.prompt_batch = torch.arange(batch), batch
        self.earlier, self.first_token = before, past_length if before else 0

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Run a pass of the patched model, which alone may read the cache; release the features at its end."""
        self.active = True
        try:
            yield
        finally:
            self.active = False
        if self.visual_kv is not None:
            self.visual_kv.close()

    def by_pass(self) -> list[SequenceParallelCacheState]:
        """Return a state for each pass that brought frames, with the `rows` that the rows of this state continue."""
        states = [self]
        for state in map(copy.copy, reversed(self.earlier)):
            assert state.rows is not None and states[-1].rows is not None
            state.rows = state.rows[states[-1].rows]
            states.append(state)
        return states[::-1]

    def units_of_sample(self) -> int:
        """Return the number of units of each sample among the frames of this pass, without those of earlier ones."""
        assert self.visual_kv is not None and self.samples
        return self.visual_kv.own_units // self.samples

    def crop_to(self, length: int) -> None:
        """Drop frames that were appended after the first `length` tokens, the tokens that are in the cache."""
        while self.earlier and length <= self.first_token:
            before = self.by_pass()[-2]
            for name in _OF_FRAMES:
                setattr(self, name, getattr(before, name))

    def drop_frames(self) -> None:
        self.visual_kv = self.samples = self.frame_facts = None
        self.frame_fingerprints, self.earlier, self.first_token = set(), (), 0

    def continue_in(self, group: tuple[int, int]) -> None:
        """Set the group of the passes that follow.

        Raises:
            ConfigError: K and V are sharded over a group of another size, or belong to another rank.
        """
        if self.group == group:
            return
        if self.frames or self.text_kv:
            raise ConfigError(
                "the cache holds the K and V of rank {} of {} ranks, and is continued on rank {} of {}; an unpatched "
                "model is rank 0 of 1. Continue it with the model that filled it, on the same ranks, or begin with a "
                "new cache".format(*self.group, *group)
            )
        self.group, self.visual_kv = group, None

    def rows_of(self, batch: int) -> Tensor:
        """Return `rows` for a pass of `batch` rows; raise ShapeError if the cache has another number of rows."""
        rows = torch.arange(batch) if self.rows is None else self.rows
        if rows.numel() != batch:
            raise ShapeError(
                f"the cache has {rows.numel()} rows and the call has {batch}; repeat or select the rows of the "
                "cache first (batch_repeat_interleave, batch_select_indices)"
            )
        return rows

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.rows is not None:
            self.rows = self.rows[beam_idx.cpu() if isinstance(beam_idx, Tensor) else beam_idx]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows is not None:
            self.rows = self.rows.repeat_interleave(repeats)

    def reset(self) -> None:
        self.rows = self.frame_tokens = self.text_facts = self.text_kv = None
        self.drop_frames()

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: frames do not belong to single tokens, and the layers of a sharded text crop `text_kv`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer has no K and V to allocate."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    def offload(self) -> None:
        """Leave everything where it is."""

    prefetch = offload


class ShardedLayer(DynamicLayer):
    """Replaces one of the model's own layers whose K and V are not all on this rank. After `reset`, an ordinary layer.

    A layer of sharded text stores the K and V of this rank's tokens. A layer of frames stores none, because
    `SequenceParallelCacheState.visual_kv` has them. An unpatched model would lack the others, and gets a ConfigError.

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
        return self._text is None and self._state is not None and self._state.visual_kv is not None

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


def cache_state_of(cache: Any) -> SequenceParallelCacheState | None:
    """Return the state of a cache, which is its last layer; None if it has none."""
    last = cache.layers[-1] if getattr(cache, "layers", None) else None
    return last if isinstance(last, SequenceParallelCacheState) else None


def attach(cache: Any, state: SequenceParallelCacheState, model_layers: int) -> None:
    """Append the first state of a cache to the model's own layers, which are created now if necessary."""
    while len(cache.layers) < model_layers and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    cache.layers.append(state)


def begin_prompt(cache: Cache, batch: int, group: tuple[int, int], model_layers: int) -> SequenceParallelCacheState:
    """Restore the original layers of a cache that an earlier text has used, and attach a new state."""
    if cache_state_of(cache) is not None:
        cache.layers.pop()
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
    state.text_kv = TextKVCache(shards)
    _replace_layers(cache, state, range(model_layers), state.text_kv)


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
