"""Checks of the arguments of a patched forward, made on each rank before the ranks compare them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.utils import TransformersKwargs

from mllm_seqpar.errors import ConfigError, ShapeError

from .hf_inputs import Inputs

_KNOWN = {
    *TransformersKwargs.__annotations__,
    "cache_position",
    "ignore_index",
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


def check_text(inputs: Inputs) -> None:
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
