"""The frames of a pass: which of them rows may attend to, on which ranks they are, and how layers attend to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.call_spec import CallSpec, Placement, problem_of
from mllm_seqpar.attention.keys import Keys, cast_for_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec
from mllm_seqpar.sharding import FrameSizes, Spans, in_frame_order, span_length

from .context import SeqParContext
from .projections import Projection
from .strategy_selector import CROSS, CrossAttentionShape, VisualProjection
from .text import TextShards
from .visual_features import VisualFeatures


class KVSource(Protocol):
    """Where the K and V of frames come from: features of the pass, which layers project, or a cache (`VisualKVCache`).

    Attributes:
        units: the number of mask units on all ranks.
        tokens_per_unit: keys of one unit.
        empty_features: features of no frames, on the device that computes.
    """

    @property
    def units(self) -> int: ...

    @property
    def tokens_per_unit(self) -> int: ...

    @property
    def empty_features(self) -> VisualFeatures: ...

    def frames_by_rank(self, sizes: FrameSizes, ranks: int) -> Sequence[Spans]:
        """Return the frames of every rank, in the order in which it holds them, given the size of each frame."""

    def keys(self, layer: Hashable, spec: CallSpec, project: Projection, dtype: torch.dtype) -> Keys:
        """Return the keys of a layer, which identifies itself by `layer`."""


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
        self.selection: ParallelSpec | None = None
        self.kv_heads: int | None = None
        self.specs: dict[Hashable, CallSpec] = {}

    @classmethod
    def of_shards(cls, source: KVSource, mask: FrameMask, text: TextShards, sizes: FrameSizes) -> Frames:
        """Return the frames of a pass with sharded rows, given the mask of ALL rows (B, L) in order.

        Args:
            source: where K and V come from.
            mask: the mask over frames, or over their units (`_spans`). Padding rows attend to nothing.
            text: the sharding of the rows.
            sizes: how many units of `source` each frame has; a frame is never split over ranks.
        """
        padded = FrameMask(text.pad(mask.bounds, -1), mask.sizes)
        by_rank = [padded.take(text.positions(rank)) for rank in range(text.comm.size)]
        return cls(source, by_rank, *_spans(source, mask, sizes, text.comm.size))

    @classmethod
    def of_rows(cls, source: KVSource, mask: FrameMask, comm: Communicator, sizes: FrameSizes) -> Frames:
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

        `visual` are this rank's features, and `index` (units, ...) is that of all units. The features are gathered once
        for all layers; backward sums the ranks' gradients of each frame, also once.
        """
        counts = [span_length(spans) for spans in self.units]
        local, total = visual.features, visual.units
        parts = gather_shards(F.pad(local, (0, 0, 0, 0, 0, max(counts) - local.shape[0])), comm)
        features = in_frame_order(parts, self.units)
        every = replace(visual, features=features, index=copy_to_device(index, features.device))
        own = self._by_rank[comm.rank]
        return Frames(every, [own], [((0, own.total_frames),)], [((0, total),)], "replicated")


def frames_of_shards(
    context: SeqParContext,
    source: KVSource,
    mask: FrameMask,
    text: TextShards,
    sizes: FrameSizes,
    index: Callable[[], Tensor],
    shape: CrossAttentionShape | None = None,
) -> Frames:
    """Return the frames of a pass with sharded rows, and what `strategy="auto"` selects for all its layers.

    With "replicate", named or selected, they are features gathered on every rank, and `index` returns the index of all
    units. `shape` is that of the cross-attention of all layers; None: each layer selects. The other arguments are those
    of `Frames.of_shards`.
    """
    frames, config = Frames.of_shards(source, mask, text, sizes), context.config
    if isinstance(source, VisualFeatures) and context.comm.size > 1:
        if config.strategy == "auto" and shape is not None:
            assert context.selector is not None
            (probe,) = cast_for_attention(source.features[:0])
            q_shape, k_shape = (text.batch, shape.heads, text.local, shape.dim), (1, shape.kv_heads)
            training = torch.is_grad_enabled()
            projection = VisualProjection(
                dim=source.features.shape[2],
                layers=shape.layers,
                recompute=config.recompute_visual,
                trained=training and source.features.requires_grad,  # the same on ranks without frames
            )
            frames.selection = context.selector.select(
                problem_of(q_shape, k_shape, frames.key_lengths, probe.dtype, config.accumulate_dtype),
                frames.masks,
                CROSS,
                probe,
                training=training,
                visual=projection,
            )
        if config.strategy == "replicate" or (frames.selection and frames.selection.strategy == "replicate"):
            frames = frames.gathered(source, context.comm, index())
    frames.kv_heads = None if shape is None else shape.kv_heads
    return frames


def _spans(source: KVSource, mask: FrameMask, sizes: FrameSizes, ranks: int) -> tuple[Sequence[Spans], Sequence[Spans]]:
    """Return what every rank holds, in the numbers of the mask and in units of `source`.

    A mask has a column for each frame or for each unit. For example, on 2 ranks, rank 1 holds of

        4 frames of 3 image tiles, with a mask over the 12 tiles               (6, 12) of the mask, and units (6, 12);
        4 frames of 4, 4, 4 and 12 single tokens, with a mask over frames      (3, 4) of the mask, and units (12, 24).
    """
    frames = source.frames_by_rank(sizes, ranks)
    units = [sizes.units(spans) for spans in frames]
    return frames if mask.total_frames == sizes.total else units, units
