"""The weights of an OpenFlamingo on disk: each tensor once, under a name of the real class's state_dict.

That state_dict has most tensors twice or more: a decoder layer is in the list `old_decoder_blocks` and in the layer
that runs it, a cross-attention block likewise, and embeddings may be tied to the vocabulary. Files have the names by
which published checkpoints go (those of the layers); readers take any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mllm_seqpar.errors import ConfigError

FILE = "model.safetensors"
_UNPUBLISHED = ("lang_encoder.old_decoder_blocks.", "lang_encoder.gated_cross_attn_layers.")


def load_weights(model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
    """Fills a model from a directory's safetensors.

    Args:
        model: all of whose weights must be there.
        directory: with `model.safetensors`, or several safetensors files.
        dtype: of the model afterwards; None for that of the files.

    Raises:
        ConfigError: no file, or other weights than the model has.
    """
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise ConfigError(f"{directory}: no {FILE} there; mllm_seqpar.models.open_flamingo.convert writes one")
    kinds = {x.dtype for x in found.values() if x.is_floating_point()}
    if dtype is None and len(kinds) == 1:
        dtype = kinds.pop()
    if dtype is not None:
        _cast(model, dtype)
    left = set_weights(model, found)
    if left:
        raise ConfigError(
            f"{directory}: {len(left)} weights of the model are missing, among them {', '.join(left[:3])}"
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and saved buffers to `dtype`, in place.

    Not what is computed from the config: rotary frequencies rounded to bfloat16 would turn late tokens elsewhere.
    """
    for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def set_weights(model: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """Copies tensors into a model by any of their names; returns the names of those that got none.

    Raises:
        ConfigError: a name that the model does not have, or another shape.
    """
    own = model.state_dict(keep_vars=True)
    unknown = sorted(given.keys() - own.keys())
    if unknown:
        raise ConfigError(f"the model has no weights named {', '.join(unknown[:3])} ({len(unknown)} such names)")
    filled = set()
    with torch.no_grad():
        for name, tensor in given.items():
            if tensor.shape != own[name].shape:
                raise ConfigError(
                    f"{name} has shape {tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model"
                )
            own[name].copy_(tensor)
            filled.add(own[name].data_ptr())
    return [name for name, tensor in own.items() if tensor.data_ptr() not in filled]


def save_weights(model: nn.Module, directory: Path, state: Mapping[str, Tensor]) -> None:
    """Writes `model.safetensors`: of tensors with several names, the published one."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    names = sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0].startswith(_UNPUBLISHED))
    for name, tensor in names:
        first.setdefault(id(tensor), name)
    kept = {name: state[name].detach().cpu().contiguous() for name in first.values()}
    save_file(kept, directory / FILE, metadata={"format": "pt"})
