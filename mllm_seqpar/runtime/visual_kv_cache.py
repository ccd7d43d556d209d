"""The cache of the K and V of frames, for decoding.

In a pass with a cache, each layer projects the frames of this rank once, and later passes attend to the stored K and V:
on the device, or in host memory (`visual_offload`). In host memory they are stored chunk by chunk as (keys, G, D), so
that a chunk of frames is contiguous. Every pass of a layer brings all chunks to the device once: decoding a token reads
2 G D elements per key and layer from host memory. The device holds two chunks for any number of frames.

Frames that come with a later pass are appended: they have a cache of their own, which refers to the one before it.
Their numbers continue those of the earlier frames, so that each rank holds its frames in ascending order, those of one
pass after those of another. K and V of the earlier frames stay where they are; attention reads the caches in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys, Keys
from mllm_seqpar.attention.streamed import KeyChunk, StreamedKeys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.intervals import Span
from mllm_seqpar.sharding import FrameSizes, Spans, join_spans

from .frames import Frames
from .host_copies import HostCopies
from .offload import HostFeatures
from .projections import Projection
from .visual_features import VisualFeatures, unit_chunks


class VisualKVCache:
    """K and V of frames for decoding: each layer projects the frames of this rank once.

    Copies of a transformers cache share it (`__deepcopy__`), because K and V never change after the first pass. Besides
    them it keeps the frames of the last pass, which a pass with another mask replaces.

    Attributes:
        earlier: the cache of the frames that these are appended to, or None.
        total_frames: the number of frames on all ranks, those of `earlier` included; 0 if the only frame is the empty
            one of a pass without frames.
        sizes: the number of units (frames, image tiles or single tokens) of each frame, the empty one included.
        units: the number of units on all ranks.
        own_units: the number of units without those of `earlier`.
        tokens_per_unit: keys of one unit.
        layout: how the frames without those of `earlier` map to ranks.
        states: by layer, k and v (1, G, keys of this rank, D) without those of `earlier`, in the memory that the
            features were in.
    """

    def __init__(
        self,
        total_frames: int,
        sizes: FrameSizes,
        tokens_per_unit: int,
        visual: VisualFeatures | None = None,
        earlier: VisualKVCache | None = None,
    ) -> None:
        """Make a cache for K and V that are projected from `visual`, or that the caller stores in `states`.

        Raises:
            ShapeError: frames have another number of tokens than those of `earlier`.
        """
        self.total_frames, self.sizes, self.tokens_per_unit = total_frames, sizes, tokens_per_unit
        self.earlier, self._own_sizes, self.own_units = earlier, sizes, sizes.count()
        if earlier is not None:
            if earlier.tokens_per_unit != tokens_per_unit:
                raise ShapeError(
                    f"new frames of {tokens_per_unit} tokens each follow frames of {earlier.tokens_per_unit} tokens in "
                    "the cache; pass frames of one size in all turns, or begin with a new cache"
                )
            self.total_frames, self.sizes = earlier.total_frames + total_frames, earlier.sizes.followed_by(sizes)
        self.units = self.sizes.count()
        self.layout = "contiguous" if visual is None else visual.layout
        self.states: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._visual = visual
        self._last: tuple[FrameMask, Frames] | None = None
        self._copies: HostCopies | None = None
        if isinstance(visual, HostFeatures):
            self._copies, self._chunks = visual.copies, unit_chunks(visual.features)

    def frames_of(self, mask: FrameMask, comm: Communicator) -> Frames:
        """Return the frames of a pass whose rows every rank has; those of the last pass if its mask was equal."""
        if self._last is None or not mask.equals(self._last[0]):
            # In a reference cycle, K and V would stay in memory until Python's garbage collector runs.
            self._last = mask, Frames.of_rows(weakref.proxy(self), mask, comm, self.sizes)
        return self._last[1]

    @property
    def parts(self) -> list[VisualKVCache]:
        """The caches in the order of their frames: those of `earlier`, and this one."""
        return [*([] if self.earlier is None else self.earlier.parts), self]

    def spans(self, ranks: int) -> tuple[Spans, ...]:
        """Return the frames of every rank, in the order in which it holds them."""
        own = self._own_sizes.spans(ranks, self.layout)
        if self.earlier is None:
            return own
        before = self.earlier.sizes.total
        shifted = [[(start + before, stop + before) for start, stop in spans] for spans in own]
        return tuple(join_spans([*x, *y]) for x, y in zip(self.earlier.spans(ranks), shifted, strict=True))

    def frames_by_rank(self, sizes: FrameSizes, ranks: int) -> Sequence[Spans]:
        """See `KVSource.frames_by_rank`."""
        return sizes.spans(ranks, self.layout) if self.earlier is None else self.spans(ranks)

    def units_by_rank(self, ranks: int) -> tuple[int, ...]:
        """Return the number of units that each rank holds."""
        return tuple(self.sizes.count(spans) for spans in self.spans(ranks))

    @property
    def empty_features(self) -> VisualFeatures:
        """See `VisualFeatures.empty_features`; in the first pass."""
        assert self._visual is not None
        return self._visual.empty_features

    def keys(self, layer: Hashable, spec: CallSpec, project: Projection, dtype: torch.dtype) -> Keys:
        """Return the keys of a layer; its first call projects them, with gradients if they are on the device.

        Raises:
            ConfigError: in grad mode, with K and V in host memory.
        """
        if self._copies is not None and torch.is_grad_enabled():
            raise ConfigError(
                'visual_offload="cpu": a pass with a cache keeps K and V in host memory and has no backward pass; run '
                "it under torch.no_grad(), or pass use_cache=False"
            )
        if layer not in self.states:
            assert self._visual is not None, f"layer {layer} has not seen the prompt's first pass"
            self.states[layer] = self._visual.keys_values(project, dtype)
        if self._copies is None and self.earlier is None:
            return GivenKeys(spec, *self.states[layer])
        k, v = (tuple(x) for x in zip(*(part.states[layer] for part in self.parts), strict=True))
        if torch.is_grad_enabled():  # one process, as several have no backward pass through a cache
            return GivenKeys(spec, torch.cat(k, 2), torch.cat(v, 2))
        return StreamedKeys(spec, k, lambda: (KeyChunk(x, y) for _, (x, y) in self.chunks(k, v)))

    def chunks(self, *states: Sequence[Tensor]) -> Iterator[tuple[Span, Sequence[Tensor]]]:
        """Yield (start, stop) of units of this rank, and their part of states: tensors (1, G, keys, D) of `parts`.

        From host memory the parts are copied to the device, and overwritten later.
        """
        done = 0
        for part, *own in zip(self.parts, *states, strict=True):
            stop = done
            for (start, stop), found in part._own_chunks(*own):
                yield (done + start, done + stop), found
            done += stop

    def _own_chunks(self, *states: Tensor) -> Iterator[tuple[Span, Sequence[Tensor]]]:
        tokens, copies = self.tokens_per_unit, self._copies
        if copies is None:
            yield (0, states[0].shape[2] // tokens), states
            return
        keys = [slice(chunk.start * tokens, chunk.stop * tokens) for chunk in self._chunks]
        names = ("k", "v")[: len(states)]
        parts = [copies.to_device(name, x[0].transpose(0, 1), keys) for name, x in zip(names, states, strict=True)]
        for chunk in self._chunks:
            yield (chunk.start, chunk.stop), [next(part).transpose(0, 1)[None] for part in parts]
        for part in parts:
            assert next(part, None) is None  # which marks the last buffer as free

    def close(self) -> None:
        """Release the features after the first pass, in which every layer has projected them."""
        if self._visual is not None and self._copies is not None:
            self._copies.release()
        self._visual = None

    def __deepcopy__(self, memo: dict[int, Any]) -> VisualKVCache:
        return self
