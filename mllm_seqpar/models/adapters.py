"""Adapters of PEFT, such as those of `mllm-seqpar finetune --use_peft`, merged into the base model that they name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from mllm_seqpar._compat import optional_import
from mllm_seqpar.errors import ConfigError

from .hub import local_directory

CONFIG = "adapter_config.json"


def base_of_adapter(folder: Path) -> Path | None:
    """Return the directory of the base model of an adapter; None if `folder` holds no adapter.

    Raises:
        ConfigError: the base model is not there, or `folder` holds a whole model too.
    """
    file = folder / CONFIG
    if not file.is_file():
        return None
    if [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ConfigError(
            f"--model {folder}: it holds a whole model and an adapter ({CONFIG}); move one of them to another directory"
        )
    try:
        config = json.loads(file.read_text())
        name, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--model {folder}: {CONFIG} cannot be read: {error}") from error
    local = revision is None or Path(name or "").exists()
    base = Path(local_directory((name or "") if local else f"{name}@{revision}"))
    if not name or not (base / "config.json").is_file():
        raise ConfigError(
            f"--model {folder}: it holds an adapter, and its base model {name!r} is not a model directory here; write "
            f"the directory of the base model into {CONFIG}, as base_model_name_or_path"
        )
    return base


def add_adapters(model: nn.Module, config: Any) -> Any:
    """Return the model that `peft.get_peft_model` creates from a model and a configuration of adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT 0.21, transformers 5.17
        return import_peft().get_peft_model(model, config)


def refuse_adapter(folder: Path, reason: str) -> None:
    """Raise ConfigError if `folder` holds an adapter."""
    if (folder / CONFIG).is_file():
        raise ConfigError(
            f"--model {folder}: it holds an adapter, and {reason}; merge it with its base model first: "
            f"mllm-seqpar convert --model {folder} --output MERGED"
        )


def import_peft() -> Any:
    return optional_import("peft", extra="peft", needed_for="a model with adapters")
