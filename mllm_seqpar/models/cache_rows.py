"""A layer of a transformers cache for state in addition to the text K and V, which follows the cache's rows.

`Cache` applies `reorder_cache`, `batch_select_indices`, `batch_repeat_interleave`, `crop` and `reset` to each of its
layers, and a copy of a cache copies its layers. A layer that is appended to the model's own layers therefore follows
all of these operations, and nothing in transformers is replaced. K and V of frames are not moved: only the row numbers
change, so rows of one sample (beams) share the memory of its frames.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils

from mllm_seqpar.errors import ShapeError

LayerT = TypeVar("LayerT", bound="RowsLayer")


class RowsLayer(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]
    """A layer without text K and V that records which row of the prompt each row of the cache continues."""

    is_initialized = True
    is_compileable = True
    is_croppable = True
    is_sliding = None  # neither True nor False: transformers uses the first layer of either kind to build masks
    supports_early_init = False
    keys = values = None

    def __init__(self, batch: int) -> None:
        self.rows: Tensor | None = torch.arange(batch)  # (B,) on the CPU; None after `reset`

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
        self.rows = None

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: frames do not belong to single tokens."""

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
        """Keep the rows on the CPU."""

    prefetch = offload


def layer_of(cache: Any, kind: type[LayerT]) -> LayerT | None:
    """Return the cache's layer of this class, or None."""
    for layer in reversed(getattr(cache, "layers", ())):
        if isinstance(layer, kind):
            return layer
    return None


def attach(cache: Any, layer: RowsLayer, own_layers: int) -> None:
    """Append the layer to the model's own layers, which are created now if necessary, and replace an earlier layer of
    its class."""
    detach(cache, type(layer))
    while len(cache.layers) < own_layers and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    cache.layers.append(layer)


def detach(cache: Any, kind: type[RowsLayer]) -> None:
    """Remove the cache's layers of this class."""
    cache.layers[:] = [layer for layer in cache.layers if not isinstance(layer, kind)]
