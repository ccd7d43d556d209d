"""Layer: gloo ranks. Patched Llama 3.2 Vision under FSDP2, with checkpointing, LoRA, frozen parts; other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import PATIENCE, TOLERANCE
from tiny_mllama import Case, fresh_model, inputs_of

from mllm_seqpar import patch_model
from outcomes import error
from ranks import ranks
from tolerances import assert_as_near_as_unpatched
from training import check_fsdp, check_lora

FAMILY = "tiny_mllama"
IMAGES, ONE_IMAGE = Case(images=((2, 3, 1), (1,))), Case(images=((2,),), length=9)
TEXT = Case(images=((), ()), length=11)
HOLES = Case(images=((3, 2), (1, 3)), mask="scattered")


@pytest.mark.parametrize(("world", "checkpointing"), [(2, True), (3, False)])
def test_mllama_under_fsdp2(world: int, checkpointing: bool) -> None:
    check_fsdp(FAMILY, [[IMAGES, TEXT, ONE_IMAGE]], world, checkpointing)


def test_one_group_has_text_only_when_another_has_images() -> None:
    """Its cross-attention layers, which unpatched are skipped, must run and give what skipping them gives."""
    check_fsdp(FAMILY, [[IMAGES, TEXT, HOLES], [TEXT, ONE_IMAGE, TEXT]], 4)


@pytest.mark.parametrize(("world", "checkpointing"), [(1, False), (3, True)])
def test_mllama_with_lora(world: int, checkpointing: bool) -> None:
    check_lora(FAMILY, IMAGES, world, checkpointing)


def trained_whole(rank: int, world: int) -> tuple[float, list[float]]:
    """The loss with self-attention that PEFT trains as a whole, in a wrapper, and norms of its gradients."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(target_modules=r".*cross_attn\.q_proj", modules_to_save=["self_attn"])
    model = patch_model(get_peft_model(fresh_model(), settings))
    loss = model(**inputs_of(IMAGES, fresh_model())).loss
    loss.backward()
    copies = [p for name, p in model.named_parameters() if "self_attn.modules_to_save" in name]
    return loss.item(), [p.grad.norm().item() for p in copies]


def test_attention_in_a_wrapper_of_peft() -> None:
    expected = fresh_model()(**inputs_of(IMAGES, fresh_model())).loss.item()
    for loss, norms in ranks(2).run(trained_whole, timeout=PATIENCE):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert norms and all(norm > 0 for norm in norms)


def in_dtype(model: Any, how: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients with labels; no rank deals its text, so that it has all logits."""
    case = HOLES
    inputs = inputs_of(case, model)
    if how == "bf16 weights":
        model.bfloat16()
    elif how == "float64":
        model.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        out = model(**inputs)
    out.loss.backward()
    return out.logits.double(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def in_dtype_rank(rank: int, world: int, how: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits, grads = in_dtype(patch_model(fresh_model(), logits="full"), how)
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
        grad /= world
    return logits, grads


@pytest.mark.rounding
@pytest.mark.parametrize("how", ["float64", "autocast", "bf16 weights"])
def test_in_other_dtypes(how: str) -> None:
    """As near to float64 as the unpatched model in that dtype, but for chance.

    In float64 each gate is compared by itself; the model's norms compute in float32 whatever its dtype.
    """
    exact, exact_grads = in_dtype(fresh_model(), "float64")
    theirs, their_grads = in_dtype(fresh_model(), how)
    for logits, grads in ranks(3).run(in_dtype_rank, how, timeout=PATIENCE):
        if how == "float64":
            assert error(logits, exact) <= TOLERANCE and grads.keys() == exact_grads.keys()
            assert all(error(grad, exact_grads[name]) <= TOLERANCE for name, grad in grads.items())
        else:
            assert_as_near_as_unpatched({"logits": logits}, {"logits": theirs}, {"logits": exact})
            assert_as_near_as_unpatched(grads, their_grads, exact_grads)
