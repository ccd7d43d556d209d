"""Rotary embeddings whose frequencies depend on the length of the text (`rope_type` "dynamic" and "longrope").

transformers derives the length from the largest position that the embedding is called with, and stores what it has
derived on the module. A rank's shard of the text has other positions than the whole, so the ranks would rotate their
keys by different frequencies. Each rank therefore passes the largest position of the whole text beside its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.patching import Patch

from .facts import ModelFacts

_LENGTH_INDEPENDENT = {"default", "linear", "yarn", "llama3", "proportional"}
"""The values of `rope_type` with which a rotation depends on its position only."""


def rotate_by_whole_text(family: ModelFacts[Any], patch: Patch) -> None:
    """Let rotary embeddings of the text derive their frequencies from the whole text, on every rank of several."""
    if patch.context.comm.size > 1:
        for module in family.rotary_embeddings():
            if not _rope_types(module) <= _LENGTH_INDEPENDENT:
                patch.set(module, "forward", functools.partial(_rotations, family, module.forward))


def _rope_types(module: nn.Module) -> set[str]:
    """Return the `rope_type` of an embedding, or those of all kinds of layers that it serves."""
    found = getattr(module, "rope_type", "default")
    return set(found.values()) if isinstance(found, dict) else {found}


def _rotations(
    family: ModelFacts[Any], unpatched: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Return the cosines and sines (..., s, D) of this rank's positions (..., s)."""
    whole = family.whole_positions
    if whole.dim() > 2:
        whole = whole[-position_ids.shape[0] :]  # the first components of several may count tokens
    largest = whole.max().to(position_ids).expand(*position_ids.shape[:-1], 1)
    found = unpatched(x, torch.cat([position_ids, largest], -1), *args, **kwargs)
    return tuple(rotation[..., :-1, :] for rotation in found)
