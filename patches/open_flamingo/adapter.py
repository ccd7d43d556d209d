"""OpenFlamingo (`open_flamingo.Flamingo`, package open-flamingo 2.0.1): its sites, and the conditioning on media.

Sites: the model's `forward`, `generate` and `cache_media`, which only take the media; the language model's forward,
through which every pass goes; each layer and its cross-attention; the language model's own attention.

Unpatched, `_encode_vision_x` sets the features of all media on every layer, and each layer projects all of them to K
and V for every generated token. Patched, it sets a `Media` with the pixels, which the next pass encodes on the ranks
that hold them. A pass hands its `ForwardState` down as the argument `seqpar`, never as an attribute of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.adapting import (
    AdapterError,
    FrameShard,
    HostFrames,
    Patch,
    SeqParContext,
    ShapeError,
    copy_to_host,
)
from mllm_seqpar.adapting.transformers import (
    as_forward,
    cache_state_of,
    local_features,
    patch_generate,
    require_same_inputs,
    run_pass,
)

from .language_models import LANGUAGE_MODELS, language_model_of
from .media import FlamingoFamily, Media, MediaInputs, cross_attention_forward, cross_attentions, run_layer


class OpenFlamingoFamily(FlamingoFamily):
    """OpenFlamingo over the language models of `LANGUAGE_MODELS`: how it is found and patched."""

    name = "OpenFlamingo"
    model_class = "Flamingo"
    package = "open_flamingo."
    frame_arguments = ("vision_x", "pixel_values")

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


adapter = OpenFlamingoFamily


def _condition_layers(language_model: Any, vision_x: Any) -> None:
    """Set the media on the layers, where `is_conditioned` and `clear_conditioned_layers` expect them."""
    media = vision_x if isinstance(vision_x, Media) else Media.of(vision_x, None, vision_x.shape[0])
    for layer in language_model._get_decoder_layers():
        layer.condition_vis_x(media)


def _with_media(unpatched: Any) -> Any:
    """Wrap `forward` or `generate`, which pass `vision_x` to `_encode_vision_x`, so that they pass a `Media`."""

    @functools.wraps(unpatched)
    def wrapper(
        vision_x: Tensor | HostFrames | None = None,
        lang_x: Tensor | None = None,
        *args: Any,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | HostFrames | None = None,
        visual_shard: FrameShard | None = None,
        **kwargs: Any,
    ) -> Any:
        vision_x = pixel_values if vision_x is None else vision_x
        lang_x = input_ids if lang_x is None else lang_x
        if lang_x is None:
            raise ShapeError("lang_x is None; pass the token ids as lang_x or input_ids")
        media = None if vision_x is None else Media.of(vision_x, visual_shard, lang_x.shape[0])
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


def _cache_media(model: Any, family: FlamingoFamily) -> Any:
    unpatched, comm = model.cache_media, family.context.comm

    @functools.wraps(unpatched)
    def cache_media(input_ids: Tensor, vision_x: Tensor, visual_shard: FrameShard | None = None) -> None:
        """Encode the media now, each rank its own. All later forward passes use them."""
        media = Media.of(vision_x, visual_shard, input_ids.shape[0])
        time = (input_ids == model.media_token_id).cumsum(-1)
        inputs = MediaInputs.of(media, time, comm, input_ids=input_ids)
        require_same_inputs(comm, inputs, lambda: family.check_inputs(inputs, {}))
        media.features = local_features(family, inputs)
        unpatched(input_ids, media)

    return cache_media


def _language_model_forward(language_model: Any, family: FlamingoFamily) -> Any:
    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ShapeError("a Flamingo language model takes input_ids: its media tokens say where the media belong")
        media, time = _conditioning(self, input_ids)
        positions = kwargs.pop("position_ids", None)
        inputs = MediaInputs.of(
            media,
            time,
            family.context.comm,
            cached=_in_cache(media, past_key_values),
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=family.language_model.positions(positions, attention_mask, past_key_values),
            labels=labels,
            shift_labels=kwargs.pop("shift_labels", None),
            past_key_values=past_key_values,
            use_cache=past_key_values is not None or bool(use_cache),
            detects_packing=family.language_model.detects_packing and not use_cache,
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    return as_forward(language_model, forward)


def _in_cache(media: Media | None, cache: Cache | None) -> bool:
    """Return whether the cache has K and V of these media; remove those of an earlier conditioning from it.

    In grad mode K and V are projected in every pass, as in the unpatched model, so those in the cache are removed too.
    """
    state = None if media is None or cache is None or not cache.get_seq_length() else cache_state_of(cache)
    if media is None or state is None or state.visual is None:
        return False
    if state.placement != media.token or torch.is_grad_enabled():
        state.visual = None
    return state.visual is not None


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
