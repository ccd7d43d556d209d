"""Checks of the arguments of a patched forward, made on each rank before the ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import TransformersKwargs

from mllm_seqpar.comm.agreement import fingerprint
from mllm_seqpar.errors import ConfigError, ShapeError

from .inputs import ForwardInputs

_KNOWN = {
    *TransformersKwargs.__annotations__,
    "cache_position",
    "ignore_index",
    "logits_to_keep",
    "return_dict",
    "token_type_ids",  # tokenizers return them for all models
}


def refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that nothing in the model reads: a misspelled name would be ignored."""
    unknown = sorted(name for name, value in kwargs.items() if name not in _KNOWN and value is not None)
    if unknown:
        raise ConfigError(
            f"forward: unknown argument {', '.join(unknown)}; the model would ignore it. Check the spelling, or leave "
            "it out"
        )


def check_text(inputs: ForwardInputs) -> None:
    """Raise ShapeError unless text, positions and labels have the shapes and kinds of numbers that they must have."""
    dims = 2 if inputs.input_ids is not None else 3
    if inputs.text.dim() != dims:
        name = "input_ids" if dims == 2 else "inputs_embeds"
        raise ShapeError(f"{name}: has shape {tuple(inputs.text.shape)}; expected {dims} dimensions, samples first")
    shape, positions = (inputs.batch, inputs.length), inputs.position_ids
    if positions is not None and tuple(positions.shape) not in (shape, (1, inputs.length)):
        raise ShapeError(
            f"position_ids: has shape {tuple(positions.shape)}; expected {shape} or {(1, inputs.length)}, one for each "
            "token of this call"
        )
    _require_integers(input_ids=inputs.input_ids, labels=inputs.labels, shift_labels=inputs.shift_labels)


def _require_integers(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            raise ShapeError(f"{name}: has dtype {tensor.dtype}; expected integers, such as torch.long")


def facts_of_call(model: nn.Module, inputs: ForwardInputs, kwargs: Mapping[str, Any], whole: bool) -> dict[str, int]:
    """Return what else the ranks must have in common for one pass, by name: what decides the course of computation.

    Args:
        model: the patched model.
        inputs: of this call.
        kwargs: the further arguments of this call.
        whole: compare what only a walk over all modules and parameters shows, too.
    """
    device = inputs.text.device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    frames = inputs.frames if inputs.visual_shard is None else None  # a rank without frames passes any empty tensor
    given = (inputs.input_ids, inputs.inputs_embeds, inputs.labels, inputs.shift_labels, frames)
    counted = kwargs.get("num_items_in_batch")
    settings = {name: value for name, value in kwargs.items() if isinstance(value, (bool, int, float, str))}
    facts = {
        "training mode": int(model.training),
        "autocast (checksum of its dtype)": fingerprint(autocast) if autocast else 0,
        "checksum of the inputs' dtypes": fingerprint(str([None if x is None else x.dtype for x in given])),
        "num_items_in_batch": -1 if counted is None else int(counted),
        "checksum of further arguments": fingerprint(repr(sorted(settings.items()))),
    }
    if not whole:
        return facts
    trained = "".join(str(int(p.requires_grad)) for p in model.parameters())
    return facts | {
        "gradient checkpointing": int(any(getattr(m, "gradient_checkpointing", False) for m in model.modules())),
        "checksum of which parameters train": fingerprint(trained),
    }
