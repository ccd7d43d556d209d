"""Layer: gloo ranks. Sharding other than by FSDP2 is refused, and under FSDP2 groups may choose other strategies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from family_cases import QWENS
from family_harness import family_module, inputs_of, model_of, reference, settings
from fsdp2_on_cpu import whole
from mllm_seqpar import patch_model
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.fsdp_units import refuse_other_sharding
from outcomes import worst_gradient
from ranks import ranks
from selections import slow_unless
from tiny_models.mllama import Case as Mllama
from tiny_models.mplug_owl3 import Case as Owl

OTHER = "is sharded by other means than FSDP2, such as tensor parallelism"
PLANS = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


def parallelize(model: Any, mesh: Any) -> None:
    """Shard the MLPs of the text by tensor parallelism."""
    for layer in model.model.language_model.layers:
        parallelize_module(layer.mlp, mesh, dict(PLANS))


def tensor_parallel(rank: int, world: int, how: str, directory: str) -> str:
    """Return the error of the patched model, or "" if it computes what the unpatched one does."""
    case = QWENS["qwen3_vl"]
    model = model_of("qwen3_vl", case)
    inputs = inputs_of("qwen3_vl", case, model)
    with torch.no_grad():
        expected = model(**inputs).loss.item()
    if how in ("tp_plan", "tp_plan, a group of one"):
        if rank == 0:
            model.save_pretrained(directory)
        dist.barrier()
        model = type(model).from_pretrained(directory, tp_plan="auto").eval()
    elif how == "DTensor":
        parallelize(model, init_device_mesh("cpu", (world,)))
    elif how == "FSDP2 over TP":
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh["dp"])
    elif how == "ZeRO-3":
        model.lm_head.weight.ds_id = 0  # as DeepSpeed marks the parameters that it shards
    elif how == "HSDP":
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    group: Any = "self" if "group of one" in how else None
    try:
        patch_model(model, group=group, logits="full")
        if how == "DTensor, after patching":
            parallelize(model, init_device_mesh("cpu", (world,)))
        with torch.no_grad():
            found = model(**inputs).loss.item()
    except ConfigError as error:
        return str(error)
    assert found == pytest.approx(expected, rel=1e-5)
    return ""


REFUSED = {
    "tp_plan": f"{OTHER}.*DTensor over",
    "DTensor": f"{OTHER}.*mlp.*DTensor over",
    "DTensor, after patching": f"{OTHER}.*mlp.*DTensor over",
    "FSDP2 over TP": OTHER,
    "ZeRO-3": "lm_head.weight of .* is sharded by DeepSpeed",
    "tp_plan, a group of one": "",
    "HSDP": "",
}


@pytest.mark.parametrize("how", slow_unless(lambda how: how in ("DTensor", "HSDP"), REFUSED))
def test_sharding_other_than_by_fsdp2_is_refused_on_all_ranks(how: str, tmp_path: Any) -> None:
    for message in ranks(2).run(tensor_parallel, how, str(tmp_path)):
        assert re.search(REFUSED[how], message) if REFUSED[how] else message == "", message


KV = {"mplug_owl3": r"v_kv_proj|input_layernorm", "mllama": r"cross_attn\.(k_proj|v_proj|k_norm)"}
GROUPS: dict[str, Any] = {
    "mplug_owl3": (Owl(frames=(3,), length=14), Owl(frames=(1,), length=9)),
    "mllama": (Mllama(frames=((2, 1),), length=14), Mllama(frames=((1,),), length=9)),
}


def groups_of_other_strategies(rank: int, world: int, family: str, strategies: tuple[str, str]) -> dict[str, Any]:
    """Train one step, and generate, with K and V projections as FSDP2 units over two groups; return all gradients."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    case, strategy = GROUPS[family][rank // 2], strategies[rank // 2]
    model = model_of(family, case).train()
    for name, module in model.named_modules():
        if re.search(rf"({KV[family]})$", name) and "vision" not in name:
            fully_shard(module)
    fully_shard(model)
    # One group prefills with sharded text, and the other does not.
    patch_model(model, group=group, strategy=strategy, shard_prompt_from=(2, None)[rank // 2])
    inputs = inputs_of(family, case, model)
    loss = model(**inputs).loss
    loss.backward()
    grads = whole({name: weight.grad for name, weight in model.named_parameters()})
    model.eval()
    inputs.pop("labels")
    tokens = model.generate(**inputs, **settings(max_new_tokens=2))
    return {"loss": loss.item(), "grads": grads, "tokens": tokens}


@pytest.mark.parametrize(
    ("family", "strategies"),
    slow_unless(
        lambda row: row == ("mplug_owl3", ("mesh", "replicate")),
        [(family, pair) for family in KV for pair in (("mesh", "replicate"), ("auto", "lv-xattn"))],
    ),
)
def test_groups_with_other_strategies_gather_the_same_units(family: str, strategies: tuple[str, str]) -> None:
    found = ranks(4).run(groups_of_other_strategies, family, strategies, timeout=120)
    expected = [reference(family, case) for case in GROUPS[family]]
    mean = {
        name: None if grad is None else sum(each.grads[name] for each in expected) / 2  # type: ignore[misc]
        for name, grad in expected[0].grads.items()
    }
    value, name = worst_gradient(found[0]["grads"], mean)
    assert value < 1e-5, (value, name)
    for rank, each in enumerate(found):
        assert each["loss"] == pytest.approx(expected[rank // 2].loss, rel=1e-5)


def four_bit_model(targets: list[str]) -> Any:
    """Return a model with 4-bit weights in the language model, stored as float32 for FSDP2, and LoRA adapters."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = family_module("mllama").tiny_model()
    layers = model.model.language_model.layers
    for module in list(layers.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                options = {"compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": torch.float32}
                four_bit = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, **options)
                four_bit.load_state_dict(linear.state_dict())
                setattr(module, name, four_bit.to("cpu"))
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model.requires_grad_(False), config)


def four_bits(rank: int, world: int, targets: list[str], options: dict[str, Any]) -> dict[str, Any]:
    model = four_bit_model(targets)
    for unit in family_module("mllama").shard_units(model.get_base_model()):
        fully_shard(unit)
    fully_shard(model)
    patch_model(model, **options)
    loss = model(**inputs_of("mllama", GROUPS["mllama"][0], model.get_base_model())).loss
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return {"loss": loss.item(), "grads": whole(grads)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "options"), [(["q_proj", "k_proj", "v_proj"], {}), (["q_proj"], {"mlp_chunk_size": 4})]
)
def test_four_bit_weights_that_fsdp2_shards_equal_unpatched(targets: list[str], options: dict[str, Any]) -> None:
    model = four_bit_model(targets)
    loss = model(**inputs_of("mllama", GROUPS["mllama"][0], model.get_base_model())).loss
    loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    for found in ranks(2).run(four_bits, targets, options):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        value, name = worst_gradient(found["grads"], expected)
        assert value < 1e-4, (value, name)


def shard_tied_parameters(rank: int, world: int) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    refuse_other_sharding(tied)
    fully_shard(tied)
    refuse_other_sharding(tied)


def test_tied_parameters_of_fsdp2_are_not_refused() -> None:
    ranks(2).run(shard_tied_parameters)
