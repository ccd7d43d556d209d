"""Loading of checkpoints, and what transformers and accelerate need to know of the model."""

import copy
import os
from dataclasses import fields
from typing import Any, Self

from transformers import PreTrainedModel

from mllm_seqpar.errors import ConfigError

from .checkpoint import checkpoint_keys, complete_config
from .configuration import VARIANTS, MPlugOwl3Config

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_CONFIG_OVERRIDES = {field.name for field in fields(MPlugOwl3Config)} - {"dtype", "variant"} | {"output_attentions"}
_NO_SPLIT = ["Qwen2DecoderLayer", "HyperDecoderLayer", "SiglipEncoderLayer", "SiglipVisionEmbeddings"]


class MPlugOwl3PreTrainedModel(PreTrainedModel):
    """Loading of published checkpoints; what both transformers and accelerate need to know of the model."""

    config: MPlugOwl3Config
    base_model_prefix = ""
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = _NO_SPLIT
    # the model reads the tower before these, and a checkpoint may do without them
    _keys_to_ignore_on_load_missing = [r"vision_model\.(head|post_layernorm)\."]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: MPlugOwl3Config | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """As `PreTrainedModel.from_pretrained`; finds the variant from the weights, and reads safetensors only.

        `variant="gated"` or `"fused"` states the variant, and must then be what the weights are; any other value is
        transformers' name of a file variant.

        Raises:
            DataError: no safetensors.
            ConfigError: config and weights disagree on the variant.
        """
        if kwargs.get("use_safetensors") is False:
            raise ConfigError("use_safetensors is False; only safetensors are loaded: leave it out")
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}
        if isinstance(config, MPlugOwl3Config):
            own = copy.deepcopy(config)
        else:
            own = MPlugOwl3Config.from_pretrained(config or pretrained_model_name_or_path, **hub)
        if kwargs.get("variant") in VARIANTS:
            own.variant = kwargs.pop("variant")
        for name in [name for name in kwargs if name in _CONFIG_OVERRIDES]:
            setattr(own, name, kwargs.pop(name))
        if kwargs.get("state_dict") is not None:
            keys = set(kwargs["state_dict"])
        elif pretrained_model_name_or_path is not None:
            keys = checkpoint_keys(pretrained_model_name_or_path, **hub)
        else:
            raise ConfigError("pass a directory or hub name, or a state_dict together with config")
        complete_config(own, keys)
        kwargs["use_safetensors"] = True
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=own, **kwargs)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        # Every public way to switch checkpointing on, in all supported versions, comes through here.
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                "use_reentrant is True; hyper layers share the frames' features, which reentrant checkpointing cannot "
                "differentiate: pass gradient_checkpointing_kwargs={'use_reentrant': False}, or nothing"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)
