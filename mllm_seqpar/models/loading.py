"""Loading a model and its processor from a directory, and what of a model is sharded as a unit."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar import models
from mllm_seqpar.cli.failure import first_line
from mllm_seqpar.errors import ConfigError

from .loading_report import require_clean


def load_model(path: str, dtype: torch.dtype | str = torch.float32, device_map: str | None = None) -> nn.Module:
    """The model in directory `path`.

    Args:
        path: a directory that `save_pretrained` wrote, or a published checkpoint.
        dtype: for training float32: optimizers need master weights, FSDP casts for computation. "auto": that of the
            checkpoint.
        device_map: "meta" validates names and shapes without reading the weights.

    Raises:
        ConfigError: there is no model, it cannot be read, it is an adapter, or its type is not known.
        DataError: the checkpoint's weights are not exactly the model's.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    _register()
    _require_directory(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: {first_line(error)}") from error
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            options = _reporting(auto._model_mapping[type(config)])
            options |= {} if device_map is None else {"device_map": device_map}
            try:
                loaded = auto.from_pretrained(path, config=config, dtype=dtype, **options)
            except (OSError, SafetensorError, RuntimeError) as error:
                raise ConfigError(f"--model {path}: {first_line(error)}") from error
            model, report = loaded if isinstance(loaded, tuple) else (loaded, {})
            require_clean(report, f"--model {path}", expected=type(model).__name__)
            return model
    raise ConfigError(f"--model {path}: no model class is registered for {type(config).__name__}")


def load_processor(path: str) -> Any:
    """The processor in directory `path`.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoProcessor

    _register()
    _require_directory(path)
    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--model {path}: no processor there: {first_line(error)}") from error


def layer_classes(model: nn.Module) -> list[str]:
    """Names of the classes whose instances are sharded as units of their own: the model's `_no_split_modules`.

    transformers collects that list from the classes of all parts, and it may name some that this model has no instance
    of (the text half of SigLIP), which accelerate would refuse.
    """
    present = {type(module).__name__ for module in model.modules()}
    return sorted(present & set(getattr(model, "_no_split_modules", None) or ()))


def _require_directory(path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model {path}: no config.json there; give a directory that save_pretrained wrote")
    if (Path(path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--model {path}: it holds an adapter (adapter_config.json), and transformers would load the weights of "
            "the base model that it names from elsewhere; merge the adapter (PEFT's merge_and_unload), save, and give "
            "that directory"
        )


def _reporting(kind: Any) -> dict[str, Any]:
    """Return the options that make `from_pretrained` report every difference, where the class checks none itself."""
    from transformers import PreTrainedModel

    if getattr(kind.from_pretrained, "__func__", None) is not PreTrainedModel.from_pretrained.__func__:
        return {"output_loading_info": True}
    return {"output_loading_info": True, "ignore_mismatched_sizes": True}


def _register() -> None:
    """Imports the native models, each of which registers itself with transformers' Auto classes."""
    for package in pkgutil.iter_modules(models.__path__, models.__name__ + "."):
        importlib.import_module(package.name)
