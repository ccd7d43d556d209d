"""Layer: one process, loopback ranks. What a single family has: outputs in other forms, warnings, models refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MllamaForConditionalGeneration

from family_cases import BATCHES, INSTRUCT, LANGUAGE_MODELS, RESAMPLER
from family_harness import TOLERANCE, build, inputs_of, model_of
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.models.mplug_owl3 import HyperAttention
from mllm_seqpar.patches.open_flamingo_language import BIAS_DIMS, bias_dims
from outcomes import error
from tiny_models import mllama
from tiny_models.idefics import Case as Idefics
from tiny_models.mplug_owl3 import Case as Owl
from tolerances import assert_as_near_as_unpatched

ONE = Idefics(frames=(4,), mask="before", labels=None, model=INSTRUCT)


def test_set_attn_implementation_is_refused_while_patched() -> None:
    model = patch_model(model_of("idefics", ONE))
    with pytest.raises(ValueError, match="set_attn_implementation: this model is patched"):
        model.set_attn_implementation("eager")
    unpatch_model(model)
    model.set_attn_implementation("sdpa")


def test_tuples_and_hidden_states_of_chosen_layers_equal_unpatched() -> None:
    model, inputs = build("idefics", ONE)
    model.config.return_dict = False

    def outputs() -> Any:
        return model(**inputs), model(**inputs, output_hidden_states=[0, 2], return_dict=True).hidden_states

    (expected, states), _ = outputs(), patch_model(model)
    found, chosen = outputs()
    assert isinstance(found, tuple) and error(found[0], expected[0]) < TOLERANCE
    assert [state is None for state in chosen] == [state is None for state in states]
    assert error(chosen[2], states[2]) < TOLERANCE


@pytest.mark.parametrize("gate", ["per_head", None])
def test_change_of_a_native_hyper_layer_changes_the_patched_one(
    gate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both project and mix by the same methods; only the attention differs."""
    model, inputs = build("mplug_owl3", Owl(labels=None, model={"gate": gate}))
    project, projection = HyperAttention.project, HyperAttention.visual_projection

    def doubled(self: Any, *args: Any) -> Any:
        q, k, v = project(self, *args)
        return q, k, 2 * v

    def logits() -> torch.Tensor:
        return model(**inputs).logits.detach()

    natively = [logits()]
    monkeypatch.setattr(HyperAttention, "project", doubled)
    natively.append(logits())
    monkeypatch.setattr(HyperAttention, "visual_projection", lambda *given: replace(projection(*given), rotate=None))
    natively.append(logits())
    assert error(natively[1], natively[0]) > 1e-2 and error(natively[2], natively[1]) > 1e-4
    patch_model(model)
    assert error(logits(), natively[2]) < TOLERANCE


@pytest.mark.rounding
def test_float32_features_in_a_bf16_model_are_as_near_as_unpatched() -> None:
    case = Idefics(frames=(2, 1), features="encoder", model=RESAMPLER, labels=None)
    model, exact = model_of("idefics", case).bfloat16(), model_of("idefics", case)
    inputs = inputs_of("idefics", case, model)
    with torch.no_grad():
        # Since transformers 5.24 the unpatched model does not convert features.
        converted = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
        unpatched, precise = model(**converted).logits, exact(**inputs).logits
        found = patch_model(model)(**inputs).logits
    assert_as_near_as_unpatched({"logits": found}, {"logits": unpatched}, {"logits": precise})


def test_inner_model_of_mllama_on_one_rank_computes_what_the_unpatched_one_does() -> None:
    model = model_of("mllama", BATCHES["mllama"])
    inputs = {name: x for name, x in inputs_of("mllama", BATCHES["mllama"], model).items() if name != "labels"}
    before = model.model(**inputs).last_hidden_state
    patch_model(model)
    assert torch.equal(model.model(**inputs).last_hidden_state, before)


@pytest.mark.parametrize(("implementation", "warnings"), [("eager", 0), ("sdpa", 1)])
def test_missing_mask_is_warned_of_once(implementation: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without a mask, transformers computes a wrong result with sdpa."""
    model = patch_model(mllama.tiny_model(attn_implementation=implementation))
    inputs = inputs_of("mllama", mllama.Case(frames=((2,),), mask="none", labels=None), model)
    with caplog.at_level(logging.WARNING, logger="mllm_seqpar"), torch.no_grad():
        for _ in range(2):
            model(**inputs)
    assert sum("cross_attention_mask is missing" in message for message in caplog.messages) == warnings


def test_cross_attention_layers_that_cannot_be_patched_are_refused() -> None:
    first = MllamaForConditionalGeneration(mllama.tiny_config(cross_attention_layers=[0, 3]))
    with pytest.raises(AdapterError, match=r"cross_attention_layers is \[0, 3\]: transformers counts cached tokens by"):
        patch_model(first)
    model = mllama.tiny_model()
    model.model.language_model.cross_attention_layers = [1]
    with pytest.raises(
        AdapterError, match="layer 3 is MllamaCrossAttentionDecoderLayer, but cross_attention_layers is"
    ):
        patch_model(model)


needs_flamingo = pytest.mark.skipif(not LANGUAGE_MODELS, reason="open_flamingo is not installed")


def flamingo(decoder: str) -> tuple[Any, dict[str, Any]]:
    case = BATCHES["open_flamingo"].with_model(language_model=decoder)
    return model_of("open_flamingo", case), inputs_of("open_flamingo", case, None)


@torch.no_grad()
@pytest.mark.parametrize("decoder", LANGUAGE_MODELS)
def test_hidden_states_on_one_rank_equal_those_of_the_language_model(decoder: str) -> None:
    (model, inputs), found = flamingo(decoder), []
    for _ in range(2):
        model._encode_vision_x(inputs["vision_x"])
        out = model.lang_encoder(inputs["lang_x"], inputs["attention_mask"], output_hidden_states=True)
        model.lang_encoder.clear_conditioned_layers()
        found.append([*out.hidden_states, out.logits])
        if len(found) == 1:
            patch_model(model)
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert error(ours, theirs) < TOLERANCE


@needs_flamingo
def test_forward_and_generate_leave_no_media_behind() -> None:
    model, inputs = flamingo("opt")
    patch_model(model)(**inputs)
    assert not model.lang_encoder.is_conditioned()
    model.generate(inputs["vision_x"], inputs["lang_x"], max_new_tokens=2, pad_token_id=1)
    assert not model.lang_encoder.is_conditioned() and not model.lang_encoder._use_cached_vision_x
    with pytest.raises(ShapeError, match="not conditioned on media"):
        model.lang_encoder(inputs["lang_x"])


@needs_flamingo
def test_open_flamingo_models_that_cannot_be_patched_are_refused() -> None:
    model, inputs = flamingo("opt")
    model.lang_encoder.model.decoder.layerdrop = 0.1
    with pytest.raises(ConfigError, match="layerdrop=0.1: every rank would leave out other layers"):
        patch_model(model)
    model.lang_encoder.model.decoder.layerdrop = 0.0
    model.lang_encoder.gated_cross_attn_layers[0].attn.only_attend_immediate_media = False
    patch_model(model)
    with pytest.raises(AdapterError, match="only_attend_immediate_media differs between the layers"):
        model(**inputs)
    model, _ = flamingo("gpt_neox")
    model.lang_encoder.config.model_type = "gptj"
    with pytest.raises(AdapterError, match=r"model_type 'gptj'\); OpenFlamingo can be patched over opt, llama, mpt"):
        patch_model(model)


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_biases_are_exact_in_a_long_text(dtype: torch.dtype) -> None:
    """At the end of the text, where positions are large, they are as exact as the unpatched bias, also in bfloat16."""
    heads, dim = 12, 64
    slopes = 2.0 ** (-8 / 16 * torch.arange(1, heads + 1))
    rows, keys = torch.arange(65000, 65032), torch.arange(64500, 65032)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, len(rows), dim, generator=generator).to(dtype)
    k = torch.randn(heads, len(keys), dim, generator=generator).to(dtype)
    of_rows, of_keys = bias_dims(slopes, dim**-0.5, rows, keys)
    for dims in (of_rows, of_keys):
        assert dims.shape[-1] == BIAS_DIMS and torch.equal(dims.to(dtype).float(), dims)
    expected = q.double() @ k.double().mT * dim**-0.5
    expected += slopes.double()[:, None, None] * (keys - rows[:, None]).double()
    wide_q, wide_k = (torch.cat([dims.to(dtype), x], -1).float() for dims, x in ((of_rows, q), (of_keys, k)))
    found = wide_q @ wide_k.mT * dim**-0.5
    # One rounding at the size of the terms, which cancel; the processor chooses the order of the sum.
    terms = (wide_q.double().square() @ wide_k.double().square().mT).sqrt() * dim**-0.5
    assert ((found - expected).abs() / terms).max() < 2**-24
