"""What the native models have in common: loading, gradient checkpointing, rotary positions, cache and output."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import rotate_half

from mllm_seqpar._compat import cache_name, drops_cache
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime.text import select_logit_rows

from .auto_classes import LocalCode


class NativeModelMixin(LocalCode):
    """Base of the native models, before a class of transformers.

    Loading requires exactly the weights of the model, and reentrant gradient checkpointing is refused.
    """

    published_name: ClassVar[str] = ""
    """The model's name in errors about its weights; by default that of its class."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load the model like `PreTrainedModel.from_pretrained`; every tensor must be there, and no other.

        Raises:
            DataError: weights are missing, unexpected or of another shape.
            ConfigError: `ignore_mismatched_sizes` is True.
        """
        from .loading import load_clean  # a new model does not need it

        options = {"expected": cls.published_name} | kwargs
        loaded = load_clean(super().from_pretrained, pretrained_model_name_or_path, **options)  # type: ignore[misc]
        return cast(Self, loaded if output_loading_info else loaded[0])

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        # Every public method that enables checkpointing, in all supported versions, calls this method.
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                "use_reentrant is True; layers share the visual features, which reentrant checkpointing cannot "
                "differentiate: pass gradient_checkpointing_kwargs={'use_reentrant': False}, or leave it out"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)  # type: ignore[misc]


def rotate(x: Tensor, rotation: Iterable[Tensor], transposed: bool = False) -> Tensor:
    """Rotate heads (..., D) by angles, or apply the transpose of this linear map.

    `rotation` is the cosines and the sines of the angles, which broadcast to x.
    """
    cos, sin = rotation
    return x * cos + (-rotate_half(x * sin) if transposed else rotate_half(x) * sin)


def prompt_cache(
    config: PreTrainedConfig, decoder: nn.Module, cache: Cache | None, use_cache: bool | None
) -> tuple[Cache | None, bool]:
    """Return the cache of a call, created here if needed, since visual K and V are kept with it, and whether it is
    used; `config` is that of the language model."""
    use_cache = config.use_cache if use_cache is None else use_cache
    if drops_cache(decoder):
        use_cache = False  # Each layer would drop the cache with a warning.
    return (DynamicCache(config=config) if use_cache and cache is None else cache), use_cache


def causal_lm_output(
    model: Any, outputs: Any, labels: Tensor | None, shift_labels: Tensor | None, logits_to_keep: Any, **kwargs: Any
) -> CausalLMOutputWithPast:
    """Return the logits for the hidden states in `outputs`, and the loss if there are labels of either form."""
    logits = model.get_output_embeddings()(select_logit_rows(outputs.last_hidden_state, logits_to_keep))
    loss = None
    if labels is not None or shift_labels is not None:
        if shift_labels is not None:
            shift_labels = shift_labels.contiguous()  # transformers' loss needs a view of it
        size = model.config.get_text_config(decoder=True).vocab_size
        targets = {"labels": labels, "shift_labels": shift_labels}
        loss = model.loss_function(logits=logits, vocab_size=size, **targets, **kwargs)
    kept = {name: getattr(outputs, name, None) for name in (cache_name(), "hidden_states", "attentions")}
    return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)
