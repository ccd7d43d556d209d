"""The public toolkit for model adapters.

An adapter (`Adapter`) replaces forwards through `Patch.set`. The model's forward encodes the frames of this rank
(`frame_range`), states which text rows attend to which frames (`FrameMask`), and creates the state of the pass with
`sharded_call`. Layers then attend through it. ``state.attend(q, [state.text_keys(q, k, v)], scale)`` is the language
model's causal attention, and ``state.attend(q, [state.frame_keys(q, layer, project)], scale)`` the attention to the
frames of all ranks; keys in one list share a softmax. `project` is a `KVProjection` or another function. Models of
transformers need more (caches, generation, padded batches), which `mllm_seqpar.integrations.transformers.family.Family`
provides; `mllm_seqpar.patches.idefics.adapter` is an example.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention.keys import as_attended
from .comm import Communicator
from .comm.agreement import agree
from .comm.autograd import gather_shards
from .config import SeqParConfig
from .errors import AdapterError, AgreementError, ConfigError, SeqParError, ShapeError
from .masks import FrameMask
from .patching import Patch
from .patching.registry import Adapter
from .runtime.context import SeqParContext
from .runtime.forward_state import ForwardState
from .runtime.frames import Frames
from .runtime.kv_projection import KVProjection, Projection
from .runtime.loss import sharded_causal_lm_loss, shifted
from .runtime.text import TextShards
from .runtime.visual_features import VisualFeatures
from .sharding import FrameShard, frame_bounds, frame_range

if TYPE_CHECKING:
    from .integrations.transformers.attention import (
        causal_mask,
        merge_heads,
        refuse_dropout,
        split_heads,
        text_keys,
        use_seqpar_attention,
    )

_OF_TRANSFORMERS = ("causal_mask", "merge_heads", "refuse_dropout", "split_heads", "text_keys", "use_seqpar_attention")
"""Names for models of transformers, which is imported when one of them is first used."""

__all__ = [
    "Adapter",
    "AdapterError",
    "AgreementError",
    "Communicator",
    "ConfigError",
    "FrameMask",
    "FrameShard",
    "KVProjection",
    "Patch",
    "Projection",
    "ForwardState",
    "SeqParConfig",
    "SeqParContext",
    "SeqParError",
    "ShapeError",
    "VisualFeatures",
    "TextShards",
    "Frames",
    "agree",
    "as_attended",
    "causal_mask",
    "gather_shards",
    "merge_heads",
    "refuse_dropout",
    "split_heads",
    "text_keys",
    "use_seqpar_attention",
    "frame_range",
    "sharded_call",
    "sharded_causal_lm_loss",
    "shifted",
]


def __getattr__(name: str) -> Any:
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mllm_seqpar.integrations.transformers.attention"), name)


def sharded_call(
    context: SeqParContext, features: Tensor, mask: FrameMask, *, valid: Tensor | None = None, units_per_frame: int = 1
) -> ForwardState:
    """Return the state of a forward pass with sharded text and frames; `state.text` shards other tensors alike.

    Args:
        context: the argument of `Adapter.install`.
        features: (f, tokens, width), the features of this rank's frames, `frame_range(total, context.comm)`. Their
            gradient flows back to the encoder. A rank without frames passes (0, tokens, width).
        mask: the frames of all ranks that ALL text rows (B, L) attend to; the same on every rank.
        valid: (B, L) bool, text keys that may be attended to (the attention mask); None: all.
        units_per_frame: if the mask's units are parts of frames that one rank holds whole, such as image tiles: how
            many make one frame. f, above, then counts units.

    Raises:
        ConfigError: `self_attention="star"`, which needs a cache.
        ShapeError: the features or `valid` do not match the mask.
        AgreementError: on every rank if the ranks pass text or frames of different shapes.
    """
    comm, config = context.comm, context.config
    batch, length = mask.shape

    def describe() -> dict[str, Any]:
        if config.self_attention == "star":
            raise ConfigError(
                'self_attention="star" needs the cache of a transformers model; with this adapter choose "ring", '
                '"mesh" or "ulysses"'
            )
        if mask.total_frames % units_per_frame:
            raise ShapeError(
                f"sharded_call: the mask has {mask.total_frames} units, which is not a multiple of units_per_frame="
                f"{units_per_frame}"
            )
        start, stop = _local_units(context, mask, units_per_frame)
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
            "grad mode": torch.is_grad_enabled(),
        }

    agree(comm, "forward pass", describe, dict)
    start, stop = _local_units(context, mask, units_per_frame)
    text = TextShards(batch, length, comm, config.text_layout, valid)
    index = torch.arange(start, stop, device=features.device)
    visual = VisualFeatures(features, index, mask.total_frames, config.recompute_visual)
    context.log_shard_sizes((text.local, length), (stop - start, mask.total_frames))
    frames = Frames.of_shards(visual, mask, text, units_per_frame)
    if config.strategy == "replicate" and comm.size > 1:
        frames = frames.gathered(visual, comm, torch.arange(mask.total_frames))
    return ForwardState(context, text=text, frames=frames)


def _local_units(context: SeqParContext, mask: FrameMask, units_per_frame: int) -> tuple[int, int]:
    bounds = frame_bounds(mask.total_frames // units_per_frame, context.comm.size)
    start, stop = bounds[context.comm.rank]
    return start * units_per_frame, stop * units_per_frame
