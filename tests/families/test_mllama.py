"""Layer: one process. Llama 3.2 Vision alone: inner modules on one rank, the missing mask, configurations refused."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import MllamaForConditionalGeneration

from family_cases import BATCHES
from family_harness import inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.errors import AdapterError
from mllm_seqpar.patches.mllama.testing import Case, tiny_config, tiny_model


def test_inner_model_on_one_rank_computes_what_the_unpatched_one_does() -> None:
    case = BATCHES["mllama"]
    model = model_of("mllama", case)
    inputs = {name: x for name, x in inputs_of("mllama", case, model).items() if name != "labels"}
    before = model.model(**inputs).last_hidden_state
    patch_model(model)
    assert torch.equal(model.model(**inputs).last_hidden_state, before)


@pytest.mark.parametrize(("implementation", "warnings"), [("eager", 0), ("sdpa", 1)])
def test_missing_mask_is_warned_of_once(implementation: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without a mask, transformers computes a wrong result with sdpa."""
    model = patch_model(tiny_model(attn_implementation=implementation))
    case = Case(frames=((2,),), mask="none", labels=None)
    inputs = inputs_of("mllama", case, model)
    with caplog.at_level(logging.WARNING, logger="mllm_seqpar"), torch.no_grad():
        for _ in range(2):
            model(**inputs)
    assert sum("cross_attention_mask is missing" in record.message for record in caplog.records) == warnings


def test_cross_attention_in_the_first_layer_is_refused() -> None:
    model = MllamaForConditionalGeneration(tiny_config(cross_attention_layers=[0, 3]))
    with pytest.raises(AdapterError, match=r"cross_attention_layers is \[0, 3\]: transformers counts cached tokens by"):
        patch_model(model)


def test_layers_that_differ_from_the_config_are_refused() -> None:
    model = tiny_model()
    model.model.language_model.cross_attention_layers = [1]
    with pytest.raises(
        AdapterError, match=r"layer 3 is MllamaCrossAttentionDecoderLayer, but cross_attention_layers is"
    ):
        patch_model(model)
