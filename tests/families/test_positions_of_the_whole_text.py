"""Layer: one process, loopback ranks. What a model derives from the positions of a text, it derives from all of them.

These are rotary frequencies, which follow the largest position with some values of `rope_type`, and the sequences that
a text is packed of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from family_cases import BATCHES, LANGUAGE_MODELS, QWENS
from family_harness import check_exact, check_tokens, error, inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from selections import slow_unless

LENGTH = 16
"""The length from which on frequencies change; the cases have longer texts, the shards of which are shorter."""
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": LENGTH},
    "longrope": {
        **{"factor": 4.0, "original_max_position_embeddings": LENGTH},
        **{"short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)]},
    },
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": LENGTH,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
BY_LENGTH = ("dynamic", "longrope")
SECTIONS = {"qwen2_5_vl": {"mrope_section": [2, 3, 3]}, "qwen3_vl": {"mrope_section": [4, 2, 2]}}
FAMILIES = ["mllama", "qwen2_5_vl", "qwen3_vl", *["llama"] * bool(LANGUAGE_MODELS)]


def case_of(family: str, rope: str, **changes: Any) -> tuple[str, Any]:
    """Return the family and a case of two samples with another `rope_type`."""
    parameters = {"rope_type": rope, "rope_theta": 1e4} | ROPE[rope] | SECTIONS.get(family, {})
    model: dict[str, Any] = {"rope_parameters": parameters}
    if rope == "dynamic":
        model["max_position_embeddings"] = LENGTH
    if family == "llama":
        family, model = "open_flamingo", model | {"language_model": "llama", "head_dim": 16}
    case = replace(BATCHES[family], length=QWENS[family].length if family in QWENS else 40, **changes)
    return family, case.with_model(**model)


PAIRS = [(family, rope) for family in FAMILIES for rope in ROPE]


@pytest.mark.parametrize(("family", "rope"), slow_unless(lambda pair: pair == ("mllama", "dynamic"), PAIRS))
def test_training_step_equals_unpatched(family: str, rope: str) -> None:
    name, case = case_of(family, rope)
    check_exact(name, 3 if rope == "longrope" else 2, case)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "star"])
@pytest.mark.parametrize("rope", BY_LENGTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_prompt_equals_unpatched(family: str, rope: str, attention: str) -> None:
    """Star Attention is exact on two ranks. The frequencies change again while tokens are generated."""
    name, case = case_of(family, rope, labels=None)
    if attention == "star" and len(case.frames) > 1 and name == "open_flamingo":
        attention = "ring"
    options = {"shard_prompt_from": 2, "self_attention": attention}
    check_tokens(name, 2, case.with_options(**options), {"max_new_tokens": 4})


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_frequencies_of_texts_one_after_another_equal_unpatched(rope: str) -> None:
    """A module of transformers stores the frequencies of the longest text until a short one comes."""
    name, long = case_of("mllama", rope)
    cases = [long, replace(long, length=10), replace(long, length=30), long]
    model = model_of(name, long)
    inputs = [inputs_of(name, case, model) for case in cases]
    with torch.no_grad():
        expected = [model(**each).logits for each in inputs]

    def run(comm: Any) -> list[torch.Tensor]:
        patched = patch_model(model_of(name, long), group=comm, logits="full")
        with torch.no_grad():
            return [patched(**each).logits for each in inputs]

    for found in run_loopback(2, run):
        assert all(error(x, y) < 1e-5 for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_recomputed_decoder_rotates_by_the_text_of_its_own_pass(rope: str) -> None:
    """Two passes of different lengths run before backward recomputes the first."""
    name, long = case_of("mllama", rope)
    cases = [replace(long, length=10), long]
    inputs = [inputs_of(name, case, model_of(name, case)) for case in cases]

    def run(model: Any) -> torch.Tensor:
        sum(model(**each).loss for each in inputs).backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    def checkpointed() -> Any:
        model = model_of(name, long)
        model.model.language_model = checkpoint_wrapper(model.model.language_model)
        return model

    expected = run(checkpointed())
    found = run_loopback(2, lambda comm: run(patch_model(checkpointed(), group=comm)))
    assert error(sum(found) / 2, expected) < 1e-5


MASKS = {
    "ones": {"use_cache": False},
    "ones, cache by default": {},
    "no mask": {},
    "no mask, no cache": {"use_cache": False},
}


@pytest.mark.parametrize("attention", ["local", "ring"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "family", slow_unless(lambda family: family == "mllama", sorted({*BATCHES} - {"open_flamingo", "moss_vl"}))
)
def test_positions_that_begin_again_separate_sequences_as_unpatched(family: str, mask: str, attention: str) -> None:
    """transformers separates sequences by positions only if there is neither a mask nor a cache."""
    case = replace(BATCHES[family], frames=BATCHES[family].frames[:1], labels=None)
    model = model_of(family, case)
    inputs = inputs_of(family, case, model)
    length = inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(6), torch.arange(length - 6)])[None]
    inputs["position_ids"] = positions.expand(4, 1, -1) if family in QWENS else positions
    inputs.pop("attention_mask", None)
    inputs |= MASKS[mask] | ({"attention_mask": torch.ones(1, length, dtype=torch.long)} if "ones" in mask else {})
    with torch.no_grad():
        expected = model(**inputs).logits

    def run(comm: Any) -> torch.Tensor:
        patched = patch_model(model_of(family, case), group=comm, logits="full", self_attention=attention)
        with torch.no_grad():
            return patched(**inputs).logits

    for found in run_loopback(2, run):
        assert error(found, expected) < 1e-5
