"""Layer: gloo ranks. Every family over a real process group; what needs a random generator or a group for each rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

from family_cases import BATCHES, PADDED
from family_harness import (
    FAMILIES,
    TOLERANCE,
    check,
    compare_gradients,
    expected_tokens,
    family_module,
    inputs_of,
    model_of,
    outcome,
    reference,
    slow_unless,
    tokens,
)
from generation_cases import SAMPLING
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.errors import AgreementError, ConfigError, ShapeError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.planner import Cluster, write_cluster
from outcomes import Outcome, run_case
from ranks import ranks
from tiny_models import mllama
from tiny_models.mllama import Case as Mllama
from tiny_models.mplug_owl3 import Case, tiny_model

CASE = Case(frames=(3, 2))


def exact_and_sampled(rank: int, world: int, family: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
    seed = 17 if rank == 0 else 1000 + rank  # only rank 0's random numbers count
    found = {name: tokens(family, case, given, None, seed) for name, (case, given) in SAMPLING[family].items()}
    return outcome(family, PADDED[family], None), found


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mplug_owl3", FAMILIES))
def test_family_equals_unpatched_and_samples_the_same_tokens(family: str) -> None:
    family_module(family)
    found = ranks(3).run(exact_and_sampled, family)
    check([result for result, _ in found], reference(family, PADDED[family]), PADDED[family])
    for name, (case, given) in SAMPLING[family].items():
        expected = expected_tokens(family, case, given)
        assert len(expected[:, case.length :].unique()) > 3, name
        for _, sampled in found:
            assert torch.equal(sampled[name], expected), (name, sampled[name], expected)


def loss_by_group(rank: int, world: int) -> dict[str, float]:
    """Return the loss over the world, a sub-group, a mesh of one dimension and one dimension of a mesh of two."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    groups = {
        "world": None,
        "sub-group": halves[rank % 2],
        "mesh of one dimension": init_device_mesh("cpu", (4,), mesh_dim_names=("sp",)),
        "mesh dimension": mesh["sp"],
    }
    found, model = {}, model_of("mplug_owl3", CASE)
    for name, group in groups.items():
        patch_model(model, group=group)
        patch = patch_of(model)
        assert patch is not None
        assert patch.context.comm.size == (2 if name in ("sub-group", "mesh dimension") else 4)
        found[name] = model(**inputs_of("mplug_owl3", CASE, model)).loss.item()
        unpatch_model(model)
    for group, message in ((mesh, "a DeviceMesh of 2 dimensions"), (halves[1 - rank % 2], "not a member of the group")):
        with pytest.raises(ConfigError, match=message):
            patch_model(model, group=group)
    return found


def test_group_may_be_process_group_or_mesh_of_one_dimension() -> None:
    expected = reference("mplug_owl3", CASE).loss
    for found in ranks(4).run(loss_by_group):
        assert found == {name: pytest.approx(expected, rel=TOLERANCE) for name in found} and len(found) == 4


def lora_dropout(rank: int, world: int, checkpointing: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a LoRA weight behind dropout, and the difference quotient with the same random numbers."""
    model = tiny_model().train()
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules=["v_kv_proj"], init_lora_weights=False, lora_dropout=0.5)
    inputs = inputs_of("mplug_owl3", CASE, model)
    model = get_peft_model(model, settings)
    if checkpointing:
        model.gradient_checkpointing_enable()
    patch_model(model)
    weight = next(p for name, p in model.named_parameters() if name.endswith("v_kv_proj.lora_B.default.weight"))
    torch.manual_seed(9)
    model(**inputs).loss.backward()
    losses = []
    for move in (1e-3, -2e-3):  # to +1e-3, then to -1e-3
        with torch.no_grad():
            weight += move
            torch.manual_seed(9)
            losses.append(model(**inputs).loss.double())
    return weight.grad.sum(), (losses[0] - losses[1]) / 2e-3


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_in_a_projection_uses_the_same_mask_in_backward(checkpointing: bool) -> None:
    found = ranks(2).run(lora_dropout, checkpointing)
    gradient = sum(gradient for gradient, _ in found) / 2
    assert gradient.item() == pytest.approx(found[0][1].item(), rel=2e-2)


def different_calls(rank: int, world: int) -> float:
    model = patch_model(model_of("mplug_owl3", CASE).eval())
    inputs = inputs_of("mplug_owl3", CASE, model)
    with pytest.raises(AgreementError, match="different calls .*: rank 0: forward pass; rank 1: generate"):
        model.generate(inputs["input_ids"], pixel_values=inputs["pixel_values"]) if rank else model(**inputs)
    return model(**inputs).loss.item()


@pytest.mark.slow
def test_forward_on_one_process_and_generate_on_another_are_named_and_the_group_goes_on() -> None:
    first, second = ranks(2).run(different_calls)
    assert first == pytest.approx(second)


def replicated_text(rank: int, world: int, patched: bool = True) -> Outcome:
    """Run OPT with dropout behind attention and MLP, as the published checkpoints have it."""
    case = replace(BATCHES["open_flamingo"], train=True).with_model(language_model="opt")
    model = model_of("open_flamingo", case)
    for block in model.lang_encoder.old_decoder_blocks:
        block.dropout = 0.3
    if patched:
        patch_model(model, self_attention="local")
    torch.manual_seed(7 + rank)
    inputs = inputs_of("open_flamingo", case, model)
    return run_case(model, inputs, model(**inputs))


def test_replicated_text_uses_same_dropout_mask_on_all_ranks() -> None:
    family_module("open_flamingo")
    expected, found = replicated_text(0, 1, patched=False), ranks(2).run(replicated_text)
    assert all(each.loss == pytest.approx(expected.loss, rel=TOLERANCE) for each in found)
    compare_gradients([each.grads for each in found], expected.grads)


def losses_behind_random_tower(rank: int, world: int) -> list[float]:
    """Run passes with random numbers in the vision tower, of which a rank draws as many as its frames need."""
    case = Mllama(frames=((3, 1, 2),), train=True)
    model = mllama.tiny_model()
    dropout, text = torch.nn.Dropout(0.3), model.model.language_model.layers[0].mlp
    model.model.multi_modal_projector.register_forward_hook(lambda module, inputs, out: dropout(out))
    text.register_forward_hook(lambda module, inputs, out: dropout(out))
    inputs = mllama.inputs_of(case, model)
    model = patch_model(model, self_attention="local").train()
    torch.manual_seed(0)
    return [model(**inputs).loss.item() for _ in range(3)]


def test_replicated_text_uses_same_dropout_mask_behind_a_random_tower() -> None:
    first, second = ranks(2).run(losses_behind_random_tower)
    assert first == pytest.approx(second, rel=TOLERANCE)
    assert len(set(first)) == 3


def replaced_on_one_rank(rank: int, world: int) -> None:
    """Continue a cache with frames of which only those of rank 1 are new."""
    model = patch_model(mllama.tiny_model())
    inputs = mllama.local_frames(mllama.inputs_of(Mllama(frames=((3, 1, 2),), labels=None), model))
    mask = inputs["cross_attention_mask"]
    with torch.no_grad():
        cache = cache_of(model(**inputs, use_cache=True))
        more = {**inputs, "input_ids": torch.full((1, 2), 5), "pixel_values": inputs["pixel_values"] + rank}
        more["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, 2, -1, -1)], 1)
        more.pop("attention_mask", None)
        with pytest.raises(ShapeError, match="images were passed with a cache that holds others already"):
            model(**more, **cache_argument(cache), use_cache=True)


def test_frames_that_one_rank_replaces_in_a_cache_are_refused_on_all_ranks() -> None:
    ranks(2).run(replaced_on_one_rank)


def patch_with_local_cluster_file(rank: int, world: int, folder: str) -> None:
    """Patch in a folder of this rank, as on nodes with disks of their own."""
    links = {"node_link": 1e15, "network_link": 1e15, "node_latency_s": 1e-6, "network_latency_s": 1e-6}
    rates = {"attention_forward": 1e12, "attention_backward": 1e12, "matmul": 1e12, "memory_bytes": 1e9}
    local, before = Path(folder) / str(rank), os.getcwd()
    local.mkdir()
    write_cluster(Cluster(name=f"cluster {rank}", gpus_per_node=4, **links, **rates), local / "rates.yaml")
    os.chdir(local)
    try:
        with pytest.raises(AgreementError, match="(?s)cluster 0.*cluster 1"):
            patch_model(tiny_model(), strategy="auto", cluster="rates.yaml")
    finally:
        os.chdir(before)


def test_cluster_files_of_one_name_with_different_rates_are_refused(tmp_path: Path) -> None:
    ranks(2).run(patch_with_local_cluster_file, str(tmp_path))
