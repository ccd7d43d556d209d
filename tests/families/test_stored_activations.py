"""Layer: one process. What a patched model keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_training_modes import checkpointed, freeze

from family_harness import (
    slow_unless,
)
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.patches.mplug_owl3.testing import tiny_frames, tiny_model, tiny_text


def stored_bytes(model: Any, frames: int, comm: Any, recompute: bool) -> list[int]:
    """Return the bytes that each hyper layer stores for backward, beyond what all layers share."""
    freeze(model, lambda name: "vision_model" in name)  # the tower stores activations of every frame
    patch_model(model, group=comm, recompute_visual=recompute)
    ids = tiny_text(frames, length=40)
    stored: list[int] = []
    shared: set[int] = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        if stored and x.untyped_storage().data_ptr() not in shared:
            stored[-1] += x.numel() * x.element_size()
        return x

    def enter(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shared.add(kwargs["seqpar"].frames.visual.features.untyped_storage().data_ptr())
        shared.update(weight.untyped_storage().data_ptr() for weight in model.parameters())
        stored.append(0)

    for number in model.config.hyper_layers:
        model.language_model.model.layers[number - 1].register_forward_pre_hook(enter, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, tiny_frames(frames), labels=ids).loss
    sizes = list(stored)
    stored.clear()
    loss.backward()
    return sizes


@pytest.mark.parametrize(
    ("gate", "checkpointing", "recompute"),
    slow_unless(
        lambda row: not row[1] and row[0] == "per_head",
        [("per_head", False, True), ("per_head", True, True), (None, False, True), (None, True, True)]
        + [("per_head", False, False)],
    ),
)
def test_stored_activations_grow_with_frames_only_without_recomputation(
    gate: str | None, checkpointing: bool, recompute: bool
) -> None:
    def run(frames: int) -> list[list[int]]:
        models = [tiny_model(gate).train() for _ in range(2)]
        if checkpointing:
            models = [checkpointed(model) for model in models]
        return run_loopback(2, lambda comm: stored_bytes(models[comm.rank], frames, comm, recompute))

    few, many = run(8), run(32)
    if recompute:
        assert few == many and all(sizes[0] > 0 for sizes in few)
    else:
        assert all(b > a for pair in zip(few, many, strict=True) for a, b in zip(*pair, strict=True))
