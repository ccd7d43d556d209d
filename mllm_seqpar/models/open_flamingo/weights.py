"""The weights of an OpenFlamingo on disk: each tensor once, under a name of the real class's state_dict.

That state_dict has most tensors twice or more: a decoder layer is in the list `old_decoder_blocks` and in the layer
that runs it, a cross-attention block likewise, and embeddings may be tied to the vocabulary. Files have the names by
which published checkpoints go (those of the layers); readers take any of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading_report import require_clean

FILE = "model.safetensors"
_UNPUBLISHED = ("lang_encoder.old_decoder_blocks.", "lang_encoder.gated_cross_attn_layers.")
# The same tensor in other versions of transformers; GPT-NeoX publishes the first of the one pair, CLIP of the other.
_SYNONYMS = (("lang_encoder.embed_out.", "lang_encoder.lm_head."), ("vision_encoder.vision_model.", "vision_encoder."))


def load_complete(cls: Any, directory: str | os.PathLike[str], ignored: str, **options: Any) -> Any:
    """Return `cls.from_pretrained(directory)` in float32, with every weight that the class has from the files.

    Args:
        cls: a model class of transformers. It must be the real class: transformers renames tensors by class names.
        directory: with safetensors or `pytorch_model.bin` files, in one part or several.
        ignored: a regular expression for names in the files that the model has no place for.
        **options: of `from_pretrained`.

    Raises:
        ConfigError: files that cannot be read.
        DataError: weights that are missing, unexpected or of another shape.
    """
    from safetensors import SafetensorError

    try:
        with without_report():
            model, report = cls.from_pretrained(
                directory, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{directory}: cannot be loaded as {cls.__name__}: {error}") from error
    ignore = [name for name in report["unexpected_keys"] if re.search(ignored, name)]
    require_clean(report, str(directory), expected=f"the {cls.__name__} that its config.json describes", ignore=ignore)
    return model


@contextmanager
def without_report() -> Iterator[None]:
    """Keep transformers from printing what a CLIP holds beside the tower; any other difference raises an error here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_weights(model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
    """Fills a model from a directory's safetensors.

    Args:
        model: all of whose weights must be there.
        directory: with `model.safetensors`, or several safetensors files.
        dtype: of the model afterwards; None for that of the files.

    Raises:
        ConfigError: no file.
        DataError: other weights than the model has.
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
        cast(model, dtype)
    require_clean({"missing_keys": set_weights(model, found, directory)}, str(directory))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and saved buffers to `dtype`, in place.

    Not what is computed from the config: rotary frequencies rounded to bfloat16 would turn late tokens elsewhere.
    """
    for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def set_weights(model: nn.Module, given: Mapping[str, Tensor], where: str | os.PathLike[str]) -> list[str]:
    """Copy tensors into a model by any of their names, and return the names of those that got none.

    Args:
        model: the model.
        given: names and tensors, those of `where`.
        where: the file or directory that errors name.

    Raises:
        DataError: a name that the model does not have, another shape, or two values for one tensor.
    """
    own = model.state_dict(keep_vars=True)
    places = {name: _own_name(name, own) for name in given}
    unknown = [name for name, place in places.items() if place not in own]
    other = [
        (name, x.shape, own[places[name]].shape)
        for name, x in given.items()
        if name not in unknown and x.shape != own[places[name]].shape
    ]
    require_clean({"unexpected_keys": unknown, "mismatched_keys": other}, str(where))
    filled: dict[int, str] = {}
    with torch.no_grad():
        for name, tensor in given.items():
            place = own[places[name]]
            before = filled.setdefault(id(place), name)
            if before != name and not torch.equal(given[before], tensor):
                raise DataError(f"{where}: {before} and {name} are one tensor of the model, and differ in the file")
            place.copy_(tensor)
    return [name for name, tensor in own.items() if id(tensor) not in filled]


def _own_name(name: str, own: Collection[str]) -> str:
    for pair in _SYNONYMS:
        for old, new in (pair, pair[::-1]):
            if name not in own and name.startswith(old):
                name = new + name.removeprefix(old)
    return name


def save_weights(model: nn.Module, directory: Path, state: Mapping[str, Tensor]) -> None:
    """Writes `model.safetensors`: of tensors with several names, the published one."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    names = sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0].startswith(_UNPUBLISHED))
    for name, tensor in names:
        first.setdefault(id(tensor), name)
    kept = {name: state[name].detach().cpu().contiguous() for name in first.values()}
    save_file(kept, directory / FILE, metadata={"format": "pt"})
