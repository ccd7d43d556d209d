"""The media of OpenFlamingo: how a model is conditioned on them, and which of them a row attends to.

A row's time is the number of media tokens at or before it. With `only_attend_immediate_media` (the default) it attends
to medium number time - 1 of its sample, and to none at time 0; otherwise to all media before its time. If no medium
fits, all scores of the unpatched model equal the most negative number, and softmax turns them into a uniform mean of V:

    immediate   time = 0: exactly zero     time > media of the sample: the mean of all V of the sample
    otherwise   time = 0: that mean        time > media of the sample: all media

The mean is the attention of a zero query to all media of the sample.

Shape legend: B rows of text, L text tokens, f media of this rank, C channels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from mllm_seqpar.adapting import (
    AdapterError,
    Communicator,
    CrossAttentionShape,
    ForwardState,
    FrameMask,
    FrameShard,
    KVProjection,
    SeqParContext,
    ShapeError,
    copy_to_device,
    frame_bounds,
    is_instance_by_name,
    tensor_of,
)
from mllm_seqpar.adapting.transformers import Family, ForwardInputs, merge_heads

from .language_models import language_model_of


@dataclass
class Media:
    """The media that a Flamingo is conditioned on. It is set on the layers instead of the features.

    Attributes:
        pixels: (media of all samples, 1, C, H, W), or with `shard` those of this rank; or features (f, tokens, width)
            that the caller encoded.
        samples: number of samples that the media belong to.
        features: (f, tokens, width) of this rank, if they were encoded by `cache_media` or by the caller.
        token: identifies these media in copies of a cache, without a reference to them.
    """

    pixels: Tensor
    samples: int
    shard: FrameShard | None
    features: Tensor | None = None
    token: str = field(default_factory=lambda: uuid4().hex)

    @property
    def total(self) -> int:
        """Media of all samples and ranks."""
        return self.pixels.shape[0] if self.shard is None else self.shard.total

    @classmethod
    def of(cls, vision_x: Any, shard: FrameShard | None, samples: int) -> Media:
        """Make the media of `vision_x` as the caller passed it. The next pass reports what is invalid, on all ranks."""
        vision_x = tensor_of(vision_x)
        if isinstance(vision_x, Tensor) and vision_x.dim() == 6 and shard is None:
            samples, vision_x = vision_x.shape[0], vision_x.flatten(0, 1)
        encoded = shard is not None and isinstance(vision_x, Tensor) and vision_x.dim() == 3
        return cls(vision_x, samples, shard, vision_x if encoded else None)

    def repeat_interleave(self, repeats: int, dim: int) -> Media:
        """Return the same object: the beams of a sample share its media, which are not encoded again."""
        return self


@dataclass(frozen=True, kw_only=True)
class MediaInputs(ForwardInputs):
    """The inputs of one pass, with the media and (B, L) the number of media tokens at or before each row."""

    media: Media | None  # None is refused
    time: Tensor

    @classmethod
    def of(
        cls, media: Media | None, time: Tensor, comm: Communicator, *, cached: bool = False, **arguments: Any
    ) -> MediaInputs:
        """Make the inputs of a pass from its arguments; `cached` says that the cache has K and V of the media."""
        frames = shard = features = None
        if media is not None and not cached:
            frames, shard, features = media.pixels, media.shard, media.features
            if features is not None:
                shard = shard or FrameShard(*frame_bounds(media.total, comm.size)[comm.rank], media.total)
                frames = features
        arguments |= {"frames": frames, "frames_are_features": features is not None, "visual_shard": shard}
        return cls(**arguments, compared_tensors={"time": time}, frame_names=("vision_x",), media=media, time=time)


def cross_attentions(language_model: Any) -> Iterator[tuple[int, Any]]:
    """Yield (layer index, MaskedCrossAttention), also inside the wrappers of activation checkpointing."""
    for index, block in enumerate(language_model.gated_cross_attn_layers):
        for module in [] if block is None else block.modules():
            if is_instance_by_name(module, "MaskedCrossAttention"):
                yield index, module


def run_layer(self: Any, lang_x: Tensor, attention_mask: Any = None, *, seqpar: ForwardState, **kwargs: Any) -> Any:
    """Run a FlamingoLayer with the state of the pass instead of its media."""
    if self.gated_cross_attn_layer is not None:
        lang_x = self.gated_cross_attn_layer(lang_x, seqpar)
    return self.decoder_layer(lang_x, attention_mask=attention_mask, seqpar=seqpar, **kwargs)


def cross_attention_forward(attention: Any, index: int) -> Any:
    """Return a forward of the MaskedCrossAttention of layer `index` that attends to the media of all ranks."""
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(self: Any, x: Tensor, media: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(media, ForwardState):
            return unpatched(x, media, *args, **kwargs)
        q = self.to_q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        uniform = media.rows.get("uniform")
        if uniform is not None:  # a zero query gives the mean of all V, and q has no gradient, as with equal scores
            q = q.masked_fill(uniform[:, None, :, None], 0.0)
        project = KVProjection((self.to_kv,), q.shape[-1])
        o = media.attend(q, [media.frame_keys(q, index, project)], self.scale)
        return self.to_out(merge_heads(o))

    return types.MethodType(forward, attention)


class FlamingoFamily(Family[MediaInputs]):
    """OpenFlamingo. `model` is its language model, through which every pass goes.

    The placement is the token of the media in the cache.
    """

    checkpoints_visual_layers = False

    def __init__(self, flamingo: Any, context: SeqParContext) -> None:
        super().__init__(flamingo.lang_encoder, context)
        self.flamingo = flamingo
        self.language_model = language_model_of(flamingo.lang_encoder)

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        return [*super().called_modules, *self.language_model.called_modules()]

    def cross_attention_shape(self) -> CrossAttentionShape:
        attentions = [attention for _, attention in cross_attentions(self.model)]
        heads = attentions[0].heads
        return CrossAttentionShape(heads, heads, attentions[0].to_q.out_features // heads, len(attentions))

    def check_inputs(self, inputs: MediaInputs, kwargs: Mapping[str, Any]) -> None:
        super().check_inputs(inputs, kwargs)
        media = inputs.media
        if media is None:
            raise ShapeError(
                "vision_x: the model is not conditioned on media; pass vision_x, or call cache_media first"
            )
        if media.pixels is not media.features and (media.pixels.dim() != 5 or media.pixels.shape[1] != 1):
            local = media.shard is not None
            expected = "with visual_shard (media of this rank, 1, C, H, W)" if local else "(B, media, 1, C, H, W)"
            raise ShapeError(f"vision_x: expected {expected}, one frame to a medium; got {tuple(media.pixels.shape)}")
        if media.total == 0 or media.total % media.samples:
            raise ShapeError(
                f"vision_x: {media.total} media for {media.samples} samples; OpenFlamingo takes the same number for "
                "each, one or more"
            )
        if inputs.batch % media.samples:
            raise ShapeError(f"lang_x: {inputs.batch} rows of text, but media for {media.samples} samples")
        if inputs.time.shape[0] != inputs.batch:
            raise ShapeError(f"lang_x: {inputs.batch} rows of text after {inputs.time.shape[0]} rows with media tokens")
        self._only_immediate()

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode pixels (f, 1, C, H, W) to (f, 64, width). The tower is not trained, the perceiver is."""
        with torch.no_grad():
            tokens = self.flamingo.vision_encoder(frames.flatten(0, 1))[1]
        return self.flamingo.perceiver(tokens[None, :, None])[0]

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Raise ShapeError: `check` refuses a pass without media before this is called."""
        raise ShapeError("vision_x: OpenFlamingo has no pass without media")

    def placement(self, inputs: MediaInputs) -> str:
        assert inputs.media is not None
        return inputs.media.token

    def visibility(self, inputs: MediaInputs, units: int, tokens: int, placement: Any) -> FrameMask:
        """Return the rule that is tabulated in the module's docstring."""
        assert inputs.media is not None
        samples, time = inputs.media.samples, inputs.on_host("time")
        assert time is not None
        if inputs.batch % samples:  # the media belong to the model's conditioning, not to the rows of the cache
            raise ShapeError(
                f"lang_x: {inputs.batch} rows of text, but the model is conditioned on media of {samples} samples; "
                "after selecting rows of a cache, condition the model on the media of those"
            )
        per_sample, beams = units // samples, inputs.batch // samples
        base = (torch.arange(inputs.batch) // beams * per_sample)[:, None].expand_as(time)
        uniform = self._uniform_rows(time, per_sample)
        if self._only_immediate():
            none = time == 0
            first, stop = (base + time - 1).masked_fill(none, 0), (base + time).masked_fill(none, 0)
        else:
            first, stop = base, base + time.clamp(max=per_sample)
        first, stop = torch.where(uniform, base, first), torch.where(uniform, base + per_sample, stop)
        return FrameMask.from_intervals(first, stop, tokens, units)

    def row_facts(self, inputs: MediaInputs, mask: FrameMask, placement: Any) -> dict[str, Tensor]:
        """Return the rows whose scores are all equal, if there are any."""
        time = inputs.on_host("time")
        assert inputs.media is not None and time is not None
        uniform = self._uniform_rows(time, mask.total_frames // inputs.media.samples)
        return {"uniform": copy_to_device(uniform, self.embedding_weight().device)} if bool(uniform.any()) else {}

    def _uniform_rows(self, time: Tensor, per_sample: int) -> Tensor:
        return time > per_sample if self._only_immediate() else time == 0

    def text_mask(self, *arguments: Any) -> Any:
        return self.language_model.text_mask(*arguments)

    def run_decoder(self, *arguments: Any, **kwargs: Any) -> Any:
        return self.language_model.run_decoder(*arguments, **kwargs)

    def _only_immediate(self) -> bool:
        """Return `only_attend_immediate_media`, which is read in every pass, as in the unpatched model."""
        found = {bool(attention.only_attend_immediate_media) for _, attention in cross_attentions(self.model)}
        if len(found) != 1:
            raise AdapterError(
                "only_attend_immediate_media differs between the layers of this Flamingo; set it to one value in all"
            )
        return found.pop()
