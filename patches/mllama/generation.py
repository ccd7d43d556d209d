"""`generate` of Llama 3.2 Vision: images go in once, a sample's beams share them, and a rank's images are no batch."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mllm_seqpar.patching import Patch

_VISUAL = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_states", "visual_shard")


def patch_image_arguments(model: Any, patch: Patch) -> None:
    """Replaces what this model's `generate` does with the arguments that images come by."""
    for name, wrap in (
        ("prepare_inputs_for_generation", _passed_once),
        ("_expand_inputs_for_generation", _shared_by_beams),
        ("_maybe_initialize_input_ids_for_generation", _no_batch),
    ):
        patch.set(model, name, wrap(getattr(model, name)))


def _passed_once(unpatched: Any) -> Any:
    """Images in any form are passed until their K and V are kept; transformers knows that of pixels only."""

    @functools.wraps(unpatched)
    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = unpatched(*args, **kwargs)
        if kwargs.get("use_cache") and not kwargs.get("is_first_iteration"):
            inputs |= dict.fromkeys(_VISUAL)
        return inputs

    return prepare_inputs_for_generation


def _shared_by_beams(unpatched: Any) -> Any:
    """Repeats each sample for its beams, but not its images: those are encoded and kept once."""

    @functools.wraps(unpatched)
    def _expand_inputs_for_generation(
        expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **model_kwargs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        visual = {name: model_kwargs.pop(name) for name in _VISUAL if name in model_kwargs}
        embeds = model_kwargs.get("inputs_embeds")
        prompt = input_ids if embeds is None else embeds
        if visual and expand_size > 1 and prompt is not None:
            visual["visual_samples"] = prompt.shape[0]
        ids, others = unpatched(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        return ids, others | visual

    return _expand_inputs_for_generation


def _no_batch(unpatched: Any) -> Any:
    """For embeddings in place of ids, transformers takes the batch from the first tensor: not from a rank's images."""

    @functools.wraps(unpatched)
    def _maybe_initialize_input_ids_for_generation(
        inputs: Tensor | None, bos_token_id: Tensor | None, model_kwargs: dict[str, Any]
    ) -> Tensor:
        return unpatched(inputs, bos_token_id, {name: x for name, x in model_kwargs.items() if name not in _VISUAL})

    return _maybe_initialize_input_ids_for_generation
