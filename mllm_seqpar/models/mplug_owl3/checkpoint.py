"""Facts about a checkpoint that follow from its tensor names, which are read from the safetensors headers.

The names identify the published generation: its gate, its projector, and the options of the processor that it was
trained with. Published directories hold no preprocessor_config.json and no processor_config.json.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import safe_open

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.hub import local_file

from .configuration import AUTO, MPlugOwl3Config

_SINGLE, _INDEX = "model{}.safetensors", "model.safetensors.index{}.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_VISUAL = "self_attn.v_kv_proj."
_HYPER_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.v_kv_proj\.")
_PROJECTOR = "vision2text_model."
_PROJECTORS = {1: {"weight", "bias"}, 2: {"0.weight", "0.bias", "2.weight", "2.bias"}}
_UNKNOWN = {"gate": AUTO, "projector_layers": None}
_GATE = re.compile(r"self_attn\.(gate.*)$")
_GATES = {"gate": "vector", "gate_proj.0.weight": "per_head", "gate_proj.0.bias": "per_head"}

PROCESSOR_OPTIONS: dict[str | None, dict[str, Any]] = {
    "per_head": {"image_size": 384, "video_span": False, "cut_template": "v2"},  # 7B-240728
    "vector": {"image_size": 384, "video_span": True, "cut_template": "v3"},  # 241014
    None: {"image_size": 378, "video_span": True, "cut_template": "v3"},  # 241101
}
"""Options of the published processors, by the gate of their model."""


def checkpoint_keys(path: str | os.PathLike, variant: str | None = None, **hub: Any) -> set[str]:
    """Return the tensor names of a checkpoint; raise DataError if there are no safetensors of this variant."""

    suffix = f".{variant}" if variant else ""
    single_name, index_name = _SINGLE.format(suffix), _INDEX.format(suffix)
    if (single := local_file(path, single_name, **hub)) is not None:
        with safe_open(single, framework="pt") as file:
            return set(file.keys())
    if (index := local_file(path, index_name, **hub)) is not None:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if pickled := next((name for name in _PICKLED if local_file(path, name, **hub) is not None), None):
        raise DataError(
            f"{os.fspath(path)!r} holds {pickled} and no safetensors; only safetensors are loaded; "
            "mllm-seqpar convert writes them"
        )
    raise DataError(
        f"{os.fspath(path)!r} holds neither {single_name} nor {index_name}; expected a checkpoint in safetensors"
    )


def gate_of(keys: set[str]) -> str | None:
    """Return "per_head", "vector", or None for one joint softmax; raise ConfigError if no published model fits."""
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


def projector_layers_of(keys: set[str]) -> int:
    """Return the number of linear layers, 1 or 2, of the projector; raise ConfigError if no published model fits."""
    names = {key.partition(_PROJECTOR)[2] for key in keys if _PROJECTOR in key}
    for layers, parts in _PROJECTORS.items():
        if names and names <= parts:
            return layers
    raise ConfigError(
        f"the weights have vision2text_model.{{{', '.join(sorted(names))}}}; published checkpoints have "
        "vision2text_model.{weight, bias} or vision2text_model.{0, 2}.{weight, bias}"
    )


def complete_config(config: MPlugOwl3Config, keys: set[str]) -> None:
    """Set, in place, the gate, the projector and the tower's head; raise ConfigError if the config contradicts them."""
    actual: dict[str, Any] = {"projector_layers": projector_layers_of(keys)}
    if config.hyper_layers or any(_VISUAL in key for key in keys):
        actual["gate"] = gate_of(keys)
        actual["hyper_layers"] = sorted({int(match[1]) + 1 for key in keys if (match := _HYPER_LAYER.search(key))})
    stated = {name: getattr(config, name) for name in actual}
    wrong = [name for name, value in stated.items() if value not in (actual[name], _UNKNOWN.get(name, actual[name]))]
    if wrong:
        both = (f"the config says {name}={stated[name]!r}, and the weights are {actual[name]!r}" for name in wrong)
        raise ConfigError(f"{'; '.join(both)}. Correct the config, or leave gate and projector_layers out of it")
    for name, value in actual.items():
        setattr(config, name, value)
    # No published generation computes the head of the tower, so a checkpoint may lack it.
    has_head = any("vision_model.head." in key for key in keys)
    if getattr(config.vision, "vision_use_head", True) != has_head:
        config.vision.vision_use_head = has_head


def processor_options(
    path: str | os.PathLike, files: Mapping[str, Sequence[str]], explicit: Mapping[str, Any], **hub: Any
) -> dict[str, Any]:
    """Return the options of a processor: explicit ones, else options in files, else options of the generation.

    `files` has the names of JSON files, and the options that each may state. DataError says that an option is neither
    passed nor stated, and that no weights identify the generation.
    """
    options: dict[str, Any] = {}
    for name, allowed in files.items():
        file = local_file(path, name, **hub)
        stated = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        options |= {option: stated[option] for option in allowed if option in stated}
    options |= explicit
    lacking = [name for name in PROCESSOR_OPTIONS[None] if name not in options]
    if not lacking:
        return options
    try:
        keys = checkpoint_keys(path, **hub)
    except DataError as error:
        known = ", ".join(str({name: published[name] for name in lacking}) for published in PROCESSOR_OPTIONS.values())
        raise DataError(
            f"{os.fspath(path)!r} has no file that states the processor's {', '.join(lacking)}, and no weights that "
            f"show its generation ({error}); pass what the model was trained with: one of {known}"
        ) from error
    return PROCESSOR_OPTIONS[gate_of(keys)] | options
