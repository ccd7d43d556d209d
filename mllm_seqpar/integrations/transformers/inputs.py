"""What a caller passes to a transformers model, looked at once: lengths, frames, and whether the ranks agree on them.

Shape legend: B samples, L text tokens, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import require_agreement
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.visual_features import checksum, sampled_bits
from mllm_seqpar.sharding import FrameShard, frame_bounds

from .cache import cache_state

_NAMES = (
    "samples",
    "text tokens",
    "frames",
    "frames given by visual_shard",
    "values per frame",
    "kind of frames (1 pixels, 2 features)",
    "cached tokens",
    "cache asked for",
    "gradients wanted",
    "labels given",
    "attention mask given",
    "checksum of token ids",
    "checksum of labels",
    "checksum of the attention mask",
    "checksum of position ids",
    "checksum of what says where the frames belong",
    "checksum of pixels",
    "checksum of weights",
    "training mode",
    "autocast (checksum of its dtype)",
    "checksum of the inputs' dtypes",
    "num_items_in_batch",
    "checksum of further arguments",
    "gradient checkpointing",
    "checksum of which parameters train",
)
_SAMPLED_WEIGHTS = 16  # of each parameter


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """The inputs of one forward pass.

    Attributes:
        input_ids, inputs_embeds: (B, L) or (B, L, width); exactly one of them.
        attention_mask: (B, tokens so far) or None; over a static cache also what `generate` prepares of it.
        position_ids: (B or 1, L) or None.
        labels, shift_labels: (B, L) or None.
        frames: (F, ...) pixels or features, or with `visual_shard` this rank's (f, ...); None without frames.
        frames_are_features: which of the two they are.
        both_kinds: the caller passed both, which is refused.
        visual_shard: this rank's part of the frames, when `frames` holds only that.
        places: what else says where frames belong in the text, to be compared between ranks.
        past_key_values: the cache, or None.
        use_cache: whether a cache is used or to be made.
        packed: whether positions tell packed sequences apart when there is no mask: where the unpatched model would
            make no cache, as everywhere in transformers.
        extras: (F, ...) or (f, ...) each: what else belongs to each frame, its aspect ratio for example.
        frame_names: the arguments that frames come by, pixels first, for messages.
        compare_frames: whether frames that all ranks have must be the same to the bit; what was computed may differ.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Any
    position_ids: Tensor | None
    labels: Tensor | None
    shift_labels: Tensor | None
    frames: Tensor | None
    frames_are_features: bool
    both_kinds: bool
    visual_shard: FrameShard | None
    places: tuple[Tensor, ...]
    past_key_values: Any
    use_cache: bool
    packed: bool
    extras: tuple[Tensor, ...] = ()
    frame_names: tuple[str, ...] = ("pixel_values", "image_embeds")
    compare_frames: bool = True

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

    @property
    def rows(self) -> Tensor:
        """(B,) int64: the row of the frames' own pass that each row continues; rows of a cache may have moved since."""
        beside = cache_state(self.past_key_values) if self.past_length else None
        return torch.arange(self.batch) if beside is None else beside.rows_of(self.batch)

    def positions(self) -> Tensor:
        """(B or 1, L) rotary positions; from the cache's length on when none were given."""
        if self.position_ids is not None:
            return self.position_ids
        start = self.past_length
        return torch.arange(start, start + self.length, device=self.text.device)[None]

    def target_labels(self, ignore_index: int | None = None) -> Tensor | None:
        """(B, L) labels, shifted, or None; the last token has none, which `ignore_index` (None: -100) says."""
        from mllm_seqpar.runtime.loss import shifted

        if self.shift_labels is not None:
            return self.shift_labels
        return None if self.labels is None else shifted(self.labels, ignore_index)


def require_same_inputs(
    comm: Communicator,
    inputs: ForwardInputs,
    check: Callable[[], None],
    model: nn.Module | None = None,
    facts: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Raises on every rank of the group unless all pass the same text, the same number of frames, and the same pixels.

    Token ids, masks, positions and labels are compared by checksums. So are the pixels, by a sample of them, where
    every rank has all; features may differ in their last bits from device to device, and are compared by shape.

    Args:
        comm: the group.
        inputs: what this rank was given.
        check: the model family's own checks; what it raises, the other ranks are told of.
        model: whose weights are compared too, by a sample of them; None: not in this pass.
        facts: further numbers of `_NAMES`.

    Raises:
        SeqParError: on the rank whose own inputs do not fit together; AgreementError: on the other ranks.
    """

    def describe() -> dict[str, int]:
        _check_frames(comm, inputs)
        check()
        return {**_numbers(inputs, model), **facts()}

    require_agreement(comm, "forward pass", _NAMES, describe)


def _numbers(inputs: ForwardInputs, model: nn.Module | None) -> dict[str, int]:
    labels = inputs.shift_labels if inputs.shift_labels is not None else inputs.labels
    frames = inputs.frames
    kind = 0 if frames is None else 1 + inputs.frames_are_features
    counts = [
        inputs.batch,
        inputs.length,
        inputs.total_frames,
        inputs.visual_shard is not None,
        0 if frames is None else math.prod(frames.shape[1:]),
        kind,
        inputs.past_length,
        inputs.use_cache,
        torch.is_grad_enabled(),
        labels is not None,
        inputs.attention_mask is not None,
    ]
    everyone_has_all_pixels = frames is not None and kind == 1 and inputs.visual_shard is None and inputs.compare_frames
    checksums = [
        checksum(inputs.input_ids),
        checksum(labels),
        checksum(*_mask_tensors(inputs.attention_mask)),
        checksum(inputs.position_ids),
        checksum(*inputs.places, inputs.rows.to(inputs.text.device) if inputs.past_length else None),
        checksum(sampled_bits(frames)) if everyone_has_all_pixels and frames is not None else torch.zeros(()),
        torch.zeros(()) if model is None else checksum(*_sampled_weights(model)),
    ]
    device = inputs.text.device
    read = torch.stack([x.to(device, torch.long) for x in checksums]).tolist()  # one wait for the device, not six
    return dict(zip(_NAMES, [*map(int, counts), *read], strict=False))  # the rest comes from the caller


def _check_frames(comm: Communicator, inputs: ForwardInputs) -> None:
    shard, frames = inputs.visual_shard, inputs.frames
    if inputs.both_kinds:
        raise ShapeError(f"pass either {' or '.join(inputs.frame_names)}, not both")
    if shard is None or (frames is None and inputs.past_length):  # `generate` goes on passing it when frames are cached
        return
    if not isinstance(shard, FrameShard):
        raise ShapeError(f"visual_shard: expected a FrameShard(start, stop, total), got {type(shard).__name__}")
    expected = frame_bounds(shard.total, comm.size)[comm.rank]
    if (shard.start, shard.stop) != expected:
        raise ShapeError(
            f"visual_shard: rank {comm.rank} of {comm.size} holds frames {expected[0]} to {expected[1]} of "
            f"{shard.total} (frame_range), but {shard} was given"
        )
    if frames is None:
        raise ShapeError(
            f"visual_shard: {shard} was given and none of {', '.join(inputs.frame_names)}; a rank without frames "
            "passes an empty tensor, for example of shape (0, 3, height, width)"
        )
    for tensor in (frames, *inputs.extras):
        if tensor.shape[0] != shard.stop - shard.start:
            raise ShapeError(
                f"visual_shard: {shard} means {shard.stop - shard.start} frames, {tensor.shape[0]} were passed, in a "
                f"tensor of shape {tuple(tensor.shape)}"
            )


def _mask_tensors(mask: Any) -> Sequence[Tensor | None]:
    """The tensors of an attention mask: one, or one for each kind of layer."""
    return list(mask.values()) if isinstance(mask, Mapping) else [mask]


def _sampled_weights(model: nn.Module) -> list[Tensor]:
    """The bits of some values of every parameter that each rank has whole: not those that FSDP or others shard."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return []
    whole = (p.detach() for p in model.parameters() if not isinstance(p, DTensor) and p.numel() and not p.is_meta)
    return [_some(p.reshape(-1)) for p in whole]


def _some(flat: Tensor) -> Tensor:
    values = flat[:: max(1, flat.numel() // _SAMPLED_WEIGHTS)]
    return (values if values.is_floating_point() else values.to(torch.float32)).float().view(torch.int32)


def makes_cache(
    context: SeqParContext, model: nn.Module, config: Any, use_cache: bool | None, past: Any, labels: Tensor | None
) -> bool:
    """Whether a pass fills or continues a cache: when there is one, or the caller asks for one.

    Without `use_cache` there is one on one process, as unpatched, but not in training, where it would hold K and V that
    are recomputed otherwise. Several ranks need all text for it on each. Gradient checkpointing rules a new one out, as
    in transformers.
    """
    if past is not None or use_cache is False:
        return past is not None
    trains = model.training and torch.is_grad_enabled()
    if use_cache:
        return not (trains and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()))
    return context.comm.size == 1 and labels is None and not trains and bool(config.use_cache)


def flat_places(*places: Any) -> tuple[Tensor, ...]:
    """What says where frames belong (None, tensors, lists of them or of numbers), as tensors to compare."""
    flat: list[Tensor] = []
    for place in places:
        if isinstance(place, (list, tuple)):
            flat += [torch.tensor([len(place)]), *flat_places(*place)]
        elif place is not None:
            flat.append(torch.as_tensor(place).reshape(-1).cpu())
    return tuple(flat)
