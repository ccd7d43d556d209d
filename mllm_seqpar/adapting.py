"""What an adapter for a model of one's own is written with, in one place; the README has a worked example.

An adapter (`Adapter`) replaces forwards through `Patch.set`. The model's forward encodes the frames of this rank
(`frame_range`), says which text row sees which frames (`FrameMask`), and asks `sharded_call` for the pass; layers then
attend through it: ``call.attend(q, [call.text_keys(k, v)], scale)`` is the language model's causal attention, and
``call.cross_attend(q, layer, project, modules, scale)`` that to the frames of all ranks. Model classes of transformers
have more to them (caches, generation, batches with padding):
`mllm_seqpar.integrations.transformers.family.Family` does that, and `mllm_seqpar.patches.idefics.adapter` shows how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .comm.agreement import require_agreement, require_same_text
from .config import SeqParConfig
from .errors import AdapterError, AgreementError, ConfigError, SeqParError, ShapeError
from .masks import FrameMask
from .patching import Patch
from .patching.registry import Adapter
from .runtime.context import SeqParContext
from .runtime.forward_state import ForwardState, FrameState
from .runtime.loss import sharded_causal_lm_loss, shifted
from .runtime.text_shards import TextShards
from .runtime.visual_features import Projection, VisualFeatures
from .sharding import FrameShard, frame_bounds, frame_range

__all__ = [
    "Adapter",
    "AdapterError",
    "AgreementError",
    "ConfigError",
    "FrameMask",
    "FrameShard",
    "Patch",
    "Projection",
    "ForwardState",
    "SeqParConfig",
    "SeqParContext",
    "SeqParError",
    "ShapeError",
    "VisualFeatures",
    "TextShards",
    "FrameState",
    "require_agreement",
    "require_same_text",
    "frame_range",
    "sharded_call",
    "sharded_causal_lm_loss",
    "shifted",
]


def sharded_call(
    context: SeqParContext, features: Tensor, mask: FrameMask, *, valid: Tensor | None = None, units_per_frame: int = 1
) -> ForwardState:
    """The call of one forward pass whose text and frames are dealt to the ranks; `call.text` deals tensors like it.

    Args:
        context: what `Adapter.install` was given.
        features: (f, tokens, width), of the frames of this rank, `frame_range(total, context.comm)`; they carry the
            gradient to what encoded them. A rank may have none: (0, tokens, width).
        mask: what ALL text rows (B, L) see of the frames of all ranks; the same on every rank.
        valid: (B, L) bool, text keys that may be attended to (the attention mask); None: all.
        units_per_frame: when the mask speaks of parts of frames that one rank holds whole, such as the tiles of a
            picture: how many there are to each; f, above, then counts those parts.

    Raises:
        ConfigError: `self_attention="star"`, which is not made for this.
        ShapeError: features or `valid` that do not fit the mask.
        AgreementError: ranks that disagree about the text's or the frames' shape; on every rank.
    """
    comm, config = context.comm, context.config
    batch, length = mask.shape

    def describe() -> dict[str, int]:
        if config.self_attention == "star":
            raise ConfigError(
                'self_attention="star" reads the prompts of models of transformers into their caches; a model with an '
                'adapter of its own takes "ring", "mesh" or "ulysses"'
            )
        if mask.total_frames % units_per_frame:
            raise ShapeError(
                f"sharded_call: the mask speaks of {mask.total_frames} units, which are no whole frames of "
                f"{units_per_frame} (units_per_frame)"
            )
        start, stop = _own(context, mask, units_per_frame)
        if features.dim() != 3 or features.shape[:2] != (stop - start, mask.tokens_per_frame):
            raise ShapeError(
                f"sharded_call: features are {tuple(features.shape)}; rank {comm.rank} of {comm.size} holds "
                f"{stop - start} of {mask.total_frames} frames (frame_range), so ({stop - start}, "
                f"{mask.tokens_per_frame}, width) is expected, with the mask's tokens per frame"
            )
        if valid is not None and tuple(valid.shape) != (batch, length):
            raise ShapeError(f"sharded_call: valid is {tuple(valid.shape)}, the mask is for {(batch, length)} tokens")
        return {
            "samples": batch,
            "text tokens": length,
            "frames": mask.total_frames,
            "tokens per frame": mask.tokens_per_frame,
            "gradients wanted": torch.is_grad_enabled(),
        }

    names = ("samples", "text tokens", "frames", "tokens per frame", "gradients wanted")
    require_agreement(comm, "forward pass", names, describe)
    start, stop = _own(context, mask, units_per_frame)
    text = TextShards(batch, length, comm, config.text_layout, valid)
    visual = VisualFeatures(features, torch.arange(start, stop, device=features.device), mask.total_frames)
    context.report_shares((text.local, length), (stop - start, mask.total_frames))
    shards = FrameState.of(visual, mask, text, units_per_frame)
    if config.strategy == "replicate" and comm.size > 1:
        shards = shards.gathered(comm, torch.arange(mask.total_frames))
    return ForwardState(context, text=text, frames=shards)


def _own(context: SeqParContext, mask: FrameMask, units_per_frame: int) -> tuple[int, int]:
    """(start, stop) of this rank's units."""
    bounds = frame_bounds(mask.total_frames // units_per_frame, context.comm.size)
    start, stop = bounds[context.comm.rank]
    return start * units_per_frame, stop * units_per_frame
