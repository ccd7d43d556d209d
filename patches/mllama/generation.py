"""`generate` of Llama 3.2 Vision: images are passed once, without a batch dimension, and shared by beams."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mllm_seqpar.adapting import Patch

_VISUAL_ARGUMENTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_states", "visual_shard")


def patch_image_arguments(model: Any, patch: Patch) -> None:
    """Replace the methods of `generate` that handle the arguments by which images are passed."""
    for replacement in (
        prepare_inputs_for_generation,
        _expand_inputs_for_generation,
        _maybe_initialize_input_ids_for_generation,
    ):
        unpatched = getattr(model, replacement.__name__)
        wrapped = functools.wraps(unpatched)(functools.partial(replacement, unpatched))
        patch.set(model, replacement.__name__, wrapped)


def prepare_inputs_for_generation(unpatched: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Pass images in any form only until their K and V are stored. transformers does so for pixels only."""
    inputs = unpatched(*args, **kwargs)
    if kwargs.get("use_cache") and not kwargs.get("is_first_iteration"):
        inputs |= dict.fromkeys(_VISUAL_ARGUMENTS)
    return inputs


def _expand_inputs_for_generation(
    unpatched: Any,
    expand_size: int = 1,
    is_encoder_decoder: bool = False,
    input_ids: Tensor | None = None,
    **model_kwargs: Any,
) -> tuple[Tensor | None, dict[str, Any]]:
    """Repeat each sample for its beams, but not its images, which are encoded and stored once."""
    visual = {name: model_kwargs.pop(name) for name in _VISUAL_ARGUMENTS if name in model_kwargs}
    embeds = model_kwargs.get("inputs_embeds")
    prompt = input_ids if embeds is None else embeds
    if visual and expand_size > 1 and prompt is not None:
        visual["visual_samples"] = prompt.shape[0]
    ids, others = unpatched(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
    return ids, others | visual


def _maybe_initialize_input_ids_for_generation(
    unpatched: Any, inputs: Tensor | None, bos_token_id: Tensor | None, model_kwargs: dict[str, Any]
) -> Tensor:
    """Hide images where transformers takes the batch size from the first tensor, if there are embeddings and no ids."""
    others = {name: x for name, x in model_kwargs.items() if name not in _VISUAL_ARGUMENTS}
    return unpatched(inputs, bos_token_id, others)
