"""The frames of one forward pass: which of them rows may attend to, and where their K and V come from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.call_spec import CallSpec, Placement
from mllm_seqpar.attention.keys import Keys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.masks import FrameBlockMasks, FrameMask
from mllm_seqpar.sharding import Spans, frame_spans, in_frame_order, span_length

from .kv_projection import Projection
from .strategy_selector import SelectedStrategy
from .text_shards import TextShards
from .visual_features import VisualFeatures


class FrameSource(Protocol):
    """Where the K and V of frames come from: the features of the frames, or a cache."""

    def keys(
        self, layer: Hashable, spec: CallSpec, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> Keys:
        """Return the keys of a layer; the arguments are those of `ForwardState.frame_keys`."""

    @property
    def no_frames(self) -> VisualFeatures:
        """Features of no frames, on the device that computes."""

    @property
    def layout(self) -> str:
        """How the frames map to ranks; see `sharding.frame_spans`."""


class Frames:
    """The frames of one pass.

    Attributes:
        source: where K and V come from.
        masks: the mask rectangles of every block; with replicated rows, or replicated frames, those of this rank alone.
        key_lengths: the number of visual keys on every rank that `masks` has.
        placement: whether each rank has its own frames, or all of them.
        selection: the strategy that "auto" selected for the whole pass, if it did.
        specs: the call specs, by the shapes that they are for.
    """

    def __init__(
        self, source: FrameSource, masks: FrameBlockMasks, tokens: int, placement: Placement = "sharded"
    ) -> None:
        self.source, self.masks, self.placement = source, masks, placement
        self.key_lengths = tuple(span_length(frames) * tokens for frames in masks.frames)
        self.selection: SelectedStrategy | None = None
        self.specs: dict[Hashable, CallSpec] = {}

    @classmethod
    def of_shards(cls, source: FrameSource, mask: FrameMask, text: TextShards, units_per_frame: int = 1) -> Frames:
        """Return the frames of a pass with sharded rows, given the mask of ALL rows (B, L) in order.

        Args:
            source: where K and V come from.
            mask: the mask over units, `units_per_frame` of which make a frame; a frame is never split over ranks.
                Padding rows attend to nothing.
            text: the sharding of the rows.
            units_per_frame: the number of image tiles of an image, for example.
        """
        padded = FrameMask(
            None if mask.bounds is None else (text.pad(mask.bounds[0], 1), text.pad(mask.bounds[1], 1)),
            None if mask.visible is None else text.pad(mask.visible, 1),
            mask.tokens_per_frame,
            mask.total_frames,
        )
        by_rank = [padded.take(text.positions(rank)) for rank in range(text.comm.size)]
        units = unit_spans(mask.total_frames, units_per_frame, text.comm, source.layout)
        return cls(source, FrameBlockMasks(by_rank, units), mask.tokens_per_frame)

    @classmethod
    def of_rows(cls, source: FrameSource, mask: FrameMask, comm: Communicator, units_per_frame: int = 1) -> Frames:
        """Return the frames of a pass with rows that every rank has."""
        own = unit_spans(mask.total_frames, units_per_frame, comm, source.layout)[comm.rank]
        return cls(source, FrameBlockMasks([mask], [own]), mask.tokens_per_frame)

    def gathered(self, visual: VisualFeatures, comm: Communicator, index: Tensor) -> Frames:
        """Return the frames with all ranks' features on every rank ("replicate").

        The features are gathered once for all layers; backward sums the ranks' gradients of each frame, also once.

        Args:
            visual: this rank's features.
            comm: the group.
            index: (units,), the index of all units.
        """
        counts = [span_length(spans) for spans in self.masks.frames]
        local, total = visual.features, visual.total_frames
        parts = gather_shards(F.pad(local, (0, 0, 0, 0, 0, max(counts) - local.shape[0])), comm)
        features = in_frame_order(parts, self.masks.frames)
        every = replace(visual, features=features, index=copy_to_device(index, features.device))
        own = FrameBlockMasks([self.masks.masks[comm.rank]], [((0, total),)])
        return Frames(every, own, features.shape[1], "replicated")


def unit_spans(units: int, units_per_frame: int, comm: Communicator, layout: str) -> Sequence[Spans]:
    """Return the ranges of units of each rank, which holds whole frames in a layout."""
    by_rank = frame_spans(units // units_per_frame, comm.size, layout)
    if units_per_frame == 1:
        return by_rank
    return [tuple((start * units_per_frame, stop * units_per_frame) for start, stop in spans) for spans in by_rank]
