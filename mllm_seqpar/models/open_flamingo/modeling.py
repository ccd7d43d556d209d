"""The real class `open_flamingo.Flamingo` over a CLIP vision tower of transformers; imported only to build a model."""

from __future__ import annotations

import os
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionModel
from transformers.initialization import no_init_weights

from mllm_seqpar.errors import ConfigError

from .configuration import OpenFlamingoConfig
from .language import language_model_class
from .package import open_flamingo
from .weights import load_weights, save_weights

_Flamingo, _Mixin, _extend = open_flamingo()
# What transformers' Auto classes and loaders pass, and what a local directory has no need of.
_NO_MATTER = {"adapter_kwargs", "output_loading_info", "trust_remote_code", "code_revision"}
_NO_MATTER |= {"revision", "token", "cache_dir", "force_download", "local_files_only", "use_safetensors"}


class ClipTower(CLIPVisionModel):
    """A CLIP vision tower that gives what open_clip's towers give with `output_tokens`."""

    def forward(self, pixel_values: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Pixels (n, 3, H, W) -> pooled (n, width), tokens of the patches (n, patches, width), before the last norm."""
        out = super().forward(pixel_values=pixel_values)
        return out.pooler_output, out.last_hidden_state[:, 1:]


class OpenFlamingo(_Flamingo):  # type: ignore[valid-type,misc]
    """`open_flamingo.Flamingo` with what loading, saving and sharding models of transformers ask for.

    Attributes:
        config: an `OpenFlamingoConfig`.
    """

    config_class = OpenFlamingoConfig

    def __init__(self, config: OpenFlamingoConfig, language_model: Any = None, tower: Any = None) -> None:
        """Builds the model; parts that are not given get no weights of their own yet."""
        layers = config.layers
        with no_init_weights():
            language_model = language_model or language_model_class(config.text)._from_config(config.text)
            tower = tower or ClipTower(config.vision)
        language_model.tie_weights()  # not done where weights are not initialised
        _extend(language_model, _Mixin)
        language_model.set_decoder_layers_attr_name(layers)
        super().__init__(
            types.SimpleNamespace(visual=tower),
            language_model,
            config.eoc_token_id,
            config.media_token_id,
            vis_dim=config.vision.hidden_size,
            cross_attn_every_n_layers=config.cross_attn_every_n_layers,
        )
        self.config = config
        # Each of these is in the tree twice, in a list of its own and in the layer that runs both, so that layers
        # themselves would overlap with them as units.
        self._no_split_modules = [
            *("GatedCrossAttentionBlock", "PerceiverResampler"),
            *sorted({*(language_model._no_split_modules or ()), *(tower._no_split_modules or ())}),
        ]
        for block in language_model.gated_cross_attn_layers:
            if block is not None:
                block.attn.only_attend_immediate_media = config.only_attend_immediate_media

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
        """The model in a directory, in eval mode.

        Args:
            path: of the directory.
            config: when it is read already.
            dtype: of the parameters; "auto" for that of the file.
            torch_dtype: its former name.
            device_map: "meta" compares names and shapes only and gives a model without values; otherwise the CPU.
            **options: of `PreTrainedModel.from_pretrained`, those that say where on the hub to look.

        Raises:
            ConfigError: an option that is not known, or no weights.
            DataError: weights that are missing, or that the model has no place for.
        """
        unknown = [name for name, x in options.items() if x is not None and name[0] != "_" and name not in _NO_MATTER]
        if device_map not in (None, "cpu", "meta"):
            unknown.append("device_map")
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not known to OpenFlamingo.from_pretrained; leave it out")
        dtype = dtype if torch_dtype is None else torch_dtype
        with nullcontext() if device_map is None else torch.device(device_map):
            model = cls(config or OpenFlamingoConfig.from_pretrained(path))
        load_weights(model, Path(path), None if dtype in ("auto", None) else _dtype(dtype))
        return model.eval()

    def save_pretrained(self, directory: str | os.PathLike[str], state_dict: dict[str, Tensor] | None = None) -> None:
        """Writes config and weights; `state_dict` in place of the model's own, under the same names."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(directory)
        save_weights(self, Path(directory), self.state_dict() if state_dict is None else state_dict)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recomputes the language model's own layers in backward; the cross-attention blocks between them are kept."""
        self.lang_encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs)


def _dtype(value: Any) -> torch.dtype:
    return getattr(torch, value) if isinstance(value, str) else value
