"""The weights of an OpenFlamingo on disk: each tensor once, under one of its names in the real class's state_dict.

That state_dict has several names for most tensors: a decoder layer is in the list `old_decoder_blocks` and in the layer
that runs it, so is a cross-attention block, and embeddings may be tied to the output projection. Files contain the
names of published checkpoints (those of the layers). Loading accepts any of the names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_clean, require_clean

FILE = "model.safetensors"
_UNPUBLISHED = ("lang_encoder.old_decoder_blocks.", "lang_encoder.gated_cross_attn_layers.")
# Two names of one tensor in different versions of transformers. The first name of each pair is the published one.
_SYNONYMS = (("lang_encoder.embed_out.", "lang_encoder.lm_head."), ("vision_encoder.vision_model.", "vision_encoder."))


def load_complete(cls: Any, directory: str | os.PathLike[str], ignored: str, **options: Any) -> Any:
    """Load `cls.from_pretrained(directory)` in float32; all weights of the class must be in the files, and only those.

    A subclass of a transformers class does not work: transformers renames tensors by class names. `ignored` is a
    regular expression for names of unexpected tensors that are allowed.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    options |= {"expected": f"the {cls.__name__} that its config.json describes", "ignored": ignored}
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # not to warn about the allowed tensors; any other difference raises an error
    try:
        return load_clean(cls.from_pretrained, directory, dtype=torch.float32, **options)[0]
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{directory}: cannot be loaded as {cls.__name__}: {error}") from error
    finally:
        logging.set_verbosity(before)


def load_weights(model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
    """Load a directory's safetensors, in `dtype` or the dtype of the files; raise DataError if the weights differ."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise ConfigError(f"{directory}: no {FILE} there; mllm-seqpar convert writes one")
    kinds = {x.dtype for x in tensors.values() if x.is_floating_point()} if dtype is None else {dtype}
    if len(kinds) == 1:
        cast(model, kinds.pop())
    require_clean({"missing_keys": set_weights(model, tensors, directory)}, str(directory))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers to `dtype`, in place.

    Buffers that are computed from the config keep their dtype: rotary frequencies in bfloat16 would give late tokens
    other angles.
    """
    for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def set_weights(model: nn.Module, given: Mapping[str, Tensor], where: str | os.PathLike[str]) -> list[str]:
    """Copy tensors into a model by any of their names; return the names of the tensors that were not set.

    Raises:
        DataError: an unknown name, another shape, or two values for one tensor of the file `where`.
    """
    state = model.state_dict(keep_vars=True)
    names = {name: _model_name(name, state) for name in given}
    unknown = [name for name in given if names[name] not in state]
    mismatched = [
        (name, x.shape, state[names[name]].shape)
        for name, x in given.items()
        if name not in unknown and x.shape != state[names[name]].shape
    ]
    require_clean({"unexpected_keys": unknown, "mismatched_keys": mismatched}, str(where))
    source_of: dict[int, str] = {}
    with torch.no_grad():
        for name, tensor in given.items():
            target = state[names[name]]
            first = source_of.setdefault(id(target), name)
            if first != name and not torch.equal(given[first], tensor):
                raise DataError(f"{where}: {first} and {name} are one tensor of the model, and differ in the file")
            target.copy_(tensor)
    return [name for name, tensor in state.items() if id(tensor) not in source_of]


def _model_name(name: str, known: Collection[str]) -> str:
    """Return the model's name of a tensor, which may be a synonym of `name`."""
    for pair in _SYNONYMS:
        for old, new in (pair, pair[::-1]):
            if name not in known and name.startswith(old):
                name = new + name.removeprefix(old)
    return name


def save_weights(model: nn.Module, directory: Path, state: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors`, each tensor of `state` once, under its published name."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda x: x[0].startswith(_UNPUBLISHED)):
        first.setdefault(id(tensor), name)
    tensors = {name: state[name].detach().cpu().contiguous() for name in first.values()}
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
