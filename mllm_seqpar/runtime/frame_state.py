"""The frames of one forward pass: this rank's features, and which of them the rows of each rank may attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.call_spec import problem_of
from mllm_seqpar.attention.kv_sources import as_attended
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks, FrameMask
from mllm_seqpar.sharding import frame_bounds

from .context import SeqParContext
from .strategy_selector import CrossAttentionShape, SelectedStrategy
from .text_shards import TextShards
from .visual_features import VisualFeatures


@dataclass(frozen=True)
class FrameState:
    """The frames of one forward pass: this rank's features, and the frame mask of this pass.

    Attributes:
        visual: this rank's features.
        masks: the mask rectangles of every block.
        key_lengths: the number of visual keys on every rank.
        any_frame_visible: (B, s) bool, this rank's rows that attend to any frame, on the device of the features.
        replicated: whether every rank holds the features of all frames.
        selection: the strategy that "auto" selected for the whole pass, if it did.
    """

    visual: VisualFeatures
    masks: BlockMasks
    key_lengths: tuple[int, ...]
    any_frame_visible: Tensor
    replicated: bool = False
    selection: SelectedStrategy | None = None

    @classmethod
    def of(cls, visual: VisualFeatures, mask: FrameMask, text: TextShards, units_per_frame: int = 1) -> FrameState:
        """Return the state for a mask of ALL text rows (B, L) in order; padding rows attend to nothing.

        Args:
            visual: this rank's features.
            mask: the mask over units, `units_per_frame` of which make a frame; a frame is never split over ranks.
            text: the sharding of the rows.
            units_per_frame: the number of image tiles of a picture, for example.
        """
        padded = FrameMask(
            None if mask.bounds is None else (text.pad(mask.bounds[0], 1), text.pad(mask.bounds[1], 1)),
            None if mask.visible is None else text.pad(mask.visible, 1),
            mask.tokens_per_frame,
            mask.total_frames,
        )
        bounds = frame_bounds(mask.total_frames // units_per_frame, text.comm.size)
        units = [(start * units_per_frame, stop * units_per_frame) for start, stop in bounds]
        by_rank = [padded.take(text.positions(rank)) for rank in range(text.comm.size)]
        key_lengths = tuple((stop - start) * mask.tokens_per_frame for start, stop in units)
        visible = copy_to_device(by_rank[text.comm.rank].any_frame_visible(), visual.index.device)
        return cls(visual, FrameBlockMasks(by_rank, units), key_lengths, visible)

    def gathered(self, comm: Communicator, index: Tensor) -> FrameState:
        """Return the state with all ranks' features on every rank ("replicate").

        The features are gathered once for all layers; backward sums the ranks' gradients of each frame, also once.

        Args:
            comm: the group.
            index: (units,), the index of all units.
        """
        assert isinstance(self.masks, FrameBlockMasks)
        counts = [stop - start for start, stop in self.masks.frames]
        local = self.visual.features
        parts = gather_shards(F.pad(local, (0, 0, 0, 0, 0, max(counts) - local.shape[0])), comm)
        features = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        total = self.visual.total_frames
        return replace(
            self,
            visual=VisualFeatures(features, copy_to_device(index, features.device), total),
            masks=FrameBlockMasks(self.masks.masks, [(0, total)] * comm.size),
            key_lengths=(features.shape[0] * features.shape[1],) * comm.size,
            replicated=True,
        )


def select_for_pass(
    context: SeqParContext, shape: CrossAttentionShape, text: TextShards, frames: FrameState
) -> FrameState:
    """Return the frames with what "auto" selects for all cross-attention layers of the pass, possibly replication."""
    features, config = frames.visual.features, context.config
    (probe,) = as_attended(features[:0])
    q_shape, k_shape = (text.batch, shape.heads, text.local, shape.dim), (1, shape.kv_heads)
    assert context.selector is not None
    selection = context.selector.select_for_pass(
        problem_of(q_shape, k_shape, frames.key_lengths, probe.dtype, config.accumulate_dtype),
        frames.masks,
        probe,
        training=torch.is_grad_enabled(),
        visual_dim=features.shape[2],
        layers=shape.layers,
        recompute=config.recompute_visual,
    )
    return replace(frames, selection=selection)
