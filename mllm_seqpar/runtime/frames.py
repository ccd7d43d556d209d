"""The frames of passes: which of them rows may attend to, where their K and V come from, and the cache of K and V.

In a pass with a cache, each layer projects the frames of this rank once, and later passes attend to the stored K and V:
on the device, or in host memory (`visual_offload`). In host memory they are stored chunk by chunk as (keys, G, D), so
that a chunk of frames is contiguous. Every pass of a layer brings all chunks to the device once: decoding a token reads
2 G D elements per key and layer from host memory. The device holds two chunks for any number of frames.

Frames that come with a later pass are appended: they have a cache of their own, which refers to the one before it.
Their numbers continue those of the earlier frames, so that each rank holds its frames in ascending order, those of one
pass after those of another. K and V of the earlier frames stay where they are; attention reads the caches in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.call_spec import CallSpec, Placement, problem_of
from mllm_seqpar.attention.keys import GivenKeys, Keys, cast_for_attention
from mllm_seqpar.attention.streamed import KeyChunk, StreamedKeys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.masks.intervals import Span
from mllm_seqpar.sharding import FrameSizes, Spans, in_frame_order, join_spans, span_length

from .offload import HostCopies, HostFeatures
from .projections import Projection
from .strategy_selector import CROSS, CrossAttentionShape, SelectedStrategy, VisualProjection
from .text import TextShards
from .visual_features import VisualFeatures, frame_chunks

if TYPE_CHECKING:
    from .context import SeqParContext


KVSource: TypeAlias = "VisualFeatures | VisualKVCache"
"""Where the K and V of frames come from: features of the pass, which layers project, or the cache of an earlier one.

Both have `keys`, which returns those of a layer, `units`, `tokens_per_unit` and `empty_features`.
"""


class Frames:
    """The frames of one pass.

    Attributes:
        source: where K and V come from.
        units: the features' units of every rank that `masks` has.
        masks: the mask of every block; with replicated rows, or replicated frames, that of this rank alone.
        key_lengths: the number of visual keys on every rank that `masks` has.
        placement: whether each rank has its own frames, or all of them.
        selection: the strategy that "auto" selected for the whole pass, if it did.
        kv_heads: the number of KV heads of the layers that attend to frames, if the model states it.
        specs: the call specs, by the shapes that they are for.
    """

    def __init__(
        self,
        source: KVSource,
        masks: Sequence[FrameMask],
        spans: Sequence[Spans],
        units: Sequence[Spans],
        placement: Placement = "sharded",
    ) -> None:
        self.source, self.units, self.placement = source, units, placement
        self._by_rank, self.masks = masks, frame_masks(masks, spans)
        self.key_lengths = tuple([keys.count for keys in self.masks.keys])
        self.selection: SelectedStrategy | None = None
        self.kv_heads: int | None = None
        self.specs: dict[Hashable, CallSpec] = {}

    @classmethod
    def of_shards(cls, source: KVSource, mask: FrameMask, text: TextShards, sizes: FrameSizes | None = None) -> Frames:
        """Return the frames of a pass with sharded rows, given the mask of ALL rows (B, L) in order.

        Args:
            source: where K and V come from.
            mask: the mask over frames, or over their units. Padding rows attend to nothing.
            text: the sharding of the rows.
            sizes: how many units of `source` each frame has; a frame is never split over ranks. None: the mask is over
                frames, which have its sizes in keys.
        """
        padded = FrameMask(text.pad(mask.bounds, -1), mask.sizes)
        by_rank = [padded.take(text.positions(rank)) for rank in range(text.comm.size)]
        return cls(source, by_rank, *_spans(source, mask, sizes, text.comm.size))

    @classmethod
    def of_rows(cls, source: KVSource, mask: FrameMask, comm: Communicator, sizes: FrameSizes | None = None) -> Frames:
        """Return the frames of a pass with rows that every rank has; the arguments are those of `of_shards`."""
        spans, units = _spans(source, mask, sizes, comm.size)
        return cls(source, [mask], [spans[comm.rank]], [units[comm.rank]])

    @functools.cached_property
    def common_keys(self) -> slice | None:
        """The keys that every row of a group of one attends to, if no row attends to others; None otherwise."""
        mask = self.masks.folded().block(0, 0)
        if mask is None:
            return slice(0, self.key_lengths[0])
        return mask[0].common if len(mask) == 1 else None

    def gathered(self, visual: VisualFeatures, comm: Communicator, index: Tensor) -> Frames:
        """Return the frames with all ranks' features on every rank ("replicate").

        The features are gathered once for all layers; backward sums the ranks' gradients of each frame, also once.

        Args:
            visual: this rank's features.
            comm: the group.
            index: (units,), the index of all units.
        """
        counts = [span_length(spans) for spans in self.units]
        local, total = visual.features, visual.units
        parts = gather_shards(F.pad(local, (0, 0, 0, 0, 0, max(counts) - local.shape[0])), comm)
        features = in_frame_order(parts, self.units)
        every = replace(visual, features=features, index=copy_to_device(index, features.device))
        own = self._by_rank[comm.rank]
        return Frames(every, [own], [((0, own.total_frames),)], [((0, total),)], "replicated")


def select_strategy(
    context: SeqParContext,
    frames: Frames,
    visual: VisualFeatures,
    text: TextShards,
    index: Callable[[], Tensor],
    shape: CrossAttentionShape | None = None,
) -> Frames:
    """Select what `strategy="auto"` uses for a whole pass, and gather the features if the strategy is "replicate".

    Args:
        frames, text: of a pass with sharded rows.
        visual: the features behind `frames`.
        index: returns the index of all units (`VisualFeatures.index`), (units, ...).
        shape: of the cross-attention of all layers; None: each layer selects.
    """
    config = context.config
    if context.comm.size == 1:
        return frames
    if config.strategy == "auto" and shape is not None:
        assert context.selector is not None
        (probe,) = cast_for_attention(visual.features[:0])
        q_shape, k_shape = (text.batch, shape.heads, text.local, shape.dim), (1, shape.kv_heads)
        training = torch.is_grad_enabled()
        projection = VisualProjection(
            dim=visual.features.shape[2],
            layers=shape.layers,
            recompute=config.recompute_visual,
            trained=training and visual.features.requires_grad,  # the same on ranks without frames
        )
        frames.selection = context.selector.select(
            problem_of(q_shape, k_shape, frames.key_lengths, probe.dtype, config.accumulate_dtype),
            frames.masks,
            CROSS,
            probe,
            training=training,
            visual=projection,
        )
    if config.strategy == "replicate" or (frames.selection and frames.selection.spec.strategy == "replicate"):
        frames = frames.gathered(visual, context.comm, index())
    return frames


def _spans(
    source: KVSource, mask: FrameMask, sizes: FrameSizes | None, ranks: int
) -> tuple[Sequence[Spans], Sequence[Spans]]:
    """Return what every rank holds, in the numbers of the mask and in units of `source`."""
    if sizes is None:
        sizes = FrameSizes(mask.total_frames, source.units // max(1, mask.total_frames))
        sizes = mask.sizes if isinstance(mask.tokens_per_frame, Tensor) else sizes
    appended = isinstance(source, VisualKVCache) and source.earlier is not None
    frames = source.spans(ranks) if appended else sizes.spans(ranks, source.layout)  # type: ignore[union-attr]
    units = [sizes.units(spans) for spans in frames]
    return frames if mask.total_frames == sizes.total else units, units


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
            self._copies, self._chunks = visual.copies, frame_chunks(visual.features)

    def frames_of(self, mask: FrameMask, comm: Communicator) -> Frames:
        """Return the frames of a pass whose rows every rank has; those of the last pass if its mask was equal."""
        if self._last is None or not mask.equals(self._last[0]):
            self._last = mask, Frames.of_rows(self, mask, comm, self.sizes)
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
