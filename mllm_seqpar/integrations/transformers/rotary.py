"""Rotary embeddings whose frequencies depend on the length of the text (`rope_type` "dynamic" and "longrope").

transformers derives the length from the largest position that the embedding is called with, and stores what it has
derived on the module. A rank's shard of the text has other positions than the whole, so the ranks would rotate their
keys by different frequencies. Each rank therefore passes the largest position of the whole text beside its own.

The positions of the whole text are in the state of the pass, with which the decoder is called. The recomputation of a
checkpoint around the decoder calls it with the same state again, also if other passes have run since.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import AdapterError
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.forward_state import ForwardState

from .facts import ModelFacts

_LENGTH_INDEPENDENT = {"default", "linear", "yarn", "llama3", "proportional"}
"""The values of `rope_type` with which a rotation depends on its position only."""


def rotate_by_whole_text(family: ModelFacts[Any], patch: Patch) -> None:
    """Let rotary embeddings of the text derive their frequencies from the whole text, on every rank of several.

    Raises:
        AdapterError: no module besides the model contains such an embedding and the decoder's layers.
    """
    if patch.context.comm.size == 1:
        return
    for module in family.rotary_embeddings():
        rope_type = getattr(module, "rope_type", "default")
        kinds = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}  # by kind of layers
        if kinds <= _LENGTH_INDEPENDENT:
            continue
        layers, around = set(family.decoder.layers), family.model
        for each in family.model.modules():  # a module comes after those around it
            inner = set(each.modules())
            if module in inner and layers & inner:
                around = each
        if around is family.model:
            raise AdapterError(
                f"{type(family).__name__}: {type(module).__name__} derives its frequencies from the length of the "
                f"text, and no module within {type(family.model).__name__} contains it and the decoder's layers, so it "
                "would take the length of a rank's shard; use another rope_type"
            )
        running: list[ForwardState] = []
        patch.set(around, "forward", _with_state(around.forward, running))
        patch.set(module, "forward", functools.partial(_rotations, running, module.forward))


def _with_state(unpatched: Callable[..., Any], running: list[ForwardState]) -> Callable[..., Any]:
    """Return a forward that has its state in `running` while it runs."""

    @functools.wraps(unpatched)
    def forward(*args: Any, **kwargs: Any) -> Any:
        states = [x for x in (*args, *kwargs.values()) if isinstance(x, ForwardState)]
        running.extend(states)
        try:
            return unpatched(*args, **kwargs)
        finally:
            del running[len(running) - len(states) :]

    return forward


def _rotations(
    running: list[ForwardState],
    unpatched: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Return the cosines and sines (..., s, D) of this rank's positions (..., s).

    Outside of the decoder, the positions are the ones that the unpatched model passes.
    """
    whole = running[-1].whole_positions if running else None
    if whole is None:
        outside: tuple[Tensor, ...] = unpatched(x, position_ids, *args, **kwargs)
        return outside
    if whole.dim() > 2:
        whole = whole[-position_ids.shape[0] :]  # the first components of several may count tokens
    largest = whole.max().to(position_ids).expand(*position_ids.shape[:-1], 1)
    rotations = unpatched(x, torch.cat([position_ids, largest], -1), *args, **kwargs)
    return tuple(rotation[..., :-1, :] for rotation in rotations)
