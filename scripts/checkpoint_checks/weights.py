"""Checks of a checkpoint's tensors that do not load them: names, shapes, and the memory that the model needs."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import load_model

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "BOOL": 1}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MEMORY_FACTOR = 1.25
"""Memory needed relative to the weights, with activations of a few frames."""


def headers(path: str) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor of a directory from the headers of its safetensors files."""
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    if not found:
        raise ConfigError(f"{path}: no *.safetensors files; mllm-seqpar convert writes them")
    return found


def describe_files(path: str) -> str:
    """Return the config's model type, the number of tensors by dtype, their size, and the other files, as text."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}: config.json cannot be read ({error}); pass the directory of a checkpoint"
        raise ConfigError(message) from error
    tensors = headers(path)
    kinds = Counter(dtype for dtype, _ in tensors.values())
    total = sum(prod(shape) * BYTES.get(dtype, 4) for dtype, shape in tensors.values())
    others = sorted(file.name for file in Path(path).iterdir() if file.suffix != ".safetensors")
    numbers = ", ".join(f"{count} {dtype}" for dtype, count in kinds.items())
    size = f"{len(tensors)} tensors, {total / 2**30:.2f} GiB, {numbers}"
    return f"model_type {config.get('model_type')!r}, {size}\nother files: {', '.join(others)}"


def names_and_shapes(path: str) -> str:
    """Compare the names and shapes in the files with the model's, on the meta device: nothing is read or allocated."""
    model: Any = load_model(path, dtype="auto", device_map="meta")
    config = model.config
    names = ("gate", "projector_layers", "hyper_layers", "cross_layer_interval", "additional_vocab_size")
    facts = ", ".join(f"{name}={getattr(config, name)}" for name in names if hasattr(config, name))
    size = sum(p.numel() for p in model.parameters()) / 1e9
    return f"{type(model).__name__} of {size:.3f} billion parameters: all names and shapes match\n{facts}".strip()


def missing_memory(path: str, dtype: str, device: str) -> tuple[torch.dtype, str | None]:
    """Return the dtype to load in, and an explanation if the model does not fit into the memory of `device`."""
    kinds = Counter({name: 0 for name in DTYPES})
    for kind, shape in headers(path).values():
        kinds[kind] += prod(shape)
    published = DTYPES.get(kinds.most_common(1)[0][0], torch.float32)
    free = free_memory(device)
    for wanted in [torch.float32, published] if dtype == "auto" else [getattr(torch, dtype)]:
        need = MEMORY_FACTOR * kinds.total() * wanted.itemsize
        if free is None or need <= free:
            return wanted, None
    return wanted, (
        f"{need / 2**30:.1f} GiB are needed in {wanted}, {free / 2**30:.1f} GiB are free on {device}; "
        "run this on a machine with more memory"
    )


def free_memory(device: str) -> int | None:
    """Return the free memory of a device in bytes, or None if it is unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
