"""Layer: one process, loopback ranks. PEFT's arguments of samples, of tokens, and of prefixes are right or refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PolyConfig, PrefixTuningConfig, get_peft_model

from family_cases import BATCHES, CROSS_ATTENTION, QWENS
from family_harness import build, error, family_module, inputs_of, model_of, settings
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError
from selections import slow_unless

TEXT = r".*language_model.*(self_attn\.q_proj|down_proj)"
"""Targets within the decoder of every family of transformers: no module that computes with frames."""


def two_adapters(family: str, case: Any, targets: Any) -> Any:
    model = model_of(family, case)
    for number, name in enumerate(("a", "b")):
        torch.manual_seed(number)
        config = LoraConfig(target_modules=targets, r=4, init_lora_weights=False)
        model = get_peft_model(model, config, name) if number == 0 else (model.add_adapter(name, config), model)[1]
    return model.eval()


def on_copies(size: int, model: Any, run: Any) -> list[Any]:
    """Return `run(copy of the model, comm)` of each loopback rank. They share torch's generator, so none builds one."""
    copies = [copy.deepcopy(model) for _ in range(size)]
    return run_loopback(size, lambda comm: run(copies[comm.rank], comm))


def of_each_sample(model: Any, inputs: dict[str, Any], names: list[str]) -> torch.Tensor:
    """Return the logits of each sample with its own adapter."""
    rows = []
    for number, name in enumerate(names):
        model.set_adapter(name)
        rows.append(model(**inputs).logits[number])
    return torch.stack(rows)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mplug_owl3", CROSS_ATTENTION))
def test_adapter_names_are_refused_where_layers_compute_with_frames(family: str, size: int) -> None:
    """As many frames as samples would be taken for the samples. The model can be called again after the refusal."""
    case, targets = replace(BATCHES[family], labels=None), family_module(family).LORA_TARGETS

    built = two_adapters(family, case, targets)
    inputs = inputs_of(family, case, built.get_base_model())

    def run(model: Any, comm: Any) -> None:
        patch_model(model, group=comm, logits="full")
        with torch.no_grad():
            expected = model(**inputs).logits
            with pytest.raises(ConfigError, match="adapter_names: PEFT passes the adapter of each sample to"):
                model(**inputs, adapter_names=["a", "b"])
            assert torch.equal(model(**inputs).logits, expected)

    on_copies(size, built, run)


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen3_vl", [*QWENS, "mllama"]))
def test_adapter_names_of_text_equal_each_sample_alone(family: str) -> None:
    case, names = replace(BATCHES[family], labels=None), ["a", "b"]
    built = two_adapters(family, case, TEXT)
    inputs = inputs_of(family, case, built.get_base_model())
    with torch.no_grad():
        expected = of_each_sample(copy.deepcopy(built), inputs, names)

    def run(model: Any, comm: Any) -> torch.Tensor:
        patch_model(model, group=comm, logits="full")
        with torch.no_grad():
            return model(**inputs, adapter_names=names).logits

    for found in on_copies(2, built, run):
        assert error(found, expected) < 1e-5


ALORA = LoraConfig(target_modules=TEXT, r=4, init_lora_weights=False, alora_invocation_tokens=[5])
POLY = PolyConfig(target_modules=["k_proj"], r=2, n_tasks=2, n_skills=2, task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("family", "config", "arguments", "message"),
    [  # the native model refuses them unpatched too
        ("mplug_owl3", None, {"adapter_names": ["a", "b"]}, "adapter_names: PEFT passes the adapter of each sample to"),
        ("qwen3_vl", ALORA, {"alora_offsets": [3, 4]}, "alora_offsets: PEFT passes the tokens with aLoRA's"),
        ("mllama", POLY, {"task_ids": torch.tensor([0, 1])}, "task_ids: PEFT passes the task of each sample"),
    ],
)
def test_arguments_of_samples_and_tokens_are_refused(
    family: str, config: Any, arguments: dict[str, Any], message: str
) -> None:
    case = replace(BATCHES[family], labels=None)
    built, inputs = build(family, case)
    if config is None:
        built = two_adapters(family, case, ["q_proj", "v_kv_proj"])
    else:
        built = get_peft_model(built, config).eval()

    def run(model: Any, comm: Any) -> None:
        if config is not None:
            patch_model(model, group=comm)
        with torch.no_grad():
            expected = None if config is POLY else model(**inputs).logits  # Poly needs its argument in every call
            with pytest.raises(ConfigError, match=message):
                model(**inputs, **arguments)
            assert expected is None or torch.equal(model(**inputs).logits, expected)

    on_copies(1 if config is None else 2, built, run)


def prefixed(family: str, case: Any) -> Any:
    model = model_of(family, case)
    torch.manual_seed(0)
    return get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()


PAST = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # PEFT passes the cache under this name
PREFIXED = ["idefics", "mplug_owl3", "qwen3_vl"]


@PAST
@pytest.mark.parametrize("family", slow_unless(lambda family: family == "idefics", PREFIXED))
def test_prefix_tuning_is_evaluated_as_unpatched_and_its_training_is_refused_by_name(family: str) -> None:
    """Without attention to frames, its training is exact too. The error does not advise what the caller has passed."""
    case = BATCHES[family]
    built = prefixed(family, case)
    inputs = inputs_of(family, case, built.get_base_model()) | {"use_cache": False}
    unpatched = copy.deepcopy(built)
    unpatched(**inputs)  # Qwen's positions after a prefix follow those of the pass before
    expected = unpatched(**inputs).loss

    def run(patched: Any, comm: Any) -> None:
        patch_model(patched, group=comm)
        with torch.no_grad():
            patched(**inputs)
            assert patched(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-5)
        if family in QWENS:
            assert patched(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-5)
            return
        with pytest.raises(ConfigError, match="prefix tuning: keys and values that require gradients") as raised:
            patched(**inputs)
        assert "use_cache=False" not in str(raised.value)

    on_copies(2, built, run)


@PAST
def test_generation_after_prefix_tuning_is_refused_by_name() -> None:
    case = replace(BATCHES["idefics"], labels=None)
    model = prefixed("idefics", case)
    inputs = inputs_of("idefics", case, model.get_base_model())
    patch_model(model)
    with pytest.raises(ConfigError, match="both were given. If they come from PEFT's prefix tuning"):
        model.generate(**inputs, **settings())
