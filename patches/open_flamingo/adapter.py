"""OpenFlamingo (`open_flamingo.Flamingo`, package open-flamingo 2.0.1): its sites and the conditioning on media.

Sites: the model's entrances, which only carry the media; the language model's forward, through which every pass goes,
in training and in generation; each layer and its cross-attention; the language model's own attention.

Unpatched, `_encode_vision_x` leaves the features of all media on every layer, and each layer projects all of them to K
and V for every generated token. Patched, it leaves a `Media` there: the pixels, which the next pass encodes on the
ranks that hold them. A pass hands what layers share down as an argument, `seqpar`; no layer is told by an attribute.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.integrations.transformers.cache import cache_state
from mllm_seqpar.integrations.transformers.frame_encoding import local_features
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import require_same_inputs
from mllm_seqpar.integrations.transformers.passes import forward_of, run_pass
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.sharding import FrameShard

from .language_models import LANGUAGE_MODELS, language_model_of
from .layers import cross_attentions, cross_forward, layer_forward
from .media import FlamingoFamily, Media, MediaInputs


class OpenFlamingoAdapter:
    """The adapter of OpenFlamingo over the language models of `LANGUAGE_MODELS`."""

    name = "OpenFlamingo"

    def matches(self, model: nn.Module) -> bool:
        """Whether it is `open_flamingo.Flamingo`, also after `fully_shard` made it a class of its own."""
        return any(c.__name__ == "Flamingo" and c.__module__.startswith("open_flamingo.") for c in type(model).__mro__)

    def check(self, model: Any, context: SeqParContext) -> None:
        """The language model must be one that the patch knows, and media must not be told apart by their place."""
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
                "the perceiver has media_time_embs, which tell it the place of a medium in its sample; a rank encodes "
                "its own media only. Flamingo itself makes a perceiver without"
            )
        language_model_of(language_model).check()

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the entrances, the language model's forward and those of its layers and cross-attention."""
        language_model = model.lang_encoder
        family = FlamingoFamily(model, context)
        family.language_model.install(patch)
        for index, attention in cross_attentions(language_model):
            patch.guard(language_model, [attention])
            patch.set(attention, "forward", cross_forward(attention, index))
        chunk_forwards(patch, (block.ff for block in language_model.gated_cross_attn_layers if block is not None))
        for layer in language_model._get_decoder_layers():
            patch.set(layer, "forward", layer_forward(layer))
        patch.set(language_model, "forward", _language_forward(language_model, family))
        patch_generate(language_model, context, patch)
        patch.set(model, "_encode_vision_x", functools.partial(_condition, language_model))
        patch.set(model, "forward", _entrance(model.forward))
        patch.set(model, "generate", _entrance(model.generate))
        patch.set(model, "cache_media", _cache_media(model, family))


def adapter() -> OpenFlamingoAdapter:
    """The adapter of this family."""
    return OpenFlamingoAdapter()


def _condition(language_model: Any, vision_x: Any) -> None:
    """Leaves the media on the layers, as `is_conditioned` and `clear_conditioned_layers` know them."""
    media = vision_x if isinstance(vision_x, Media) else Media.of(vision_x, None, vision_x.shape[0])
    for layer in language_model._get_decoder_layers():
        layer.condition_vis_x(media)


def _entrance(unpatched: Any) -> Any:
    """`forward` or `generate`: they hand `vision_x` to `_encode_vision_x`, and so do they with a `Media`."""

    @functools.wraps(unpatched)
    def entrance(
        vision_x: Tensor | None, lang_x: Tensor, *args: Any, visual_shard: FrameShard | None = None, **kwargs: Any
    ) -> Any:
        media = None if vision_x is None else Media.of(vision_x, visual_shard, lang_x.shape[0])
        return unpatched(media, lang_x, *args, **kwargs)

    entrance.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD
    return entrance


_VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `vision_x` holds only this rank's media of
        `visual_shard.total`, those of all samples one after another: (media of this rank, 1, C, H, W), or what tower
        and perceiver made of them, (media of this rank, tokens, width).
"""


def _cache_media(model: Any, family: FlamingoFamily) -> Any:
    unpatched = model.cache_media

    @functools.wraps(unpatched)
    def cache_media(input_ids: Tensor, vision_x: Tensor, visual_shard: FrameShard | None = None) -> None:
        """Encodes now, on each rank its own media; every later forward pass uses them."""
        media = Media.of(vision_x, visual_shard, input_ids.shape[0])
        time = (input_ids == model.media_token_id).cumsum(-1)
        inputs = MediaInputs.of(media, time, family.context.comm, input_ids=input_ids)
        require_same_inputs(family.context.comm, inputs, lambda: family.check(inputs, {}))
        media.features = local_features(family, inputs)
        unpatched(input_ids, media)

    return cache_media


def _language_forward(language_model: Any, family: FlamingoFamily) -> Any:
    unpatched = language_model.forward

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
            held=_held(media, past_key_values),
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=family.language_model.positions(positions, attention_mask, past_key_values),
            labels=labels,
            shift_labels=kwargs.pop("shift_labels", None),
            past_key_values=past_key_values,
            use_cache=past_key_values is not None or bool(use_cache),
            packed=family.language_model.packs and not use_cache,
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    forward.__doc__ = unpatched.__doc__
    return forward_of(language_model, forward)


def _held(media: Media | None, cache: Cache | None) -> bool:
    """Whether the cache has K and V of these media; those of media from before another conditioning are forgotten."""
    if media is None or cache is None or not cache.get_seq_length():
        return False
    beside = cache_state(cache)
    if beside is not None and beside.kept is not None and (beside.note != media.token or torch.is_grad_enabled()):
        beside.kept = None  # in grad mode K and V are projected in each pass, as unpatched
    return beside is not None and beside.kept is not None


def _conditioning(language_model: Any, input_ids: Tensor) -> tuple[Media | None, Tensor]:
    """The media, and (B, L) the number of media tokens at or before each row; tells the layers as unpatched.

    Generated tokens, and texts after `cache_media`, come without media tokens: all of them stand after the last one of
    the text before.
    """
    layers = language_model._get_decoder_layers()
    locations = input_ids == language_model.media_token_id
    after_all = bool(
        language_model._use_cached_vision_x and language_model.is_conditioned() and not bool(locations.any())
    )
    for layer in layers:
        if not after_all:
            layer.condition_media_locations(locations)
        layer.condition_use_cached_media(after_all)
    before = layers[0].media_locations
    if after_all:
        return layers[0].vis_x, before.count_nonzero(dim=1)[:, None].expand(-1, input_ids.shape[1])
    return layers[0].vis_x, before.cumsum(dim=-1)
