"""Layer: gloo ranks. Patched OpenFlamingo: FSDP2, LoRA, checkpointing, undoing, bad use; MPT's biases as head dims."""

import functools
from typing import Any

import pytest
import torch
from open_flamingo_cases import PATIENCE, TOLERANCE, Case, gradient_error, inputs_of, model_of, own_media, reference
from tiny_open_flamingo import LANGUAGE_MODELS, PAD, pixels, tiny_flamingo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from mllm_seqpar import FrameShard, patch_model, unpatch_model
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.patches.open_flamingo.mpt import BIAS_DIMS, bias_dims
from mllm_seqpar.patching import registry as adapters
from outcomes import average
from ranks import ranks
from tolerances import assert_as_near_as_unpatched
from training import check_fsdp, check_lora

FAMILY = "open_flamingo_training"
TWO = Case(media=((1, 4, 7), (3,)), images=2)
ONE = Case(media=((2, 6),), images=1)


def test_fsdp2() -> None:
    """With one medium, the second and third rank have none."""
    check_fsdp(FAMILY, [[TWO, ONE, TWO]], 3)


def test_two_groups_under_one_fsdp() -> None:
    check_fsdp(FAMILY, [[TWO, ONE], [ONE, TWO]], 4)


def test_lora() -> None:
    check_lora(FAMILY, TWO, 3)


def checkpointed(rank: int, world: int, name: str, patched_first: bool) -> tuple[float, dict[str, Any]]:
    """As OpenFlamingo's own training does: cross-attention, decoder layers and perceiver in wrappers."""
    model = tiny_flamingo(name)
    units = {model.perceiver, *model.lang_encoder.gated_cross_attn_layers, *model.lang_encoder.old_decoder_blocks}
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    wrap = functools.partial(
        apply_activation_checkpointing, model, checkpoint_wrapper_fn=wrapper, check_fn=units.__contains__
    )
    for step in (patch_model, lambda _: wrap()) if patched_first else (lambda _: wrap(), patch_model):
        step(model)
    out = model(**inputs_of(TWO))
    out.loss.backward()
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    average(grads, world)
    return out.loss.item(), grads


@pytest.mark.parametrize(("name", "patched_first"), [("llama", True), ("mpt", False)])
def test_activation_checkpointing(name: str, patched_first: bool) -> None:
    loss, grads = ranks(2).run(checkpointed, name, patched_first, timeout=PATIENCE)[0]
    expected = reference(name, TWO)
    assert loss == pytest.approx(expected.loss, rel=TOLERANCE)
    value, worst = gradient_error(grads, expected.grads)
    assert value < TOLERANCE, (value, worst)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_unpatching_leaves_no_trace(name: str) -> None:
    model, inputs = model_of(name, TWO), inputs_of(TWO)
    logits, keys = model(**inputs).logits, list(model.state_dict())
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    patch_model(model, "ring", text_layout="striped")
    model(**inputs).loss.backward()
    model.generate(inputs["vision_x"], inputs["lang_x"], max_new_tokens=2, pad_token_id=PAD)
    model.cache_media(inputs["lang_x"], inputs["vision_x"])
    model.uncache_media()
    assert list(model.state_dict()) == keys
    unpatch_model(model)
    for path, module in model.named_modules():
        now = {key: value for key, value in vars(module).items() if key != "use_cached_media"}
        was = {key: value for key, value in before[path].items() if key != "use_cached_media"}
        assert now.keys() == was.keys(), path
        assert all(value is was[key] for key, value in now.items()), path
    assert torch.equal(model(**inputs).logits, logits)


def narrow(rank: int, world: int, name: str, how: str, patched: bool) -> torch.Tensor:
    """Logits in bfloat16, by weights or by autocast, in float32."""
    model, inputs = tiny_flamingo(name), inputs_of(TWO)
    if how == "weights":
        model, inputs = model.bfloat16(), inputs | {"vision_x": inputs["vision_x"].bfloat16()}
    if patched:
        patch_model(model, logits="full")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        out = model(**inputs)
    out.loss.backward()
    return out.logits.detach().float()


@pytest.mark.rounding
@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("name", ["mpt", "opt"])
def test_bfloat16(name: str, how: str) -> None:
    """No further from float32 than the unpatched model is; MPT's biases are in float32 there, and exact here."""
    expected = reference(name, TWO).logits
    alone = narrow(0, 1, name, how, False)
    for found in ranks(2).run(narrow, name, how, True, timeout=PATIENCE):
        assert_as_near_as_unpatched({"logits": found}, {"logits": alone}, {"logits": expected})


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "several frames": ({"vision_x": torch.zeros(2, 2, 3, 3, 12, 12)}, "expected .*one frame to a medium"),
    "no frames dimension": ({"vision_x": torch.zeros(2, 2, 3, 12, 12)}, r"expected \(B, media, 1, C, H, W\)"),
    "no media": ({"vision_x": torch.zeros(2, 0, 1, 3, 12, 12)}, "0 media for 2 samples"),
    "media of other samples": ({"vision_x": pixels(3, 2)}, "2 rows of text, but media for 3 samples"),
    "not as many for each": (
        {"vision_x": pixels(1, 3)[0], "visual_shard": FrameShard(0, 3, 3)},
        "3 media for 2 samples",
    ),
    "other media on one rank": ({"vision_x": pixels(2, 2, seed=9)}, "given different inputs"),
}


def errors_of_all(rank: int, world: int) -> dict[str, str]:
    """Bad inputs on rank 1 only, with one rank on both."""
    model, found = model_of("opt", TWO), {}
    patch_model(model)
    for name, (changed, _) in ERRORS.items():
        if rank == 1 and "visual_shard" not in changed:
            changed = {}
        if "visual_shard" in changed:
            changed = own_media({"vision_x": changed["vision_x"][None]})
        try:
            model(**inputs_of(TWO) | changed)
        except Exception as caught:
            found[name] = f"{type(caught).__name__}: {caught}"
        model.lang_encoder.clear_conditioned_layers()
    unpatch_model(model)
    return found


def test_bad_inputs_end_on_every_rank() -> None:
    found, other = ranks(2).run(errors_of_all, timeout=PATIENCE)
    for name, (_, message) in ERRORS.items():
        assert name in other
        with pytest.raises(ValueError, match=message):
            raise ValueError(found.get(name, "no error"))


def with_dropout(patched: bool, seed: int) -> tuple[float, dict[str, Any]]:
    """Behind attention and MLP, where it is allowed; OPT's published checkpoints have it."""
    model = tiny_flamingo("opt").train()
    for block in model.lang_encoder.old_decoder_blocks:
        block.dropout = 0.3
    if patched:
        patch_model(model, self_attention="local")
    torch.manual_seed(seed)
    loss = model(**inputs_of(TWO)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def with_dropout_rank(rank: int, world: int) -> tuple[float, dict[str, Any]]:
    loss, grads = with_dropout(True, seed=7 + rank)
    average(grads, world)
    return loss, grads


def test_ranks_that_all_have_the_text_drop_the_same_of_it() -> None:
    expected, grads = with_dropout(False, seed=7)
    for loss, found in ranks(2).run(with_dropout_rank, timeout=PATIENCE):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        value, worst = gradient_error(found, grads)
        assert value < TOLERANCE, (value, worst)


def own_loss(rank: int, world: int) -> None:
    model = tiny_flamingo("opt")
    model.lang_encoder.loss_function = lambda **_: torch.zeros(())
    patch_model(model)(**inputs_of(TWO))


def test_a_loss_of_the_language_models_own_is_refused_where_text_is_dealt() -> None:
    errors = ranks(2).errors(own_loss, timeout=PATIENCE)
    assert all('Patch with self_attention="local"' in str(error) for error in errors), errors


def test_what_cannot_be_patched() -> None:
    model = tiny_flamingo("opt")
    model.lang_encoder.model.decoder.layerdrop = 0.1
    with pytest.raises(ConfigError, match="layerdrop=0.1: every rank would leave out other layers"):
        patch_model(model)
    model = tiny_flamingo("gpt_neox")
    model.lang_encoder.config.model_type = "gptj"
    with pytest.raises(AdapterError, match=r"model_type 'gptj'\); OpenFlamingo can be patched over opt, llama, mpt"):
        patch_model(model)
    model = tiny_flamingo("opt")
    model.lang_encoder.gated_cross_attn_layers[0].attn.only_attend_immediate_media = False
    patch_model(model)
    with pytest.raises(AdapterError, match="only_attend_immediate_media differs between the layers"):
        model(**inputs_of(TWO))
    model = patch_model(tiny_flamingo("llama"))
    with pytest.raises(ShapeError, match="not conditioned on media"):
        model.lang_encoder(inputs_of(TWO)["lang_x"])
    model = tiny_flamingo("mpt").train()
    for block in model.lang_encoder.transformer.blocks:
        getattr(block, "decoder_layer", block).attn.attn_dropout_p = 0.1
    patch_model(model)
    with pytest.raises(ConfigError, match="dropout on attention weights is not supported"):
        model(**inputs_of(TWO))


def test_it_is_known() -> None:
    assert "OpenFlamingo" in adapters.adapters()


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_exact_in_a_long_text(dtype: torch.dtype) -> None:
    """At its end, where the positions are large: as exact as the unpatched bias is there, and in bfloat16 too."""
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
    # One rounding at the size of the terms, which cancel: in which order they are added is the processor's choice.
    terms = (wide_q.double().square() @ wide_k.double().square().mT).sqrt() * dim**-0.5
    assert ((found - expected).abs() / terms).max() < 2**-24
