"""The layer of a transformers cache for what a model stores besides the K and V of its text: above all, its frames.

`Cache` applies `reorder_cache`, `batch_select_indices`, `batch_repeat_interleave`, `crop` and `reset` to each of its
layers, and a copy of a cache copies its layers. A layer that is appended to the model's own layers therefore follows
all of these operations, and nothing in transformers is replaced. K and V of frames are not moved: only the row numbers
change, so rows of one sample (beams) share the memory of its frames.

Patched models of all families have this layer, and so has the native mPLUG-Owl3. On one process the native and the
patched model therefore continue the caches of each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.runtime.frames import VisualKVCache
from mllm_seqpar.runtime.text import TextKVCache

ONE_PROCESS = (0, 1)
"""The group of a model that is not patched: it is rank 0 of 1."""


class SequenceParallelCacheState(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]
    """A cache layer with the frames of a text, and with what a patched model stores besides them.

    Attributes:
        rows: (rows of the cache,) on the CPU, the row of the prompt that each continues; None after `reset`.
        visual: K and V of the frames. Copies of the cache share them.
        media_position: what `Family.media_position` returns for the text that came with the frames.
        frame_fingerprints: the fingerprints of the frames, one for each form in which they are known.
        position_offsets: (rows of the prompt, 1) int64 on the CPU: how far the positions of later tokens are from their
            number, in a decoder-only model whose visual tokens share positions.
        text: the text tokens whose K and V this rank stores, if the text is sharded.
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
        self.visual: VisualKVCache | None = None
        self.media_position: Any = None
        self.frame_fingerprints: set[tuple[int, ...]] = set()
        self.position_offsets: Tensor | None = None
        self.text: TextKVCache | None = None

    @property
    def frames(self) -> VisualKVCache | None:
        """`visual`, or None if it has no frames: a pass without frames may store the K and V of an empty one."""
        return self.visual if self.visual is not None and self.visual.total_frames else None

    def store_frames(self, visual: VisualKVCache, media_position: Any, batch: int) -> None:
        """Store K and V of frames that came with a pass of `batch` rows."""
        self.visual, self.media_position, self.rows = visual, media_position, torch.arange(batch)

    def drop_frames(self) -> None:
        self.visual = self.media_position = None
        self.frame_fingerprints = set()

    def continue_in(self, group: tuple[int, int]) -> None:
        """Set the group of the passes that follow.

        Raises:
            ConfigError: K and V are sharded over a group of another size, or belong to another rank.
        """
        if self.group == group:
            return
        if self.frames or self.text:
            raise ConfigError(
                "the cache holds the K and V of rank {} of {} ranks, and is continued on rank {} of {}; an unpatched "
                "model is rank 0 of 1. Continue it with the model that filled it, on the same ranks, or begin with a "
                "new cache".format(*self.group, *group)
            )
        self.group, self.visual = group, None

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
        self.rows = self.position_offsets = self.text = None
        self.drop_frames()

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: frames do not belong to single tokens, and the layers of a sharded text crop `text`."""

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


def cache_state_of(cache: Any) -> SequenceParallelCacheState | None:
    for layer in reversed(getattr(cache, "layers", ())):
        if isinstance(layer, SequenceParallelCacheState):
            return layer
    return None


def attach(cache: Any, state: SequenceParallelCacheState, model_layers: int) -> None:
    """Append the state to the model's own layers, which are created now if necessary, in place of an earlier state."""
    cache.layers[:] = [layer for layer in cache.layers if not isinstance(layer, SequenceParallelCacheState)]
    while len(cache.layers) < model_layers and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    cache.layers.append(state)
