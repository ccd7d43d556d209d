"""What OpenFlamingo's text sees of its media: the conditioning, the rule of rows, and the family of its passes.

A row's time is the number of media tokens at or before it. With `only_attend_immediate_media` (the default) it sees the
medium number time - 1 of its sample and nothing at time 0; otherwise all media before its time. Where no medium fits,
the unpatched scores are all equal to the most negative number, and softmax makes a uniform mean of V out of them:

    immediate   time = 0: exactly zero     time > media of the sample: the mean of all V of the sample
    otherwise   time = 0: that mean        time > media of the sample: all media

The mean is the attention of a zero query over everything in the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.integrations.transformers.family import Family, Visibility
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import CrossAttentionShape
from mllm_seqpar.sharding import FrameShard, frame_bounds

from .language_models import language_model_of
from .layers import cross_attentions


@dataclass
class Media:
    """What a Flamingo is conditioned on: stands on its layers in the place of the features.

    Attributes:
        pixels: (media of all samples, 1, C, H, W), or with `shard` this rank's; what the caller encoded beforehand,
            (f, tokens, width), is in their place, too.
        samples: how many samples they are of.
        shard: which part `pixels` is; None: all.
        features: (f, tokens, width), this rank's, once they were encoded to be kept, or when they came so.
        token: tells these media from others without holding on to them, in copies of a cache too.
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
    def of(cls, vision_x: Tensor, shard: FrameShard | None, samples: int) -> Media:
        """From `vision_x` as the caller gave it; what is wrong with it, the next pass tells on all ranks."""
        whole = isinstance(vision_x, Tensor) and vision_x.dim() == 6 and shard is None
        if whole:
            samples, vision_x = vision_x.shape[0], vision_x.flatten(0, 1)
        encoded = shard is not None and isinstance(vision_x, Tensor) and vision_x.dim() == 3
        return cls(vision_x, samples, shard, vision_x if encoded else None)

    def repeat_interleave(self, repeats: int, dim: int) -> Media:
        """Itself: the beams of a sample look at the same media, and nothing needs to be encoded again for each."""
        return self


@dataclass(frozen=True, kw_only=True)
class MediaInputs(ForwardInputs):
    """With the media, and the times of the rows.

    Attributes:
        media: what the model is conditioned on; None when it is not, which is refused.
        time: (B, L).
    """

    media: Media | None
    time: Tensor

    @classmethod
    def of(cls, media: Media | None, time: Tensor, comm: Communicator, held: bool = False, **given: Any) -> MediaInputs:
        """From the conditioning, and the arguments of the pass; `held`: the cache has K and V of the media."""
        frames = shard = features = None
        if media is not None and not held:
            frames, shard, features = media.pixels, media.shard, media.features
            if features is not None:
                shard = shard or FrameShard(*frame_bounds(media.total, comm.size)[comm.rank], media.total)
                frames = features
        absent: dict[str, Any] = dict.fromkeys(
            ("attention_mask", "position_ids", "labels", "shift_labels", "past_key_values")
        )
        return cls(
            **(absent | {"use_cache": False, "packed": False} | given),
            inputs_embeds=None,
            frames=frames,
            frames_are_features=features is not None,
            both_kinds=False,
            visual_shard=shard,
            places=(time,),
            frame_names=("vision_x",),
            media=media,
            time=time,
        )


class FlamingoFamily(Family):
    """One patched Flamingo; `model` is its language model, which every pass goes through."""

    checkpoints_look = False

    def __init__(self, flamingo: Any, context: SeqParContext) -> None:
        super().__init__(flamingo.lang_encoder, context)
        self.flamingo = flamingo
        self.language_model = language_model_of(flamingo.lang_encoder)

    def cross_shape(self) -> CrossAttentionShape:
        """Every key head has one query head."""
        found = [attention for _, attention in cross_attentions(self.model)]
        heads = found[0].heads
        return CrossAttentionShape(heads, heads, found[0].to_q.out_features // heads, len(found))

    def check(self, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
        """Raises for media that do not fit; the other ranks are told."""
        super().check(inputs, kwargs)
        assert isinstance(inputs, MediaInputs)
        media = inputs.media
        if media is None:
            raise ShapeError(
                "vision_x: the model is not conditioned on media; pass vision_x, or call cache_media first"
            )
        local = media.shard is not None
        if media.pixels is not media.features and (media.pixels.dim() != 5 or media.pixels.shape[1] != 1):
            expected = "with visual_shard (media of this rank, 1, C, H, W)" if local else "(B, media, 1, C, H, W)"
            raise ShapeError(f"vision_x: expected {expected}, one frame to a medium; got {tuple(media.pixels.shape)}")
        total = media.total
        if total == 0 or total % media.samples:
            raise ShapeError(
                f"vision_x: {total} media for {media.samples} samples; OpenFlamingo takes the same number for each, "
                "one or more"
            )
        if inputs.batch % media.samples:
            raise ShapeError(f"lang_x: {inputs.batch} rows of text, but media for {media.samples} samples")
        if inputs.time.shape[0] != inputs.batch:
            raise ShapeError(f"lang_x: {inputs.batch} rows of text after {inputs.time.shape[0]} rows with media tokens")
        self._immediate()

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Pixels (f, 1, C, H, W) -> (f, 64, width); the tower is not trained, the perceiver is."""
        with torch.no_grad():
            tokens = self.flamingo.vision_encoder(frames.flatten(0, 1))[1]
        return self.flamingo.perceiver(tokens[None, :, None])[0]

    def blank(self) -> tuple[Tensor, ...]:
        """Never asked for: `check` refuses a pass without media."""
        raise ShapeError("vision_x: OpenFlamingo has no pass without media")

    def note(self, inputs: ForwardInputs) -> str:
        """Which media a cache holds."""
        assert isinstance(inputs, MediaInputs) and inputs.media is not None
        return inputs.media.token

    def view(self, inputs: ForwardInputs, units: int, tokens: int, note: Any) -> Visibility:
        """See the table at the top of this file."""
        assert isinstance(inputs, MediaInputs) and inputs.media is not None
        own = units // inputs.media.samples
        time = inputs.time
        if inputs.batch % inputs.media.samples:  # media belong to the model's conditioning, and rows to their places
            raise ShapeError(
                f"lang_x: {inputs.batch} rows of text, but the model is conditioned on media of {inputs.media.samples} "
                "samples; after selecting rows of a cache, condition the model on the media of those"
            )
        beams = inputs.batch // inputs.media.samples
        base = (torch.arange(inputs.batch, device=time.device) // beams * own)[:, None].expand_as(time)
        if self._immediate():
            uniform = time > own
            first, stop = base + time - 1, base + time
            nothing = time == 0
            first, stop = first.masked_fill(nothing, 0), stop.masked_fill(nothing, 0)
        else:
            uniform = time == 0
            first, stop = base, base + time.clamp(max=own)
        first, stop = torch.where(uniform, base, first), torch.where(uniform, base + own, stop)
        mask = FrameMask.from_intervals(first, stop, tokens, units)
        return Visibility(mask, {"uniform": uniform} if bool(uniform.any()) else {})

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the language model's own mask."""
        return self.language_model.text_mask(embeds, mask, positions, cache)

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Any, call: ForwardState, **kwargs: Any
    ) -> Any:
        """The language model's own layers."""
        return self.language_model.decode(embeds, positions, mask, cache, call, **kwargs)

    def _immediate(self) -> bool:
        """`only_attend_immediate_media`, the same in all layers; read in every pass, as unpatched."""
        found = {bool(attention.only_attend_immediate_media) for _, attention in cross_attentions(self.model)}
        if len(found) != 1:
            raise AdapterError(
                "only_attend_immediate_media differs between the layers of this Flamingo; set it to one value in all"
            )
        return found.pop()
