"""What a checkpoint's tensor names tell about the model: read from the safetensors headers, no tensor is loaded."""

import json
import os
import re
from typing import Any

from safetensors import safe_open
from transformers.utils import cached_file

from mllm_seqpar.errors import ConfigError, DataError

from .configuration import MPlugOwl3Config

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_VISUAL = "self_attn.v_kv_proj."
_GATE = re.compile(r"self_attn\.(gate.*)$")
_GATES = {"gate": "vector", "gate_proj.0.weight": "per_head", "gate_proj.0.bias": "per_head"}


def checkpoint_keys(path: str | os.PathLike, **hub: Any) -> set[str]:
    """The tensor names of a checkpoint directory or hub repository, of one safetensors file or several with an index.

    Args:
        path: as for `from_pretrained`.
        **hub: where and how to look, as for `from_pretrained` (cache_dir, revision, token, subfolder, ...).

    Raises:
        DataError: there are no safetensors, only pickled weights, or nothing.
    """

    def find(name: str) -> str | None:
        return cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=True,
            _raise_exceptions_for_connection_errors=True,
            **hub,
        )

    if (single := find(_SINGLE)) is not None:
        with safe_open(single, framework="pt") as file:
            return set(file.keys())
    if (index := find(_INDEX)) is not None:
        with open(index, encoding="utf-8") as file:
            return set(json.load(file)["weight_map"])
    pickled = [name for name in _PICKLED if find(name) is not None]
    if pickled:
        raise DataError(
            f"{os.fspath(path)!r} holds {pickled[0]} and no safetensors; only safetensors are loaded. Convert it where "
            "it is trusted: load the pickled state dict and write it with safetensors.torch.save_file"
        )
    raise DataError(f"{os.fspath(path)!r} holds neither {_SINGLE} nor {_INDEX}; expected a checkpoint in safetensors")


def gate_of(keys: set[str]) -> str | None:
    """Return the gate that tensor names show: "per_head", "vector", or None for one softmax over frames and text.

    Raises:
        ConfigError: the names are those of no published generation.
    """
    if not any(_VISUAL in key for key in keys):
        raise ConfigError("the weights have no self_attn.v_kv_proj: this is not an mPLUG-Owl3 checkpoint")
    names = {match[1] for key in keys if (match := _GATE.search(key))}
    gates = {_GATES.get(name) for name in names}
    if None in gates or len(gates) > 1:
        raise ConfigError(
            f"the weights have self_attn.{{{', '.join(sorted(names))}}}; published checkpoints have "
            "self_attn.gate_proj.0.{weight, bias} (per_head), self_attn.gate (vector), or no gate"
        )
    return gates.pop() if gates else None


def complete_config(config: MPlugOwl3Config, keys: set[str]) -> None:
    """Fills in, in place, what a published config leaves to the weights: the variant, and whether the tower has a head.

    Raises:
        ConfigError: the config names a variant that the weights are not, or hyper layers that they do not have.
    """
    if not any(_VISUAL in key for key in keys) and config.hyper_layers:
        raise ConfigError("the weights have no self_attn.v_kv_proj: this is not an mPLUG-Owl3 checkpoint")
    found = "gated" if any(key.endswith(_GATE) for key in keys) else "fused"
    if config.variant not in (None, found):
        raise ConfigError(
            f"the config says variant={config.variant!r}, and the weights "
            f"{'have' if found == 'gated' else 'do not have'} self_attn.gate, so they "
            f"are {found!r}: leave variant out, or set it to {found!r}"
        )
    config.variant = found
    if any(key.startswith("vision_model.") for key in keys):
        has_head = any(key.startswith("vision_model.head.") for key in keys)
        if getattr(config.vision, "vision_use_head", True) != has_head:
            config.vision.vision_use_head = has_head
