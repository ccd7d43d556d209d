"""`generate` for frames without a batch dimension. Without arguments it is greedy, as published."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache

from mllm_seqpar._compat import cache_argument, cache_name, takes_cache
from mllm_seqpar._logging import get_logger
from mllm_seqpar.digests import fingerprint_of
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.sharding import FrameShard

from .media import MediaLayout, cached_frames

_FRAMES = ("pixel_values", "image_embeds")
_OF_FRAMES = (*_FRAMES, "media_layout", "visual_shard")
_TOKEN_IDS = ("bos_token_id", "eos_token_id")
_SAME_FRAMES = (
    "pass the frames of the cache or none, or further ones that have placeholders in the text after that of the cache"
)
_log = get_logger(__name__)


class MPlugOwl3GenerationMixin(GenerationMixin):
    """`GenerationMixin` for flat lists of frames.

    The layout of the prompt is computed once, before the first step. Later rows attend to all frames of their sample,
    with or without a cache, and also if the model generates a placeholder token.
    """

    generation_config: GenerationConfig

    @takes_cache
    def generate(self, *args: Any, cache: Cache | None = None, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs, **({} if cache is None else cache_argument(cache)))

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Set `generation_config` in `from_pretrained`: only the token ids of the directory's file are used.

        The published `generate` never reads generation_config.json: it is greedy, without a repetition penalty, and
        pads with token 0. Other fields of the file are therefore not used, and a warning lists them. A
        `generation_config` that is passed to `from_pretrained` or to `generate`, or set on the model, is used in full.
        """
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is not None:
            return
        file = self.generation_config
        self.generation_config = GenerationConfig(**{name: getattr(file, name) for name in _TOKEN_IDS}, pad_token_id=0)
        known = {*_TOKEN_IDS, "pad_token_id", "transformers_version", "_from_model_config"}
        default = GenerationConfig.from_model_config(self.config).to_diff_dict()
        stated = {name: value for name, value in file.to_diff_dict().items() if name not in known}
        if unused := {name: value for name, value in stated.items() if default.get(name) != value}:
            _log.warning(
                "generation_config.json says %s; it is not used: the published generate is greedy. To use it, pass "
                "generation_config=GenerationConfig.from_pretrained(directory) to from_pretrained or generate; "
                "otherwise save_pretrained does not write it again",
                ", ".join(f"{name}={value!r}" for name, value in sorted(unused.items())),
            )

    def count_frames(
        self,
        pixel_values: Tensor | None = None,
        image_embeds: Tensor | None = None,
        visual_shard: FrameShard | None = None,
        **_: Any,
    ) -> int:
        """Return the number of frames of all samples in the model's inputs; of all ranks, if they pass shards."""
        if visual_shard is not None:
            return visual_shard.total
        return sum(frames.shape[0] for frames in (pixel_values, image_embeds) if frames is not None)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Repeat each sample for its beams, which share the sample's frames in the flat list."""
        if model_kwargs.get("media_layout") is None:
            model_kwargs["media_layout"] = self._prompt_layout(input_ids, model_kwargs)
        model_kwargs.pop("media_offset", None)
        layout = model_kwargs.pop("media_layout").repeat_samples(expand_size)
        frames = {name: model_kwargs.pop(name) for name in _FRAMES if name in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )
        return input_ids, model_kwargs | frames | {"media_layout": layout}

    def _get_candidate_generator(
        self, *args: Any, model_kwargs: dict[str, Any], assistant_model: Any = None, **kwargs: Any
    ) -> Any:
        """Return transformers' candidate generator; an assistant that takes no frames drafts only from the text."""
        if kwargs["generation_config"].assistant_early_exit is not None:
            raise ConfigError(
                "assistant_early_exit: not supported; pass an assistant_model, or prompt_lookup_num_tokens"
            )
        if assistant_model is not None:
            taken = inspect.signature(assistant_model.forward).parameters
            if not any(name in taken for name in _FRAMES):
                model_kwargs = {name: x for name, x in model_kwargs.items() if name in taken or name not in _OF_FRAMES}
        kwargs |= {"model_kwargs": model_kwargs, "assistant_model": assistant_model}
        return super()._get_candidate_generator(*args, **kwargs)

    def _prompt_layout(self, input_ids: Tensor | None, model_kwargs: dict[str, Any]) -> MediaLayout:
        total, cache = self.count_frames(**model_kwargs), model_kwargs.get(cache_name())
        cached = cached_frames(cache)
        if cached is not None and total == 0:
            assert cached.frame_facts is not None
            return cached.frame_facts  # The conversation continues; its frames are in the cache.
        embeds, positions, offset = (model_kwargs.get(x) for x in ("inputs_embeds", "position_ids", "media_offset"))
        prompt = input_ids if embeds is None else embeds
        if positions is not None and prompt is not None:
            positions = positions[:, -prompt.shape[1] :]
        ids = input_ids if embeds is None else None
        past = int(cache.get_seq_length()) if cached is not None and cache is not None else 0
        if past and ids is not None and ids.shape[1] > past:
            ids, new = ids[:, past:], _after(offset, past)
            count = int((ids == self.config.image_token_id).sum()) if new is None else sum(map(len, new))
            if count == total:  # the frames follow those of the cache
                positions = None if positions is None else positions[:, -ids.shape[1] :]
                layout = self.media_layout(total, input_ids=ids, media_offset=new, position_ids=positions)
                return replace(layout, past_length=past)
            ids = input_ids
        return self.media_layout(total, input_ids=ids, media_offset=offset, position_ids=positions)

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs like transformers; frames are passed only until their K and V are in the cache."""
        kwargs |= {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **cache_argument(cache), **kwargs)
        cached = cached_frames(cache)
        if cache is None or cached is None or cache.get_seq_length() == 0:
            # transformers leaves frames out of all passes of an assistant model, also of the first.
            return inputs | {name: kwargs[name] for name in _FRAMES if kwargs.get(name) is not None}
        layout = kwargs.get("media_layout")
        if layout is not None and layout.total_frames and layout.past_length == cache.get_seq_length():
            # The frames follow those of the cache.
            return inputs | {name: kwargs[name] for name in _FRAMES if kwargs.get(name) is not None}
        assert cached.frames is not None
        passed, held = self.count_frames(**inputs), cached.frames.total_frames
        if is_first_iteration and passed not in (0, held):
            raise ShapeError(f"the cache holds {held} frames and {passed} were passed; {_SAME_FRAMES}")
        given = [inputs[name] for name in _FRAMES if inputs.get(name) is not None] if is_first_iteration else []
        known = cached.frame_fingerprints
        if known and any(fingerprint_of(frames) not in known for frames in given):
            raise ShapeError(f"the frames differ from those stored in the cache; {_SAME_FRAMES}")
        return {name: value for name, value in inputs.items() if name not in (*_FRAMES, "media_layout", "media_offset")}


def _after(offset: Any, past: int) -> list[list[int]] | None:
    """Return the positions of placeholders after `past` tokens, counted from there; None if `offset` lists none."""
    if offset is None or (isinstance(offset, Tensor) and offset.dim() == 3):
        return None
    listed = [x.tolist() if isinstance(x, Tensor) else x for x in offset]
    return [[int(place) - past for place in row if place >= past] for row in listed]
