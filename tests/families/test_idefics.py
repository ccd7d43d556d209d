"""Layer: one process. IDEFICS alone: hidden states of chosen layers, tuples, dtypes of features, attention switches."""

from __future__ import annotations

import pytest
import torch

from family_cases import INSTRUCT, RESAMPLER
from family_harness import TOLERANCE, inputs_of, model_of
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.patches.idefics.testing import Case
from outcomes import error
from tolerances import assert_as_near_as_unpatched

ONE = Case(frames=(4,), mask="before", labels=None, model=INSTRUCT)


def test_set_attn_implementation_is_refused_while_patched() -> None:
    model = patch_model(model_of("idefics", ONE))
    with pytest.raises(ValueError, match="set_attn_implementation: this model is patched"):
        model.set_attn_implementation("eager")
    unpatch_model(model)
    model.set_attn_implementation("sdpa")


def test_hidden_states_of_chosen_layers_equal_unpatched() -> None:
    model = model_of("idefics", ONE)
    inputs = inputs_of("idefics", ONE, model)
    expected = model(**inputs, output_hidden_states=[0, 2]).hidden_states
    found = patch_model(model)(**inputs, output_hidden_states=[0, 2]).hidden_states
    assert [state is None for state in found] == [state is None for state in expected]
    assert error(found[2], expected[2]) < TOLERANCE


def test_tuples_by_the_config_equal_unpatched() -> None:
    model = model_of("idefics", ONE)
    inputs = inputs_of("idefics", ONE, model)
    model.config.return_dict = False
    expected = model(**inputs)
    found = patch_model(model)(**inputs)
    assert isinstance(found, tuple) and error(found[0], expected[0]) < TOLERANCE


@pytest.mark.rounding
def test_float32_features_in_a_bf16_model_are_as_near_as_unpatched() -> None:
    case = Case(frames=(2, 1), features="encoder", model=RESAMPLER, labels=None)
    model, exact = model_of("idefics", case).bfloat16(), model_of("idefics", case)
    inputs = inputs_of("idefics", case, model)
    with torch.no_grad():
        unpatched, precise = model(**inputs).logits, exact(**inputs).logits
        found = patch_model(model)(**inputs).logits
    assert_as_near_as_unpatched({"logits": found}, {"logits": unpatched}, {"logits": precise})
