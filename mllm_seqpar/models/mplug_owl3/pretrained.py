"""Loading of published checkpoints, and the class attributes that transformers and accelerate read."""

import copy
import os
from dataclasses import fields
from typing import Any, Self, cast

from transformers import PreTrainedModel

from mllm_seqpar._compat import cache_name
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.auto_classes import LocalCode
from mllm_seqpar.models.loading import load_clean

from .checkpoint import checkpoint_keys, complete_config, hub_options
from .configuration import MPlugOwl3Config

_CONFIG_OVERRIDES = {field.name for field in fields(MPlugOwl3Config)} - {"dtype"} | {"output_attentions"}


class MPlugOwl3PreTrainedModel(LocalCode, PreTrainedModel):
    config: MPlugOwl3Config
    base_model_prefix = ""
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen2DecoderLayer", "HyperDecoderLayer", "SiglipEncoderLayer", "SiglipVisionEmbeddings"]
    # The features are taken before this norm, so a checkpoint may lack it. The same holds for the head
    # (`complete_config`).
    _keys_to_ignore_on_load_missing = [r"^vision_model\.post_layernorm\."]
    _skip_keys_device_placement = [cache_name()]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *,
        config: MPlugOwl3Config | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load the model like `PreTrainedModel.from_pretrained`; gate and projector follow from the tensor names.

        Raises:
            DataError: there are no safetensors, or weights are missing, unexpected or of another shape.
            ConfigError: config and weights disagree, or an option is not supported.
        """
        if kwargs.get("use_safetensors") is False:
            raise ConfigError("use_safetensors is False; only safetensors are loaded: leave it out")
        if kwargs.get("ignore_mismatched_sizes"):
            raise ConfigError(
                "ignore_mismatched_sizes is True, which would leave weights at random values: leave it out, and use "
                "resize_token_embeddings after loading for another vocabulary"
            )
        hub = hub_options(kwargs)
        if isinstance(config, MPlugOwl3Config):
            complete = copy.deepcopy(config)
        else:
            complete = MPlugOwl3Config.from_pretrained(config or pretrained_model_name_or_path, **hub)
        for name in _CONFIG_OVERRIDES & set(kwargs):
            setattr(complete, name, kwargs.pop(name))
        complete.check()
        if kwargs.get("state_dict") is not None:
            keys = set(kwargs["state_dict"])
        elif pretrained_model_name_or_path is not None:
            keys = checkpoint_keys(pretrained_model_name_or_path, kwargs.get("variant"), **hub)
        else:
            raise ConfigError("pass a directory or hub name, or a state_dict together with config")
        complete_config(complete, keys)
        with_report = kwargs.pop("output_loading_info", False)
        loaded = load_clean(
            super().from_pretrained,
            pretrained_model_name_or_path,
            "state_dict" if pretrained_model_name_or_path is None else os.fspath(pretrained_model_name_or_path),
            expected=f"mPLUG-Owl3 with gate={complete.gate!r} and projector_layers={complete.projector_layers}",
            **kwargs | {"config": complete, "use_safetensors": True},
        )
        return cast(Self, loaded if with_report else loaded[0])

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        # Every public method that enables checkpointing, in all supported versions, calls this method.
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                "use_reentrant is True; hyper layers share the visual features, which reentrant checkpointing cannot "
                "differentiate: pass gradient_checkpointing_kwargs={'use_reentrant': False}, or leave it out"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)
