"""The state of a forward pass with sharded text and frames, for adapters of models that are not of transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import frames_of_shards
from mllm_seqpar.runtime.text import TextShards
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.sharding import FrameSizes


class ShardedState(ForwardState):
    """The state of a pass whose text is sharded, so that it always has `text`."""

    text: TextShards


def sharded_call(
    context: SeqParContext,
    features: Tensor,
    mask: FrameMask,
    *,
    encode: Callable[[Tensor], Tensor] | None = None,
    valid: Tensor | None = None,
    units_per_frame: int = 1,
) -> ShardedState:
    """Return the state of a forward pass with sharded text and frames; `state.text` shards other tensors alike.

    Args:
        context: the argument of `Adapter.install`.
        features: (f, tokens, width), the features of this rank's frames, `frame_range(total, context.comm)`. Their
            gradient flows back to the encoder. A rank without frames passes (0, tokens, width). With `encode`, the
            frames of all ranks (total, ...).
        mask: the frames of all ranks that ALL text rows (B, L) attend to; the same on every rank.
        encode: returns the features of this rank's frames (f, ...), which may be none.
        valid: (B, L) bool, text keys that may be attended to (the attention mask); None: all.
        units_per_frame: if the mask's units are parts of frames that one rank holds whole, such as image tiles: how
            many make one frame. f, above, then counts units. If the mask's frames differ in size, f counts tokens, and
            features are (f, 1, width).

    Raises:
        ConfigError: `self_attention="star"`, which needs a cache, or "local", which does not shard the text.
        ShapeError: the features or `valid` do not match the mask.
        AgreementError: on every rank if the ranks pass text or frames of different shapes.
    """
    comm, config, (batch, length) = context.comm, context.config, mask.shape
    per_frame = mask.tokens_per_frame
    if isinstance(per_frame, Tensor):
        sizes, tokens = mask.sizes, 1
    else:
        sizes, tokens = FrameSizes(mask.total_frames // max(1, units_per_frame), units_per_frame), per_frame

    (start, stop), *_ = sizes.spans(comm.size)[comm.rank] or ((0, 0),)
    (first, last), *_ = sizes.units(((start, stop),))

    def check_features(own: Tensor) -> None:
        if own.dim() != 3 or own.shape[:2] != (last - first, tokens):
            raise ShapeError(
                f"sharded_call: features are {tuple(own.shape)}; rank {comm.rank} of {comm.size} holds "
                f"{last - first} of {sizes.count()} {'frames' if tokens > 1 else 'units'} (frame_range), so "
                f"({last - first}, {tokens}, width) is expected, with the mask's tokens per frame"
            )

    def check() -> None:
        refused = {"star": "needs the cache of a transformers model", "local": "does not shard the text"}
        if config.self_attention in refused:
            raise ConfigError(
                f'self_attention="{config.self_attention}" {refused[config.self_attention]}; with this adapter choose '
                '"ring", "mesh", "ulysses" or "auto"'
            )
        if mask.total_frames % units_per_frame:
            raise ShapeError(
                f"sharded_call: the mask has {mask.total_frames} units, which is not a multiple of units_per_frame="
                f"{units_per_frame}"
            )
        if encode is None:
            check_features(features)
        elif len(features) != sizes.total:
            raise ShapeError(
                f"sharded_call: {len(features)} frames were passed to be encoded, and the mask has {sizes.total}; pass "
                "the frames of all ranks"
            )
        if valid is not None and tuple(valid.shape) != (batch, length):
            raise ShapeError(f"sharded_call: valid is {tuple(valid.shape)}, the mask is for {(batch, length)} tokens")

    facts: dict[str, object] = {"samples": batch, "text tokens": length, "frames": mask.total_frames}
    facts |= {"tokens per frame": mask.sizes.fact, "grad mode": torch.is_grad_enabled()}
    agree(comm, "forward pass", check, lambda _: facts)
    own = features
    if encode is not None:  # only now, because an encoder that FSDP shards communicates
        encoded, error = attempt(lambda: encode(features[start:stop]))
        agree(comm, "features", lambda: None if encoded is None else check_features(encoded), error=error)
        assert encoded is not None
        own = encoded
    units = torch.arange(first, last, device=own.device)  # the encoder may move frames to another device
    text = TextShards(batch, length, comm, config.text_layout, valid)
    visual = VisualFeatures(own, units, sizes.count(), config.recompute_visual)
    context.count_shards((text.local, length), (len(units), sizes.count()))
    frames = frames_of_shards(context, visual, mask, text, sizes, lambda: torch.arange(sizes.count()))
    return ShardedState(context, text=text, frames=frames)
