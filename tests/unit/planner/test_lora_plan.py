"""Layer: one process. LoRA in a plan: trained parameters, memory and time, worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.memory import peak_memory
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import StrategyPlan, make_plan
from mllm_seqpar.planner.records import find_file
from mllm_seqpar.planner.workload import TARGETS, Workload
from tiny_models.mplug_owl3 import tiny_model

OWL = read_model(find_file("model", "mplug-owl3-7b"))
A100 = read_cluster(find_file("cluster", "a100-80g-4x4"))
STEP = Workload(model=OWL, frames=4096, text=8192, gpus=16)


def lv_plan(**changes: Any) -> StrategyPlan:
    return make_plan(replace(STEP, **changes), A100, ("lv-xattn",)).rows[0]


def memory(**changes: Any) -> Mapping[str, int]:
    return peak_memory(replace(STEP, **changes), ParallelSpec("lv-xattn", (16, 1)))


def test_lora_trains_adapters_over_frozen_weights() -> None:
    text, r = OWL.text, 16
    attention = 28 * r * (2 * (3584 + 28 * 128) + 2 * (3584 + 4 * 128))
    cross = 4 * r * 2 * (3584 + 4 * 128)
    adapters = attention + 28 * r * 3 * (3584 + 18944) + cross
    held, full = memory(lora_r=r), memory()
    assert replace(STEP, lora_r=r).trained_parameters == adapters
    assert held["gradients"] == adapters * 4 // 16 and held["optimizer"] == adapters * 8 // 16
    assert held["parameters"] == (OWL.parameters * 2 + adapters * 4) // 16  # frozen weights in bf16
    assert held["features"] == full["features"] / 2  # no gradient: what follows the tower is frozen
    quantised = memory(lora_r=r, base_parameter=0.5)
    embeddings = 2 * text.vocabulary * text.hidden
    frozen = (OWL.parameters - embeddings) // 2 + embeddings * 2
    assert quantised["parameters"] == (frozen + adapters * 4) // 16
    assert replace(STEP, lora_r=r, lora_target=("cross",)).trained_parameters == cross
    connector = replace(STEP, lora_r=r, lora_target=("connector",))
    assert connector.trained_parameters == r * (1152 + 3584) and connector.trains_features


@pytest.mark.parametrize("name", ["mplug-owl3-2b", "idefics-9b", "llama-3.2-11b-vision", "open-flamingo-9b"])
def test_adapted_layers_have_all_parameters_of_their_part(name: str) -> None:
    model = read_model(find_file("model", name))
    gate = model.cross.head_dim**2 if model.cross.gate == "per_head" else 0
    expected = {
        "attention": model.text.layers * model.text.attention_parameters,
        "mlp": model.text.layers * model.text.mlp_parameters,
        "cross": model.cross.layers * (model.cross_parameters - gate),
        "connector": model.connector_parameters,
    }
    for target in TARGETS:
        found = model.linear_layers(target)
        assert found.layers * sum(a * b for a, b in (*found.text, *found.visual)) == expected[target], target


def test_lora_has_no_weight_gradients_but_those_of_adapters() -> None:
    full, adapted = lv_plan().parts, lv_plan(lora_r=1).parts
    for name in ("MLP", "vocabulary", "self-attention"):
        assert adapted[name].forward.seconds == pytest.approx(full[name].forward.seconds, rel=0.01)
    assert adapted["MLP"].backward.seconds == pytest.approx(full["MLP"].backward.seconds / 2, rel=0.01)
    assert adapted["cross-attention"].backward.seconds < full["cross-attention"].backward.seconds
    ranks = [lv_plan(lora_r=r, lora_target=("mlp",)).parts["MLP"] for r in (1, 257)]
    more = 2 * 28 * 256 * 3 * (3584 + 18944) * 512 / A100.matmul
    assert ranks[1].forward.seconds - ranks[0].forward.seconds == pytest.approx(more)
    assert ranks[1].backward.seconds - ranks[0].backward.seconds == pytest.approx(2 * more)
    assert adapted["parameters"].both.network_bytes < full["parameters"].both.network_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_r": 0}, "lora_r is 0; expected a rank of adapters, 1 or more"),
        ({"lora_r": 8, "lora_target": ("q_proj",)}, "lora_target: 'q_proj' is unknown; choose from attention, mlp"),
        ({"lora_r": 8, "lora_target": ()}, r"lora_target: \[\]; name one or more"),
        ({"lora_r": 8, "base_parameter": 3}, "base_parameter is 3; expected one of None, 0.5, 1, 2, 4, 8"),
        ({"base_parameter": 2}, "base_parameter: has no effect without lora_r"),
        ({"lora_r": 8, "trained": "all"}, "trained: 'all' has no effect with lora_r"),
    ],
)
def test_invalid_options_of_lora_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(STEP, **changes)


def test_adapters_have_as_many_parameters_as_those_of_peft() -> None:
    layers = r".*language_model.*(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    model = tiny_model()
    sizes = model_sizes(model.config.to_dict(), "tiny")
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=layers))
    workload = Workload(model=sizes, frames=4, text=64, gpus=1, lora_r=3, lora_target=("attention", "mlp"))
    assert workload.trained_parameters == adapted.get_nb_trainable_parameters()[0]
