"""OpenFlamingo (`open_flamingo.Flamingo`, package open-flamingo 2.0.1): its sites, and the conditioning on media.

Sites: the model's `forward`, `generate` and `cache_media`, which only take the media; the language model's forward,
through which every pass goes; each layer and its cross-attention; the language model's own attention.

Unpatched, `_encode_vision_x` sets the features of all media on every layer, and each layer projects all of them to K
and V for every generated token. Patched, it sets a `Media` with the pixels, which the next pass encodes on the ranks
that hold them. A pass hands its `ForwardState` down as the argument `seqpar`, never as an attribute of a layer.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.adapting import (
    IMAGE_DIMS,
    AdapterError,
    Communicator,
    CrossAttentionShape,
    Family,
    ForwardInputs,
    ForwardState,
    FrameMask,
    FrameShard,
    HostFrames,
    KVProjection,
    Pass,
    Patch,
    SeqParContext,
    SequenceParallelCacheState,
    ShapeError,
    Tower,
    as_forward,
    cache_state_of,
    check_frames,
    copy_to_device,
    copy_to_host,
    frame_bounds,
    is_instance_by_name,
    merge_heads,
    patch_generate,
    require_same_inputs,
    require_shape,
    rotate_by_whole_text,
    takes_cache,
    tensor_of,
)

from .open_flamingo_language import LANGUAGE_MODELS, language_model_of


@dataclass
class Media:
    """The media that a Flamingo is conditioned on. It is set on the layers instead of the features.

    Attributes:
        pixels: (media of all samples, 1, C, H, W), or with `shard` those of this rank; or features (f, tokens, width)
            that the caller encoded.
        samples: number of samples that the media belong to.
        features: (f, tokens, width) of this rank, if they were encoded by `cache_media` or by the caller.
        fingerprint: identifies these media among those of a cache and its copies, without a reference to them.
    """

    pixels: Tensor
    samples: int
    shard: FrameShard | None
    features: Tensor | None = None
    fingerprint: tuple[int, ...] = field(default_factory=lambda: (uuid4().int,))

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

    def read_by_host(self) -> dict[str, Tensor]:
        """Return further the tokens, whose media tokens say whether new media follow those of a cache."""
        tensors = super().read_by_host()
        return tensors | ({} if self.input_ids is None or self.frames is None else {"input_ids": self.input_ids})

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
        return cls(**arguments, compared_tensors={"time": time}, media=media, time=time)


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
        uniform = media.row_facts.get("uniform")
        if uniform is not None:  # a zero query gives the mean of all V, and q has no gradient, as with equal scores
            q = q.masked_fill(uniform[:, None, :, None], 0.0)
        project = KVProjection((self.to_kv,), q.shape[-1])
        o = media.attend(q, [media.frame_keys(q, index, project)], self.scale)
        return self.to_out(merge_heads(o))

    return types.MethodType(forward, attention)


class OpenFlamingoFamily(Family[MediaInputs]):
    """OpenFlamingo over the language models of `LANGUAGE_MODELS`.

    `model` is its language model, through which every pass goes.
    """

    name = "OpenFlamingo"
    model_class = "Flamingo"
    package = "open_flamingo."
    parts = {"vision": ("vision_encoder",), "projector": ("perceiver",), "language": ("lang_encoder",)}
    frame_arguments = ("vision_x", "pixel_values")

    def __init__(self, flamingo: Any, context: SeqParContext) -> None:
        super().__init__(flamingo.lang_encoder, context)
        self.flamingo = flamingo
        self.language_model = language_model_of(flamingo.lang_encoder)

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        language_model = model.lang_encoder
        if not getattr(language_model, "initialized_flamingo", False):
            raise AdapterError("lang_encoder is no Flamingo language model yet; call its init_flamingo first")
        kind = getattr(language_model.config, "model_type", None)
        if kind not in LANGUAGE_MODELS:
            raise AdapterError(
                f"lang_encoder is a {type(language_model).__name__} (model_type {kind!r}); OpenFlamingo can be patched "
                f"over {', '.join(LANGUAGE_MODELS)}"
            )
        if getattr(model.perceiver, "media_time_embs", None) is not None:
            raise AdapterError(
                "the perceiver has media_time_embs, which depend on the place of a medium in its sample; a rank "
                "encodes its own media only. Use a perceiver without them, as Flamingo itself makes it"
            )
        language_model_of(language_model).check()

    @classmethod
    def install(cls, model: Any, context: SeqParContext, patch: Patch) -> None:
        language_model, family = model.lang_encoder, cls(model, context)
        family.language_model.install(patch)
        rotate_by_whole_text(family, patch)
        for index, attention in cross_attentions(language_model):
            patch.guard(language_model, [attention])
            patch.set(attention, "forward", cross_attention_forward(attention, index))
        patch.chunk_forwards(block.ff for block in language_model.gated_cross_attn_layers if block is not None)
        for layer in language_model._get_decoder_layers():
            patch.set_forward(layer, run_layer)
        patch.set(language_model, "forward", _language_model_forward(language_model, family))
        patch_generate(language_model, patch)
        patch.set(model, "_encode_vision_x", functools.partial(_condition_layers, language_model))
        patch.set(model, "forward", _with_media(model.forward))
        patch.set(model, "generate", _with_media(_continues_cache(model)))
        patch.set(model, "cache_media", _cache_media(model, family))

    @property
    def decoder(self) -> Any:
        return self.language_model.stack

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        return [*super().called_modules, *self.language_model.called_modules()]

    @property
    def frame_modules(self) -> Iterable[nn.Module | None]:
        attentions = [attention for _, attention in cross_attentions(self.model)]
        return [self.flamingo.vision_encoder, self.flamingo.perceiver, *attentions]

    def cross_attention_shape(self) -> CrossAttentionShape:
        attentions = [attention for _, attention in cross_attentions(self.model)]
        heads = attentions[0].heads
        return CrossAttentionShape(heads, heads, attentions[0].to_q.out_features // heads, len(attentions))

    def check_inputs(self, inputs: MediaInputs) -> None:
        media = inputs.media
        if media is None:
            raise ShapeError(
                "vision_x: the model is not conditioned on media; pass vision_x, or call cache_media first"
            )
        if media.pixels is not media.features:
            note = ", the media of all samples one after another, one frame to a medium"
            require_shape("vision_x", media.pixels.shape, note, media=None, frames=1, **IMAGE_DIMS)
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

    def complete_cache(self, inputs: MediaInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        assert inputs.media is not None
        cache_state.frame_fingerprints.add(inputs.media.fingerprint)
        # (rows of the prompt, tokens) on the CPU: the number of media tokens at or before each token.
        cache_state.samples, cache_state.frame_facts = inputs.media.samples, inputs.on_host("time")

    def visibility(self, inputs: MediaInputs, units: int, tokens: int) -> FrameMask:
        """Return the rule that is tabulated in the module's docstring."""
        assert inputs.media is not None
        samples, time, state = inputs.media.samples, inputs.on_host("time"), inputs.cache_state
        assert time is not None
        whole = cache_state_of(inputs.cache)
        if state is not None and whole is not None and whole.earlier:  # the media of one of several passes
            assert state.samples and state.visual_kv is not None
            units, own = state.visual_kv.own_units, state.units_of_sample()
            rows = inputs.prompt_rows // (state.prompt_batch // state.samples)
            before, total = inputs.unit_columns.start, sum(each.units_of_sample() for each in whole.by_pass())
        else:
            if inputs.batch % samples:  # the media belong to the model's conditioning, not to the rows of the cache
                raise ShapeError(
                    f"lang_x: {inputs.batch} rows of text, but the model is conditioned on media of {samples} samples; "
                    "after selecting rows of a cache, condition the model on the media of those"
                )
            own = total = units // samples
            rows, before = torch.arange(inputs.batch) // (inputs.batch // samples), 0
        here = time - before  # the media tokens after the earlier media
        first, stop = torch.zeros_like(here), here.clamp(0, own)
        if self._only_immediate():
            first = (here - 1).clamp(0, own)
            stop = torch.where(here <= own, stop, first)
        uniform, base = self._uniform_rows(time, total), (rows * own)[:, None]
        first, stop = first.masked_fill(uniform, 0), stop.masked_fill(uniform, own)
        return FrameMask.from_intervals(base + first, base + stop, tokens, units)

    def row_facts(self, inputs: MediaInputs, mask: FrameMask) -> dict[str, Tensor]:
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
        values = {bool(attention.only_attend_immediate_media) for _, attention in cross_attentions(self.model)}
        if len(values) != 1:
            raise AdapterError(
                "only_attend_immediate_media differs between the layers of this Flamingo; set it to one value in all"
            )
        return values.pop()


def _condition_layers(language_model: Any, vision_x: Any) -> None:
    """Set the media on the layers, where `is_conditioned` and `clear_conditioned_layers` expect them."""
    media = vision_x if isinstance(vision_x, Media) else Media.of(vision_x, None, vision_x.shape[0])
    for layer in language_model._get_decoder_layers():
        layer.condition_vis_x(media)


def _with_media(unpatched: Any) -> Any:
    """Wrap `forward` or `generate`, which pass `vision_x` to `_encode_vision_x`, so that they pass a `Media`."""

    @takes_cache
    @functools.wraps(unpatched)
    def wrapper(
        vision_x: Tensor | HostFrames | Media | None = None,
        lang_x: Tensor | None = None,
        *args: Any,
        cache: Cache | None = None,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | HostFrames | None = None,
        visual_shard: FrameShard | None = None,
        **kwargs: Any,
    ) -> Any:
        vision_x = pixel_values if vision_x is None else vision_x
        lang_x = input_ids if lang_x is None else lang_x
        kwargs |= {} if cache is None else {"past_key_values": cache}  # the only name that `Flamingo` takes
        if lang_x is None:
            raise ShapeError("lang_x is None; pass the token ids as lang_x or input_ids")
        media = vision_x
        if vision_x is not None and not isinstance(vision_x, Media):
            media = Media.of(vision_x, visual_shard, lang_x.shape[0])
        return unpatched(media, lang_x, *args, **kwargs)

    wrapper.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD_DOC
    return wrapper


def _continues_cache(model: Any) -> Any:
    """Wrap `generate`, so that new text after a filled cache follows the media tokens of the text in the cache.

    Only the new text reaches the language model then. Unpatched, it would attend to no medium.
    """
    unpatched = model.generate

    @functools.wraps(unpatched)
    def generate(media: Media | None, lang_x: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            for layer in model.lang_encoder._get_decoder_layers():
                layer.condition_media_locations(lang_x == model.media_token_id)
        return unpatched(media, lang_x, *args, **kwargs)

    return generate


_VISUAL_SHARD_DOC = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `vision_x` holds only this rank's media of
        `visual_shard.total`, those of all samples one after another: (media of this rank, 1, C, H, W), or the output of
        tower and perceiver, (media of this rank, tokens, width).
"""


def _cache_media(model: Any, family: OpenFlamingoFamily) -> Any:
    unpatched, comm = model.cache_media, family.context.comm

    @functools.wraps(unpatched)
    def cache_media(input_ids: Tensor, vision_x: Tensor, visual_shard: FrameShard | None = None) -> None:
        """Encode the media now, each rank its own. All later forward passes use them."""
        media = Media.of(vision_x, visual_shard, input_ids.shape[0])
        time = (input_ids == model.media_token_id).cumsum(-1)
        inputs = MediaInputs.of(media, time, comm, input_ids=input_ids)

        def check() -> None:
            check_frames(inputs, comm, family.frame_arguments)
            family.check_inputs(inputs)

        media.features = Tower(family, require_same_inputs(comm, inputs, check)).features()
        unpatched(input_ids, media)

    return cache_media


def _language_model_forward(language_model: Any, family: OpenFlamingoFamily) -> Any:
    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ShapeError("a Flamingo language model takes input_ids: its media tokens say where the media belong")
        media, time = _conditioning(self, input_ids)
        positions, cached = kwargs.pop("position_ids", None), _in_cache(self, media, cache, input_ids)
        inputs = MediaInputs.of(
            media,
            _continued(time, self, input_ids, cache, cached),
            family.context.comm,
            cached=cached,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=family.language_model.positions(positions, attention_mask, cache),
            labels=labels,
            shift_labels=kwargs.pop("shift_labels", None),
            cache=cache,
            use_cache=cache is not None or bool(use_cache),
            detects_packing=family.language_model.detects_packing and not use_cache,
        )
        return Pass(family, inputs, logits_to_keep, kwargs).run()

    return as_forward(language_model, forward)


def _in_cache(language_model: Any, media: Media | None, cache: Cache | None, input_ids: Tensor) -> bool:
    """Return whether the cache has K and V of these media; remove those of an earlier conditioning from it.

    Other media follow those of the cache if each of both has its media token, in the text of the cache and of this
    pass. In grad mode K and V are projected in every pass, as in the unpatched model, so the cache keeps none.
    """
    past = 0 if cache is None else int(cache.get_seq_length())
    state = cache_state_of(cache) if past and media is not None else None
    if media is None or state is None or state.visual_kv is None:
        return False
    state.crop_to(past)
    if media.fingerprint in state.frame_fingerprints and not torch.is_grad_enabled():
        return True
    follows = not torch.is_grad_enabled() and state.frame_facts is not None and state.frames is not None
    if follows:
        before = sum(earlier.units_of_sample() for earlier in (*state.earlier, state))
        follows = bool((_media_tokens_before(state, past, len(input_ids)) == before).all())
        media_tokens = (input_ids == language_model.media_token_id).sum(1)
        follows = follows and bool((media_tokens == media.total // media.samples).all())
    if not follows:
        state.drop_frames()
    return False


def _media_tokens_before(state: SequenceParallelCacheState, past: int, batch: int) -> Tensor:
    """Return (batch,), the number of media tokens among the first `past` tokens of each row."""
    assert state.frame_facts is not None
    known = min(past - state.first_token, state.frame_facts.shape[1])
    return state.frame_facts[state.rows_of(batch), known - 1]


def _continued(time: Tensor, language_model: Any, input_ids: Tensor, cache: Any, cached: bool) -> Tensor:
    """Return the time (B, L) of rows that follow media of several passes, and `time` of any others."""
    state = cache_state_of(cache) if cache is not None and cache.get_seq_length() else None
    if state is None or state.frame_facts is None or (cached and not state.earlier):
        return time
    before = copy_to_device(_media_tokens_before(state, int(cache.get_seq_length()), len(input_ids)), input_ids.device)
    return (input_ids == language_model.media_token_id).cumsum(dim=-1) + before[:, None]


def _conditioning(language_model: Any, input_ids: Tensor) -> tuple[Media | None, Tensor]:
    """Return the media, and the time (B, L) of each row; set the media locations on the layers as the unpatched model.

    Generated tokens, and texts after `cache_media`, come without media tokens. They follow the last media token of the
    earlier text.
    """
    layers, locations = language_model._get_decoder_layers(), input_ids == language_model.media_token_id
    here, uses_cached_media = locations, False
    if language_model._use_cached_vision_x and language_model.is_conditioned():
        here, earlier = copy_to_host([locations, layers[0].media_locations])
        uses_cached_media = not bool(here.any())
    for layer in layers:
        if not uses_cached_media:
            layer.condition_media_locations(locations)
        layer.condition_use_cached_media(uses_cached_media)
    if uses_cached_media:
        return layers[0].vis_x, earlier.count_nonzero(dim=1)[:, None].expand(-1, input_ids.shape[1])
    return layers[0].vis_x, here.cumsum(dim=-1)
