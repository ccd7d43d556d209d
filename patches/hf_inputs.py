"""What a caller passes to a transformers model, looked at once: lengths, frames, and whether the ranks agree on them.

Shape legend: B samples, L text tokens, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mllm_seqpar.agreement import agree
from mllm_seqpar.comm import Communicator
from mllm_seqpar.context import SeqParContext
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.sharding import FrameShard, frame_bounds

_NAMES = (
    "samples",
    "text tokens",
    "frames",
    "frames given by visual_shard",
    "values per frame",
    "kind of frames (1 pixels, 2 features)",
    "cached tokens",
    "labels given",
    "attention mask given",
    "checksum of token ids",
    "checksum of labels",
    "checksum of the attention mask",
    "gradients wanted",
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one forward pass.

    Attributes:
        input_ids, inputs_embeds: (B, L) or (B, L, width); exactly one of them.
        attention_mask: (B, tokens so far) or None.
        position_ids: (B or 1, L) or None.
        labels, shift_labels: (B, L) or None.
        frames: (F, ...) pixels or features, or with `visual_shard` this rank's (f, ...); None without frames.
        frames_are_features: which of the two they are.
        both_kinds: the caller passed both, which is refused.
        visual_shard: this rank's part of the frames, when `frames` holds only that.
        past_key_values: the cache, or None.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    labels: Tensor | None
    shift_labels: Tensor | None
    frames: Tensor | None
    frames_are_features: bool
    both_kinds: bool
    visual_shard: FrameShard | None
    past_key_values: Any

    @property
    def text(self) -> Tensor:
        """Whichever of token ids and embeddings was given."""
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise ShapeError("pass either input_ids or inputs_embeds")
        text = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert text is not None
        return text

    @property
    def batch(self) -> int:
        """B."""
        return self.text.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self.text.shape[1]

    @property
    def past_length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())

    @property
    def total_frames(self) -> int:
        """F."""
        if self.frames is None:
            return 0
        return self.visual_shard.total if self.visual_shard is not None else self.frames.shape[0]

    def positions(self) -> Tensor:
        """(B or 1, L) rotary positions; from the cache's length on when none were given."""
        if self.position_ids is not None:
            return self.position_ids
        start = self.past_length
        return torch.arange(start, start + self.length, device=self.text.device)[None]

    def target_labels(self) -> Tensor | None:
        """(B, L) labels, shifted, or None."""
        from mllm_seqpar.loss import shifted

        if self.shift_labels is not None:
            return self.shift_labels
        return None if self.labels is None else shifted(self.labels)


def agree_on_inputs(comm: Communicator, inputs: Inputs) -> None:
    """Raises on every rank of the group unless all pass the same text and the same number of frames.

    Raises:
        ShapeError: on the rank whose own inputs do not fit together; AgreementError: on the other ranks.
    """
    agree(comm, "forward pass", _NAMES, lambda: _numbers(comm, inputs))


def _numbers(comm: Communicator, inputs: Inputs) -> dict[str, int]:
    _check_frames(comm, inputs)
    labels = inputs.shift_labels if inputs.shift_labels is not None else inputs.labels
    kind = 0 if inputs.frames is None else 1 + inputs.frames_are_features
    values = (
        inputs.batch,
        inputs.length,
        inputs.total_frames,
        int(inputs.visual_shard is not None),
        0 if inputs.frames is None else inputs.frames[0:0].numel() or _product(inputs.frames.shape[1:]),
        kind,
        inputs.past_length,
        int(labels is not None),
        int(inputs.attention_mask is not None),
        _checksum(inputs.input_ids),
        _checksum(labels),
        _checksum(inputs.attention_mask),
        int(torch.is_grad_enabled()),
    )
    return dict(zip(_NAMES, values, strict=True))


def _check_frames(comm: Communicator, inputs: Inputs) -> None:
    shard, frames = inputs.visual_shard, inputs.frames
    if inputs.both_kinds:
        raise ShapeError("pass either pixel_values or image_embeds, not both")
    if shard is None:
        return
    if not isinstance(shard, FrameShard):
        raise ShapeError(f"visual_shard: expected a FrameShard(start, stop, total), got {type(shard).__name__}")
    expected = frame_bounds(shard.total, comm.size)[comm.rank]
    if (shard.start, shard.stop) != expected:
        raise ShapeError(
            f"visual_shard: rank {comm.rank} of {comm.size} holds frames {expected[0]} to {expected[1]} of "
            f"{shard.total} (frame_range), but {shard} was given"
        )
    if frames is not None and frames.shape[0] != shard.stop - shard.start:
        raise ShapeError(
            f"visual_shard: {shard} means {shard.stop - shard.start} frames, {frames.shape[0]} were passed"
        )


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _checksum(x: Tensor | None) -> int:
    """A number that changes when an entry does, or two change places."""
    if x is None:
        return 0
    x = x.reshape(-1).long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 2654435761 % 2147483647
    return int(((x + 1) * weights).sum())


def needs_every_module(model: nn.Module) -> bool:
    """Whether skipping a module on one rank stalls the others: FSDP2 gathers parameters as a module's forward runs."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def local_features(
    model: Any, context: SeqParContext, inputs: Inputs, encode: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """(f, tokens, width): the features of this rank's frames; the vision tower runs on those only.

    A rank without frames runs the tower on one empty frame and keeps nothing of it, so that its parameters get zero
    gradients rather than none and FSDP's gathers stay in step. For the same reason a batch without any frame encodes
    one under FSDP, which no token sees; otherwise it gives None.
    """
    frames, total = inputs.frames, inputs.total_frames
    rank, size = context.comm.rank, context.comm.size
    weight = next(p for p in model.get_input_embeddings().parameters())
    if total == 0:
        if not needs_every_module(model):
            return None
        blank = encode(_blank_frame(model, weight))
        return blank if rank == 0 else blank[:0]
    assert frames is not None
    if inputs.visual_shard is None:
        start, stop = frame_bounds(total, size)[rank]
        frames = frames[start:stop]
    if inputs.frames_are_features:
        dtype = frames.dtype if torch.is_autocast_enabled(weight.device.type) else weight.dtype
        return frames.to(device=weight.device, dtype=dtype)
    if frames.shape[0]:
        return encode(frames)
    return encode(_blank_frame(model, weight))[:0]


def _blank_frame(model: Any, weight: Tensor) -> Tensor:
    vision = model.config.vision_config
    shape = (1, vision.num_channels, vision.image_size, vision.image_size)
    return torch.zeros(shape, device=weight.device, dtype=weight.dtype)
