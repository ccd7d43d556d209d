"""The original class `open_flamingo.Flamingo` with a CLIP vision tower of transformers.

This module imports the package open-flamingo, so it is imported only to build a model.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from mllm_seqpar._compat import cache_argument, takes_cache
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.auto_classes import LocalCode

from .configuration import OpenFlamingoConfig
from .language import language_model_class
from .weights import load_weights, save_weights

# Options of transformers' Auto classes and loaders that have no effect on a local directory.
_IGNORED = {"adapter_kwargs", "output_loading_info", "trust_remote_code", "code_revision"}
_IGNORED |= {"revision", "token", "cache_dir", "force_download", "local_files_only", "use_safetensors"}


def open_flamingo() -> tuple[Any, Any, Any]:
    """Import `Flamingo`, `FlamingoLMMixin` and `extend_instance`; raise ConfigError without the package."""
    # The package imports open_clip for a factory that is not used here, and open_clip imports torchvision, which has no
    # build for some machines. If open_clip cannot be imported, an empty module replaces it during this import.
    replaced = False
    if "open_flamingo" not in sys.modules:
        try:
            import open_clip  # noqa: F401
        except ImportError:
            sys.modules["open_clip"] = types.ModuleType("open_clip")
            replaced = True
    try:
        from open_flamingo import Flamingo
        from open_flamingo.src.flamingo_lm import FlamingoLMMixin
        from open_flamingo.src.utils import extend_instance
    except ImportError as error:
        raise ConfigError(
            f"OpenFlamingo needs packages that are missing ({error}): pip install einops einops-exts, and "
            "pip install --no-deps open-flamingo==2.0.1, which pins an old torch"
        ) from error
    finally:
        if replaced:
            del sys.modules["open_clip"]
    return Flamingo, FlamingoLMMixin, extend_instance


_Flamingo, _Mixin, _extend = open_flamingo()


class ClipTower(CLIPVisionModel):
    """A CLIP vision tower with the output of open_clip's towers with `output_tokens`."""

    def forward(self, pixel_values: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Pixels (n, 3, H, W) -> pooled (n, width), patch tokens (n, patches, width) before the last norm."""
        out = super().forward(pixel_values=pixel_values)
        return out.pooler_output, out.last_hidden_state[:, 1:]


class _LanguageMixin(_Mixin):  # type: ignore[valid-type,misc]
    """`FlamingoLMMixin`, which passes on a cache by the name that the language model takes it by."""

    @takes_cache
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, **kwargs, **cache_argument(cache))

    @takes_cache
    def generate(self, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs, **({} if cache is None else cache_argument(cache)))


class OpenFlamingo(LocalCode, _Flamingo):  # type: ignore[valid-type,misc]
    """`open_flamingo.Flamingo` with the interface of transformers' models for loading, saving and sharding."""

    config_class = OpenFlamingoConfig

    def __init__(self, config: OpenFlamingoConfig, language_model: Any = None, tower: Any = None) -> None:
        """Build the model; parts that are not passed are created without initialised weights."""
        layers = config.layers
        with no_init_weights():
            language_model = language_model or language_model_class(config.text)._from_config(config.text)
            tower = tower or ClipTower(config.vision)
        language_model.tie_weights()  # no_init_weights skips this
        _extend(language_model, _LanguageMixin)
        language_model.set_decoder_layers_attr_name(layers)
        tokens = config.eoc_token_id, config.media_token_id
        options = {"vis_dim": config.vision.hidden_size, "cross_attn_every_n_layers": config.cross_attn_every_n_layers}
        super().__init__(types.SimpleNamespace(visual=tower), language_model, *tokens, **options)
        self.config = config
        # The cross-attention block and the decoder layer are in the module tree twice: in lists of their own, and in
        # the layer that runs both. The outer layer cannot be a unit, since it would overlap with them.
        own = {*(language_model._no_split_modules or ()), *(tower._no_split_modules or ())}
        self._no_split_modules = ["GatedCrossAttentionBlock", "PerceiverResampler", *sorted(own)]
        for block in language_model.gated_cross_attn_layers:
            if block is not None:
                block.attn.only_attend_immediate_media = config.only_attend_immediate_media

    @property
    def dtype(self) -> torch.dtype:
        return next(x.dtype for x in self.parameters() if x.is_floating_point())

    @property
    def generation_config(self) -> Any:
        return self.lang_encoder.generation_config

    @property
    def base_model(self) -> Any:
        """Return the model without its head, as a function; TRL computes the loss from its `last_hidden_state`."""
        return self._hidden_states

    def get_input_embeddings(self) -> Any:
        return self.lang_encoder.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lang_encoder.get_output_embeddings()

    def add_model_tags(self, tags: Any) -> None:
        """Do nothing: tags are for model cards, which `save_pretrained` does not write."""

    def _hidden_states(
        self,
        vision_x: Tensor | None = None,
        lang_x: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        use_cache: bool = False,
    ) -> BaseModelOutputWithPast:
        self._encode_vision_x(vision_x=pixel_values if vision_x is None else vision_x)
        text = {"input_ids": input_ids if lang_x is None else lang_x, "attention_mask": attention_mask}
        self._condition_media_locations(input_ids=text["input_ids"])
        output = self.lang_encoder(**text, use_cache=use_cache, output_hidden_states=True)
        self.lang_encoder.clear_conditioned_layers()
        return BaseModelOutputWithPast(last_hidden_state=output.hidden_states[-1])

    def forward(
        self,
        vision_x: Tensor | None = None,
        lang_x: Tensor | None = None,
        *args: Any,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the forward of `Flamingo`; `input_ids`, `pixel_values` and `cache` are transformers' names."""
        vision_x = pixel_values if vision_x is None else vision_x
        kwargs |= {"past_key_values": kwargs.pop("cache")} if "cache" in kwargs else {}
        return super().forward(vision_x, input_ids if lang_x is None else lang_x, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        config: OpenFlamingoConfig | None = None,
        dtype: Any = "auto",
        torch_dtype: Any = None,
        device_map: str | None = None,
        **options: Any,
    ) -> OpenFlamingo:
        """Load the model of a directory in eval mode.

        Args:
            config: the directory's config, if it has already been read.
            dtype: dtype of the parameters; "auto" is the file's. `torch_dtype` is its former name.
            device_map: "meta" only compares names and shapes and returns a model without values; otherwise the CPU.
            **options: options of `PreTrainedModel.from_pretrained` that locate files on the hub; ignored.

        Raises:
            ConfigError: an unknown option, or no weights.
            DataError: weights are missing or unexpected.
        """
        unknown = [name for name, x in options.items() if x is not None and name[0] != "_" and name not in _IGNORED]
        if device_map not in (None, "cpu", "meta"):
            unknown.append("device_map")
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not known to OpenFlamingo.from_pretrained; leave it out")
        dtype = dtype if torch_dtype is None else torch_dtype
        with nullcontext() if device_map is None else torch.device(device_map):
            model = cls(config or OpenFlamingoConfig.from_pretrained(path))
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        load_weights(model, Path(path), dtype)
        return model.eval()

    def save_pretrained(self, directory: str | os.PathLike[str], state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config and weights; `state_dict` replaces the model's own, under the same names."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.config.architectures = [type(self).__name__]
        self.config.save_pretrained(directory)
        save_weights(self, Path(directory), self.state_dict() if state_dict is None else state_dict)

    def tie_weights(self) -> None:
        """Tie the language model's embeddings and head again; accelerate calls it after it has replaced parameters."""
        self.lang_encoder.tie_weights()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.lang_encoder.is_gradient_checkpointing

    def gradient_checkpointing_disable(self) -> None:
        self.lang_encoder.gradient_checkpointing_disable()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Recompute the language model's own layers in backward; cross-attention blocks keep their activations."""
        self.lang_encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Do the same, under the name that `Trainer` calls in newer versions of transformers."""
        self.lang_encoder.activation_checkpointing_enable(activation_checkpointing_kwargs, **options)
