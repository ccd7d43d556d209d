"""An mPLUG-Owl3 with the width of the 7B model, few layers and random weights, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_models import Sizes, tiny_model
from tiny_models.mplug_owl3 import Case, inputs_of

SIZES = {
    "cuda": Sizes(
        width=3584,
        mlp=18944,
        layers=2,
        heads=28,
        kv_heads=4,
        cross_layers=(0,),
        vocabulary=8192,
        image=378,
        tower_width=1152,
        tower_mlp=4304,
        tower_layers=2,
        tower_heads=16,
    ),
    "cpu": Sizes(
        width=64, mlp=96, layers=2, heads=4, kv_heads=2, cross_layers=(0,), vocabulary=8192, image=56, tower_layers=2
    ),
}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def build(device: str, gate: str | None = None) -> Any:
    """Return a model of two layers, the first of them a hyper layer, and a vision tower of two layers."""
    with torch.device(device):
        return tiny_model("mplug_owl3", SIZES[device], gate=gate).to(DTYPE[device]).train()


def inputs(model: Any, frames: int, length: int, *, encoded: bool = False) -> dict[str, Tensor]:
    """Return tokens (1, length) with placeholders of the frames, labels, and pixels or, if `encoded`, features."""
    made = inputs_of(Case(frames=(frames,), length=length, features="encoded" if encoded else None), model)
    like = next(model.parameters())
    return {name: x.to(like.device, like.dtype if x.is_floating_point() else None) for name, x in made.items()}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
