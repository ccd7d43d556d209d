"""Loading of checkpoints, and what transformers and accelerate need to know of the model."""

import copy
import os
from dataclasses import fields
from typing import Any, Self, cast

from transformers import PreTrainedModel

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading_report import require_clean

from .checkpoint import checkpoint_keys, complete_config
from .configuration import MPlugOwl3Config

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_CONFIG_OVERRIDES = {field.name for field in fields(MPlugOwl3Config)} - {"dtype"} | {"output_attentions"}
_NO_SPLIT = ["Qwen2DecoderLayer", "HyperDecoderLayer", "SiglipEncoderLayer", "SiglipVisionEmbeddings"]


class MPlugOwl3PreTrainedModel(PreTrainedModel):
    """Loading of published checkpoints; what both transformers and accelerate need to know of the model."""

    config: MPlugOwl3Config
    base_model_prefix = ""
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = _NO_SPLIT
    # The features are taken before this norm, so a checkpoint may do without it; likewise the head (`complete_config`).
    _keys_to_ignore_on_load_missing = [r"^vision_model\.post_layernorm\."]
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
        """As `PreTrainedModel.from_pretrained`, for safetensors only; gate and projector are found from their names.

        Raises:
            DataError: no safetensors, or weights that are missing, unexpected or of another shape.
            ConfigError: config and weights disagree, or an option that cannot be followed here.
        """
        if kwargs.get("use_safetensors") is False:
            raise ConfigError("use_safetensors is False; only safetensors are loaded: leave it out")
        if kwargs.get("ignore_mismatched_sizes"):
            raise ConfigError(
                "ignore_mismatched_sizes is True, which would leave weights at random values: leave it out, and use "
                "resize_token_embeddings after loading for another vocabulary"
            )
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}
        if isinstance(config, MPlugOwl3Config):
            own = copy.deepcopy(config)
        else:
            own = MPlugOwl3Config.from_pretrained(config or pretrained_model_name_or_path, **hub)
        for name in [name for name in kwargs if name in _CONFIG_OVERRIDES]:
            setattr(own, name, kwargs.pop(name))
        own.check()
        if kwargs.get("state_dict") is not None:
            keys = set(kwargs["state_dict"])
        elif pretrained_model_name_or_path is not None:
            keys = checkpoint_keys(pretrained_model_name_or_path, kwargs.get("variant"), **hub)
        else:
            raise ConfigError("pass a directory or hub name, or a state_dict together with config")
        complete_config(own, keys)
        wants_report = kwargs.pop("output_loading_info", False)
        kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=own, **kwargs)
        what = "state_dict" if pretrained_model_name_or_path is None else os.fspath(pretrained_model_name_or_path)
        expected = f"mPLUG-Owl3 with gate={own.gate!r} and projector_layers={own.projector_layers}"
        require_clean(report, what, expected=expected)
        return cast(Self, (model, report)) if wants_report else model

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        # Every public way to switch checkpointing on, in all supported versions, comes through here.
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                "use_reentrant is True; hyper layers share the frames' features, which reentrant checkpointing cannot "
                "differentiate: pass gradient_checkpointing_kwargs={'use_reentrant': False}, or nothing"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)
