"""Layer: one process. OpenFlamingo alone: hidden states, models that cannot be patched, MPT's ALiBi biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from family_harness import TOLERANCE, inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.patches.open_flamingo.mpt import BIAS_DIMS, bias_dims
from mllm_seqpar.patching import registry as adapters
from outcomes import error

flamingo = pytest.importorskip("mllm_seqpar.patches.open_flamingo.testing", exc_type=ImportError)
TWO = flamingo.Case(frames=((1, 4, 7), (3,)), media=2)


def new_model(decoder: str) -> Any:
    return model_of("open_flamingo", TWO.with_model(language_model=decoder))


INPUTS = inputs_of("open_flamingo", TWO, None)


@torch.no_grad()
@pytest.mark.parametrize("decoder", flamingo.LANGUAGE_MODELS)
def test_hidden_states_on_one_rank_equal_those_of_the_language_model(decoder: str) -> None:
    model, found = new_model(decoder), []
    for is_patched in (False, True):
        if is_patched:
            patch_model(model)
        model._encode_vision_x(INPUTS["vision_x"])
        out = model.lang_encoder(INPUTS["lang_x"], INPUTS["attention_mask"], output_hidden_states=True)
        model.lang_encoder.clear_conditioned_layers()
        found.append([*out.hidden_states, out.logits])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert error(ours, theirs) < TOLERANCE


def test_forward_and_generate_leave_no_media_behind() -> None:
    model = patch_model(new_model("opt"))
    model(**INPUTS)
    assert not model.lang_encoder.is_conditioned()
    model.generate(INPUTS["vision_x"], INPUTS["lang_x"], max_new_tokens=2, pad_token_id=flamingo.PAD)
    assert not model.lang_encoder.is_conditioned() and not model.lang_encoder._use_cached_vision_x


def test_family_is_registered() -> None:
    assert "OpenFlamingo" in adapters.adapters()


def test_layerdrop_is_refused() -> None:
    model = new_model("opt")
    model.lang_encoder.model.decoder.layerdrop = 0.1
    with pytest.raises(ConfigError, match="layerdrop=0.1: every rank would leave out other layers"):
        patch_model(model)


def test_unknown_language_model_is_refused_with_the_known_ones() -> None:
    model = new_model("gpt_neox")
    model.lang_encoder.config.model_type = "gptj"
    with pytest.raises(AdapterError, match=r"model_type 'gptj'\); OpenFlamingo can be patched over opt, llama, mpt"):
        patch_model(model)


def test_layers_that_attend_to_different_media_are_refused() -> None:
    model = new_model("opt")
    model.lang_encoder.gated_cross_attn_layers[0].attn.only_attend_immediate_media = False
    patch_model(model)
    with pytest.raises(AdapterError, match="only_attend_immediate_media differs between the layers"):
        model(**INPUTS)


def test_language_model_without_media_is_refused() -> None:
    model = patch_model(new_model("llama"))
    with pytest.raises(ShapeError, match="not conditioned on media"):
        model.lang_encoder(INPUTS["lang_x"])


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
