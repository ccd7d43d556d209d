"""Layer: gloo ranks. Two groups under one DDP, one of them without frames, train as one process does."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from family_cases import BATCHES, QWENS
from family_harness import TOLERANCE, family_module, inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.errors import AgreementError
from outcomes import worst_gradient
from ranks import ranks
from selections import slow_unless
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import Case as Owl

TEXT: dict[str, Any] = {"mplug_owl3": Owl(frames=(0, 0), length=11), "mllama": Mllama(frames=((), ()))}
TEXT["moss_vl"] = Moss(frames=((), ()), length=11)
TEXT |= {family: replace(case, frames=((), ()), length=11) for family, case in QWENS.items()}
PARTS: dict[str, dict[str, str]] = {
    "mplug_owl3": {"tower": "vision_model", "projector": "vision2text_model", "cross-attention": "v_kv_proj"},
    "mllama": {"tower": "vision_model", "projector": "multi_modal_projector", "cross-attention": "cross_attn"},
    "moss_vl": {"tower": "visual.blocks", "projector": "visual.merger", "cross-attention": "cross_attn"},
    "idefics": {"tower": "vision_model", "cross-attention": "cross_attn"},
    **{family: {"tower": "visual.blocks", "projector": "visual.merger"} for family in QWENS},
    "open_flamingo": {"projector": "perceiver", "cross-attention": "gated_cross_attn"},  # its tower has no gradients
}
"""Part of the names of the parameters that are trained alone."""


def batch_of(family: str, frames: bool, model: Any, unpatched: bool = False) -> dict[str, Any]:
    """Return the family's batch, or one without frames (for an unpatched model, with the same result)."""
    if not frames and family in TEXT:
        return inputs_of(family, TEXT[family], model)
    inputs = inputs_of(family, BATCHES[family], model)
    if frames:
        return inputs
    if family == "idefics":  # which takes text only with a tensor of no images
        mask = inputs["image_attention_mask"]
        if unpatched:
            return inputs | {"image_attention_mask": torch.zeros_like(mask)}
        return inputs | {"pixel_values": inputs["pixel_values"][:, :0], "image_attention_mask": mask[:, :, :0]}
    return inputs_of(family, replace(BATCHES[family], frames=((), ()), media=1), model)  # which takes no text alone


def new_model(family: str, trained: str) -> Any:
    """Return a model that trains one part, everything or LoRA weights, but not what no batch uses."""
    model, part = whole_model(family, trained == "LoRA"), PARTS[family].get(trained, "")
    for name, weight in model.named_parameters():
        weight.requires_grad_(part in name and name in used_parameters(family, trained == "LoRA"))
    return model


def whole_model(family: str, lora: bool) -> Any:
    model = model_of(family, BATCHES[family]).train()
    if not lora:
        return model
    torch.manual_seed(3)
    targets = family_module(family).LORA_TARGETS
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


@functools.cache
def used_parameters(family: str, lora: bool) -> set[str]:
    """Return the names of the parameters that have a gradient in a pass of the unpatched model."""
    model = whole_model(family, lora)
    backward(model, [batch_of(family, True, model)])
    return {name for name, weight in model.named_parameters() if weight.grad is not None}


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name.removeprefix("module."): weight.grad for name, weight in model.named_parameters()}


def backward(model: Any, batches: list[dict[str, Any]], share: float = 1.0) -> None:
    """Add the gradients of the batches, in DDP's way: only the last backward pass reduces them."""
    for number, inputs in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) or share != 1.0 else model.no_sync():
            loss = model(**inputs).loss
            if not loss.requires_grad:  # as FineTuneTrainer does
                loss = loss.detach().requires_grad_()
            (loss * share).backward()


ORDERS = {"one batch": ([True], [False]), "accumulated": ([True, False], [False, False])}
"""Which batches of each group have frames."""


def ddp_ranks(
    rank: int, world: int, family: str, find_unused: bool, size: int, parts: tuple[str, ...]
) -> dict[tuple[str, str], Any]:
    group, found = dist.new_subgroups(size)[0], {}
    orders = list(ORDERS)[: 1 + (family != "idefics")]  # in whose second accumulated batch no group has images
    alternating = zip(("LoRA", *parts), itertools.cycle(orders))
    for trained, order in (*(("everything", order) for order in orders), *alternating):
        model = new_model(family, trained)
        patch_model(model, group=group)
        ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
        backward(ddp, [batch_of(family, frames, model) for frames in ORDERS[order][rank // size]])
        found[trained, order] = gradients(ddp)
    return found


def check_ddp(family: str, find_unused: bool, size: int, parts: tuple[str, ...]) -> None:
    family_module(family)
    outcomes = ranks(2 * size).run(ddp_ranks, family, find_unused, size, parts, timeout=60)
    for trained, order in outcomes[0]:
        for found in outcomes:
            value, name = worst_gradient(found[trained, order], expected_gradients(family, trained, order))
            assert value < 10 * TOLERANCE, (trained, order, name, value)


@functools.cache
def expected_gradients(family: str, trained: str, order: str) -> dict[str, Any]:
    """Return the gradients of the unpatched model in one process, for the mean over the groups."""
    model = new_model(family, trained)
    batches = [batch_of(family, frames, model, unpatched=True) for group in ORDERS[order] for frames in group]
    backward(model, batches, share=0.5)
    return gradients(model)


# With a search, DDP averages what it finds unused, so every family runs without it. A search changes two things: groups
# may all skip the tower, and it does not find the K and V projections, whose gradients are outside of the graph.
SEARCHED = [(family, False) for family in BATCHES] + [(family, True) for family in ("mplug_owl3", "mllama", "qwen3_vl")]


@pytest.mark.parametrize(("family", "find_unused"), slow_unless(lambda row: row == ("mplug_owl3", False), SEARCHED))
def test_group_without_frames_takes_part_in_every_gradient(family: str, find_unused: bool) -> None:
    check_ddp(family, find_unused, 1, (*PARTS[family],))


@pytest.mark.slow
def test_groups_of_two_ranks_take_part_in_every_gradient() -> None:
    check_ddp("mplug_owl3", True, 2, ())


def uneven_batches(rank: int, world: int) -> list[dict[str, Any]]:
    """Return the gradients of each step of this rank's group, of which one has two batches and the other one."""
    model = new_model("mplug_owl3", "everything")
    patch_model(model, group=dist.new_subgroups(2)[0])
    ddp, found = DistributedDataParallel(model), []
    with ddp.join():
        for frames in UNEVEN[rank // 2]:
            ddp.zero_grad()
            backward(ddp, [batch_of("mplug_owl3", frames, model)])
            found.append({name: grad.clone() for name, grad in gradients(ddp).items() if grad is not None})
    return found


UNEVEN = ([True, False], [False])
"""Which batches of each group have frames."""


def test_groups_with_uneven_batches_join() -> None:
    """A group that has ended answers to DDP only, so the groups cannot exchange which of them have frames."""
    outcomes = ranks(4).run(uneven_batches, timeout=60)
    for step, batches in enumerate(([True, False], [False])):
        model = new_model("mplug_owl3", "everything")
        backward(model, [batch_of("mplug_owl3", frames, model) for frames in batches], share=0.5)
        for found in outcomes[: 2 * len(batches)]:
            expected = {name: grad for name, grad in gradients(model).items() if name in found[step]}
            assert worst_gradient(found[step], expected)[0] < 10 * TOLERANCE


def nothing_but_text(rank: int, world: int) -> bool:
    """Return whether a text-only step of all groups leaves the visual path without gradients."""
    model = new_model("mplug_owl3", "everything")
    patch_model(model, group=dist.new_subgroups(1)[0])
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    backward(ddp, [batch_of("mplug_owl3", False, model)])
    return all(weight.grad is None for weight in model.vision2text_model.parameters())


def test_step_without_any_frame_leaves_the_visual_path_without_gradients() -> None:
    """As in the unpatched model: an optimizer must not decay what has no gradient."""
    assert ranks(2).run(nothing_but_text) == [True, True]


def pixels_beside_features(rank: int, world: int) -> None:
    case = Owl(frames=(2,), features=("projected", None)[rank])
    model = model_of("mplug_owl3", case).train()
    ddp = DistributedDataParallel(patch_model(model, group=dist.new_subgroups(1)[0]), find_unused_parameters=True)
    ddp(**inputs_of("mplug_owl3", case, model))


def test_pixels_beside_features_are_an_error_on_all_ranks() -> None:
    found = ranks(2).errors(pixels_beside_features)
    assert all(isinstance(x, AgreementError) and "pass pixels and others pass features" in str(x) for x in found), found
