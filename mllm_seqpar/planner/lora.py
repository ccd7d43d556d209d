"""LoRA in a plan: adapters on linear layers are trained, and the weights of the model are frozen.

An adapter of rank r on a linear layer from n to m channels has r (n + m) parameters. It computes on the same tokens as
the layer, forward and in backward for both gradients. Frozen weights have no gradient, no optimizer state, and no FLOPs
for a gradient of theirs; the gradient passes through them to earlier layers all the same.

Left out: dropout on the input of an adapter, and copies of inputs that an adapter in another dtype makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mllm_seqpar.errors import ConfigError

if TYPE_CHECKING:
    from .model_sizes import ModelSizes
    from .workload import Workload

TARGETS = ("attention", "mlp", "cross", "connector")
"""attention and mlp of the decoder layers; cross-attention layers; the connector, which is what follows the tower."""

BASE_BYTES = (0.5, 1, 2, 4, 8)
"""Bytes of a frozen weight; 0.5 is a 4-bit weight of QLoRA, without its scales (0.06 bytes, or less if quantised)."""


@dataclass(frozen=True)
class AdaptedLayers:
    """Equal layers of one kind, as (input, output) channels of their linear layers.

    Attributes:
        layers: the number of equal layers.
        text: the layers that compute on text tokens.
        visual: the layers that compute on visual tokens, `vision.keys` to a frame.
    """

    layers: int
    text: tuple[tuple[int, int], ...] = ()
    visual: tuple[tuple[int, int], ...] = ()


def adapted_layers(model: ModelSizes, target: str) -> AdaptedLayers:
    """Return the linear layers of a model that a target names."""
    text, cross, width = model.text, model.cross, model.text.hidden
    if target == "attention":
        q, kv = (width, text.heads * text.head_dim), (width, text.kv_heads * text.head_dim)
        return AdaptedLayers(text.layers, text=(q, kv, kv, q[::-1]))
    if target == "mlp":
        return AdaptedLayers(text.layers, text=((width, text.mlp_inner),) * text.mlp_matrices)
    if target == "cross":
        own = ((width, cross.heads * cross.head_dim),) * (2 if cross.own_queries else 0)
        own += ((width, cross.mlp_inner),) * cross.mlp_matrices
        return AdaptedLayers(cross.layers, own, ((cross.visual_dim, cross.kv_heads * cross.head_dim),) * 2)
    layers = tuple(pairwise(model.projector or ())) * (1 + model.vision.deepstack)
    if model.resampler:
        r, vision = model.resampler, model.vision.width
        one = ((vision, r.heads * r.head_dim),) * 4 + (((vision, r.mlp_inner),) * 2 if r.mlp_inner else ())
        layers += one * r.layers
    return AdaptedLayers(1, visual=layers)


def check_lora(workload: Workload) -> None:
    """Raise ConfigError if the options of LoRA are invalid, or contradict others."""
    r, target, base = workload.lora_r, workload.lora_target, workload.base_parameter
    if r is None:
        if base is not None:
            raise ConfigError("base_parameter: has no effect without lora_r; pass both, or neither")
        return
    if unknown := [name for name in target if name not in TARGETS]:
        raise ConfigError(f"lora_target: {unknown[0]!r} is unknown; choose from {', '.join(TARGETS)}")
    if not target or len(set(target)) < len(target):
        raise ConfigError(f"lora_target: {list(target)!r}; name one or more of {', '.join(TARGETS)}, each once")
    if workload.trained != "no-vision":
        raise ConfigError(
            f"trained: {workload.trained!r} has no effect with lora_r, which trains adapters only; leave trained out, "
            "and name their layers by lora_target"
        )


def adapter_parameters(workload: Workload, targets: Sequence[str] = TARGETS) -> int:
    """Return the parameters of the adapters on those of the targets that the workload has; 0 without LoRA."""
    total = 0
    for target in workload.adapted(targets):
        found = adapted_layers(workload.model, target)
        total += found.layers * _rank_channels(workload, (*found.text, *found.visual))
    return total


def adapter_work(workload: Workload, target: str) -> int:
    """Return the multiply-adds of a target's adapters in a forward pass of a rank."""
    total = 0
    for name in workload.adapted((target,)):
        found, keys = adapted_layers(workload.model, name), workload.local_frames * workload.model.vision.keys
        text, visual = (_rank_channels(workload, layers) for layers in (found.text, found.visual))
        total += found.layers * (text * workload.tokens + visual * keys)
    return total


def saved_by_adapters(workload: Workload) -> int:
    """Return the bytes that adapters save for backward in addition to their layers: r channels of each, for text."""
    found = (adapted_layers(workload.model, target) for target in workload.adapted(TARGETS))
    count = sum((1 if workload.checkpointing else each.layers) * len(each.text) for each in found)
    return count * (workload.lora_r or 0) * workload.tokens * workload.element


def frozen_bytes(workload: Workload) -> int:
    """Return the bytes of all frozen weights. Embeddings and the head are not quantised."""
    model = workload.model
    stored = workload.element if workload.base_parameter is None else workload.base_parameter
    embeddings = model.text.vocabulary * model.text.hidden * (1 if model.text.tied_embeddings else 2)
    return int((model.parameters - embeddings) * stored + embeddings * max(stored, workload.element))


def _rank_channels(workload: Workload, layers: Sequence[tuple[int, int]]) -> int:
    return (workload.lora_r or 0) * sum(inputs + outputs for inputs, outputs in layers)
