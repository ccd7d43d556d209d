"""Layer: one process, loopback ranks. Checkpointing, frozen parts, LoRA, 16-bit; what a layer stores for backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from family_cases import BATCHES, CROSS_ATTENTION, EXACT, FUSED, QWENS
from family_harness import (
    FAMILIES,
    TOLERANCE,
    compare_gradients,
    family_module,
    inputs_of,
    model_of,
    on_ranks,
    outcome,
    reference,
    slow_unless,
)
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError
from model_copies import tiny_model
from outcomes import Outcome, average, error, run_case
from tiny_models.mplug_owl3 import LORA_TARGETS, Case, tiny_frames, tiny_text
from tolerances import assert_as_near_as_unpatched

BATCH, ONE_FRAME = Case(frames=(3, 2)), Case(frames=(1,), length=9)  # with one frame, one rank of two has none
GATES = ("per_head", None)
FEW_FRAMES = {family: replace(case, frames=(((4, 4),),), length=11) for family, case in QWENS.items()}


def lora(model: Any, targets: Any, **more: Any) -> Any:
    torch.manual_seed(5)
    config = LoraConfig(**{"r": 4, "target_modules": targets, "init_lora_weights": False} | more)
    return get_peft_model(model, config).train()


def freeze(model: Any, frozen: Callable[[str], bool]) -> Any:
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen(name))
    return model


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


PREPARED: dict[str, Callable[[Any], Any]] = {
    "gradient checkpointing": checkpointed,
    "frozen tower": lambda model: freeze(model, lambda name: "vision_model" in name),
    "frozen language model": lambda model: freeze(model, lambda name: "language_model" in name),
    "only v_kv_proj trains": lambda model: freeze(model, lambda name: "v_kv_proj" not in name),
    "only the projector trains": lambda model: freeze(model, lambda name: "vision2text_model" not in name),
    "only one layer norm trains": lambda model: freeze(model, lambda name: "layers.2.input_layernorm" not in name),
    "LoRA": lambda model: lora(model, LORA_TARGETS),
    "attention trained whole by PEFT": lambda model: lora(model, ["up_proj"], modules_to_save=["self_attn"]),
    "LoRA with checkpointing": lambda model: lora(checkpointed(model), LORA_TARGETS),
}


def step(model: Any, inputs: dict[str, Any], group: Any = None, **options: Any) -> Outcome:
    """Return the result of one training step, patched if there is a group."""
    model = model if group is None else patch_model(model, group=group, **options)
    return run_case(model, inputs, model(**inputs))


def check_step(found: list[Outcome], expected: Outcome) -> None:
    assert all(each.loss == pytest.approx(expected.loss, rel=TOLERANCE) for each in found)
    compare_gradients([each.grads for each in found], expected.grads)


def reentrant(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


QWEN_LORA = r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)|mlp\.(gate|up|down))_proj"
PREPARED_QWEN: dict[str, Callable[[Any], Any]] = {
    "gradient checkpointing": checkpointed,
    "reentrant checkpointing": reentrant,
    "frozen tower": lambda model: freeze(model, lambda name: ".visual." in name),
    "frozen language model": lambda model: freeze(model, lambda name: ".visual." not in name),
    "only the merger trains": lambda model: freeze(checkpointed(model), lambda name: ".merger." not in name),
    "only one layer norm trains": lambda model: freeze(model, lambda name: "layers.2.input_layernorm" not in name),
    "attention trained whole by PEFT": lambda model: lora(model, ["down_proj"], modules_to_save=["self_attn"]),
    "LoRA with checkpointing": lambda model: lora(checkpointed(model), QWEN_LORA),
}


STORED = {"recompute_visual": False, "strategy": "ring"}
WAYS: list[tuple[str, str, Any, dict[str, Any]]] = []
for _index, _how in enumerate(PREPARED):
    _owl = ("mplug_owl3", _how, BATCH, {}), ("mplug_owl3", _how, ONE_FRAME.with_model(**FUSED), STORED)
    WAYS += _owl if "LoRA" in _how or "checkpointing" in _how else _owl[_index % 2 :][:1]
for _index, _how in enumerate(PREPARED_QWEN):
    _batch, _few = list(QWENS)[:: 1 if _index % 2 else -1]
    WAYS += [(_batch, _how, QWENS[_batch], {}), (_few, _how, FEW_FRAMES[_few], {"self_attention": "ulysses"})]
QUICK = ("gradient checkpointing", "LoRA", "reentrant checkpointing")


@pytest.mark.parametrize(("family", "how", "case", "options"), slow_unless(lambda row: row[1] in QUICK, WAYS))
def test_prepared_model_equals_unpatched(family: str, how: str, case: Any, options: dict[str, Any]) -> None:
    prepare = (PREPARED_QWEN if family in QWENS else PREPARED)[how]
    inputs = inputs_of(family, case, model_of(family, case))
    models = [prepare(model_of(family, case).train()) for _ in range(3)]
    expected = step(models.pop(), inputs)
    assert any(grad is not None and grad.any() for grad in expected.grads.values())
    check_step(run_loopback(2, lambda comm: step(models[comm.rank], inputs, comm, **options)), expected)


# OpenFlamingo has no gradient checkpointing of its own.
OTHERS = [(family, family != "open_flamingo") for family in FAMILIES if family != "mplug_owl3"] + [("mllama", False)]


@pytest.mark.parametrize(("family", "checkpointing"), slow_unless(lambda row: row == ("mllama", True), OTHERS))
def test_lora_on_a_frozen_model_equals_unpatched(family: str, checkpointing: bool) -> None:
    module, case = family_module(family), BATCHES.get(family)
    inputs = inputs_of(family, case, model_of(family, case))
    models = [lora(model_of(family, case).train(), module.LORA_TARGETS) for _ in range(4)]
    for model in models[:3] if checkpointing else ():
        checkpointed(model)
    expected = step(models.pop(), inputs)
    trained = {name for name, grad in expected.grads.items() if grad is not None}
    assert trained and all("lora_" in name for name in trained)
    options = {"mlp_chunk_size": 5} if checkpointing else {}
    check_step(run_loopback(3, lambda comm: step(models[comm.rank], inputs, comm, **options)), expected)


def test_mllama_attention_trained_whole_by_peft_has_gradients() -> None:
    case = BATCHES["mllama"]
    inputs = inputs_of("mllama", case, model_of("mllama", case))
    whole = {"modules_to_save": ["self_attn"], "init_lora_weights": True}  # a new adapter changes nothing
    models = [lora(model_of("mllama", case), r".*cross_attn\.q_proj", **whole) for _ in range(2)]
    for found in run_loopback(2, lambda comm: step(models[comm.rank], inputs, comm)):
        assert found.loss == pytest.approx(reference("mllama", case).loss, rel=TOLERANCE)
        copies = [grad for name, grad in found.grads.items() if "self_attn.modules_to_save" in name]
        assert copies and all(grad is not None and grad.any() for grad in copies)


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "patched_first"), [("llama", True), ("mpt", False)])
def test_checkpoint_wrappers_of_open_flamingo_equal_unpatched(decoder: str, patched_first: bool) -> None:
    """OpenFlamingo's own training wraps cross-attention, decoder layers and perceiver."""
    family_module("open_flamingo")
    case = BATCHES["open_flamingo"].with_model(language_model=decoder)
    expected = reference("open_flamingo", case)

    def train(comm: Any) -> Outcome:
        model = model_of("open_flamingo", case)
        units = {model.perceiver, *model.lang_encoder.gated_cross_attn_layers, *model.lang_encoder.old_decoder_blocks}
        if patched_first:
            patch_model(model, group=comm)
        wrap = functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT)
        wrapping.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=units.__contains__)
        if not patched_first:
            patch_model(model, group=comm)
        found = step(model, inputs_of("open_flamingo", case, model))
        grads = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.grads.items()}
        return replace(found, grads=grads)

    check_step(run_loopback(2, train), expected)


SELECTIVE = [
    *((family, {}) for family in CROSS_ATTENTION),
    *((family, {}) for family in QWENS),
    ("mplug_owl3", {"visual_offload": "cpu"}),
    ("mllama", {"strategy": "ulysses", "self_attention": "ulysses", "mlp_chunk_size": 5}),
]


@pytest.mark.parametrize(("family", "options"), slow_unless(lambda row: row == ("mllama", {}), SELECTIVE))
def test_selective_checkpointing_equals_unpatched(family: str, options: dict[str, Any]) -> None:
    """It stores results of operators, of which attention changes some in place."""
    family_module(family)
    case = BATCHES[family]
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)

    def train(comm: Any) -> Outcome:
        model = model_of(family, case).train()
        wrap = functools.partial(wrapping.checkpoint_wrapper, context_fn=contexts)
        layers = {m for name, m in model.named_modules() if re.search(r"(layers|blocks)\.\d+$", name)}
        wrapping.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=layers.__contains__)
        found = step(model, inputs_of(family, case, model), comm, **options)
        grads = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.grads.items()}
        return replace(found, grads=grads)

    check_step(run_loopback(2, train), reference(family, case))


def _call_with_other_weights(model: Any, inputs: dict[str, Any]) -> Tensor:
    weights = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (), inputs).loss


def _step_optimizer(model: Any, inputs: dict[str, Any]) -> Tensor:
    loss = model(**inputs).loss
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "v_kv_proj" in name:  # autograd itself checks those that it saves
                weight.mul_(1.1)
    return loss


def _switch_adapters(model: Any, inputs: dict[str, Any]) -> Tensor:
    model.set_adapter("default")
    loss = model(**inputs).loss
    model.set_adapter("other")
    return loss + model(**inputs).loss


def _disable_adapters(model: Any, inputs: dict[str, Any]) -> Tensor:
    loss = model(**inputs).loss
    model.base_model.disable_adapter_layers()
    return loss


CHANGES = [_call_with_other_weights, _step_optimizer, _switch_adapters, _disable_adapters]
RECOMPUTED = [{}, {"visual_offload": "cpu"}, {"mlp_chunk_size": 5}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", RECOMPUTED, ids=["K and V", "offload", "MLP"])
def test_change_of_parameters_before_backward_is_refused(change: Any, options: dict[str, Any]) -> None:
    """Recomputation would use the new parameters, and return gradients of another function."""
    model = tiny_model().train()
    inputs = inputs_of("mplug_owl3", BATCH, model)
    if "adapters" in change.__name__:
        model = lora(model, [*LORA_TARGETS, "up_proj"])
        model.add_adapter("other", LoraConfig(r=4, target_modules=[*LORA_TARGETS, "up_proj"]))
    loss = change(patch_model(model, **options), inputs)
    with pytest.raises(
        ConfigError, match=r"Call backward\(\) before an optimizer step, and before adapters are switched"
    ):
        loss.backward()


def test_parameters_of_the_caller_have_gradients_if_k_and_v_are_saved() -> None:
    model = tiny_model().train()
    inputs = inputs_of("mplug_owl3", BATCH, model)
    weights = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    found = []
    for options in (None, {"recompute_visual": False}):
        called = model if options is None else patch_model(model, **options)
        loss = torch.func.functional_call(called, weights, (), inputs).loss
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        found.append(dict(zip(weights, grads, strict=True)))
    compare_gradients([found[1]], found[0])


@pytest.mark.parametrize("arguments", [{"use_reentrant": True}, {}], ids=str)
def test_reentrant_checkpointing_is_refused(arguments: dict[str, Any]) -> None:
    model = model_of("idefics", BATCHES["idefics"]).train()
    model.gradient_checkpointing_enable(arguments)  # without an argument, torch's checkpoint is reentrant
    patch_model(model)
    with pytest.raises(ValueError, match="use_reentrant=True cannot share the visual features"):
        model(**inputs_of("idefics", BATCHES["idefics"], model))


def narrow(model: Any, inputs: dict[str, Any], how: str) -> Outcome:
    if how == "weights":
        model = model.bfloat16()
        pixels = {"pixel_values", "pixel_values_videos", "vision_x"} & inputs.keys()
        inputs = inputs | {name: inputs[name].bfloat16() for name in pixels}
    if how == "checkpointed autocast":
        checkpointed(model)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
        out = model(**inputs)
    return run_case(model, inputs, out)


NARROW = [
    ("mplug_owl3", BATCH, "autocast"),
    ("mplug_owl3", BATCH.with_model(**FUSED), "checkpointed autocast"),
    ("mplug_owl3", BATCH.with_model(**FUSED), "weights"),
    ("mllama", EXACT["mllama"]["any tiles"], "autocast"),
    ("mllama", EXACT["mllama"]["any tiles"], "weights"),
    ("open_flamingo", "mpt", "autocast"),
    ("open_flamingo", "opt", "weights"),
    ("qwen2_5_vl", BATCHES["qwen2_5_vl"], "checkpointed autocast"),
    ("qwen2_5_vl", BATCHES["qwen2_5_vl"], "weights"),
    ("qwen3_vl", BATCHES["qwen3_vl"], "autocast"),
    ("qwen3_vl", BATCHES["qwen3_vl"], "weights"),
]


@pytest.mark.rounding
@pytest.mark.parametrize(("family", "case", "how"), slow_unless(lambda row: row in (NARROW[0], NARROW[4]), NARROW))
def test_bf16_is_as_near_to_float32_as_unpatched(family: str, case: Any, how: str) -> None:
    family_module(family)
    if isinstance(case, str):
        case = BATCHES["open_flamingo"].with_model(language_model=case)
    inputs = inputs_of(family, case, model_of(family, case))
    exact, unpatched = reference(family, case), narrow(model_of(family, case), inputs, how)

    def rank(comm: Any) -> Outcome:
        return narrow(patch_model(model_of(family, case), group=comm, logits="full"), inputs, how)

    found = run_loopback(2, rank)
    assert found[0].loss == found[1].loss and abs(found[0].loss - exact.loss) < 0.02 * exact.loss
    for each in found:
        assert_as_near_as_unpatched({"": each.logits}, {"": unpatched.logits}, {"": exact.logits})
    if family != "open_flamingo":  # its few gates and norms are too few numbers to compare
        known = {name for name, grad in exact.grads.items() if grad is not None}
        grads = average([each.grads for each in found]), unpatched.grads, exact.grads
        assert_as_near_as_unpatched(*({name: x[name] for name in known} for x in grads))


FLOAT64 = [
    ("mllama", "any tiles"),
    *(("open_flamingo", f"{name}: two samples") for name in ("opt", "llama", "gpt_neox")),
]


@pytest.mark.parametrize(("family", "name"), slow_unless(lambda row: row == FLOAT64[0], FLOAT64))
def test_float64_gradients_equal_unpatched_one_by_one(family: str, name: str) -> None:
    """Each gate is compared alone. Mllama's norms compute in float32; MPT, which is left out, its softmax."""
    family_module(family)
    case = replace(EXACT[family][name], double=True)
    mean = average([each.grads for each in run_loopback(2, lambda comm: outcome(family, case, comm))])
    for key, grad in reference(family, case).grads.items():
        if grad is None:
            assert mean[key] is None or not mean[key].any(), key
        elif not key.endswith("k_proj.bias") and "query_key_value.bias" not in key:  # zero but for rounding
            assert error(mean[key], grad) < (TOLERANCE if family == "mllama" else 1e-10), key


def test_repeated_training_step_is_bit_identical() -> None:
    case = BATCHES["mplug_owl3"]
    runs = [run_loopback(3, lambda comm: outcome("mplug_owl3", case, comm)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(grad, second.grads[name]) for name, grad in first.grads.items() if grad is not None)


def test_own_loss_function_is_refused_where_text_is_sharded() -> None:
    for family in BATCHES.keys() & {"mplug_owl3", "open_flamingo"}:

        def rank(model: Any, inputs: dict[str, Any], _: Any, family: str = family) -> None:
            (model.lang_encoder if family == "open_flamingo" else model).loss_function = lambda **_: torch.zeros(())
            with pytest.raises(ValueError, match='Patch with self_attention="local"'):
                model(**inputs)

        on_ranks(2, family, BATCHES[family], rank)
    # On one rank it applies. It receives labels that are not shifted, like a loss that shifts them itself.
    model = tiny_model()
    model.loss_function = lambda logits, labels, **_: logits[:, :-1].gather(2, labels[:, 1:, None] % 7).mean()
    inputs = inputs_of("mplug_owl3", BATCH, model)
    expected = model(**inputs).loss.item()
    assert patch_model(model)(**inputs).loss.item() == pytest.approx(expected, rel=TOLERANCE)
    model.loss_function = lambda logits, labels, **_: logits[:, 0].gather(1, labels[:, None]).mean()
    loss = model(**inputs | {"labels": torch.tensor([5] * len(inputs["input_ids"]))}).loss  # one label of each sample
    assert loss.isfinite()


@pytest.mark.parametrize("changed_step", [0, 1])
def test_ranks_with_different_weights_are_refused(changed_step: int) -> None:
    """Weights may differ from the start or diverge later; the second pass after the change finds it at the latest."""

    def rank(model: Any, inputs: dict[str, Any], comm: Any) -> None:
        with pytest.raises(ValueError, match="digest of weights: rank 0: "):
            for number in range(3):
                if comm.rank == 1 and number == changed_step:
                    with torch.no_grad():
                        model.language_model.lm_head.weight[0] += 1.0
                model(**inputs)

    on_ranks(2, "mplug_owl3", BATCH, rank)


def stored_bytes(model: Any, frames: int, comm: Any, recompute: bool) -> list[int]:
    """Return the bytes that each hyper layer stores for backward, beyond what all layers share."""
    freeze(model, lambda name: "vision_model" in name)  # the tower stores activations of every frame
    patch_model(model, group=comm, recompute_visual=recompute)
    ids = tiny_text(frames, length=40)
    stored: list[int] = []
    shared = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if stored and x.untyped_storage().data_ptr() not in shared:
            stored[-1] += x.numel() * x.element_size()
        return x

    def enter(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shared.add(kwargs["seqpar"].frames.source.features.untyped_storage().data_ptr())
        stored.append(0)

    for number in model.config.hyper_layers:
        model.language_model.model.layers[number - 1].register_forward_pre_hook(enter, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, tiny_frames(frames), labels=ids).loss
    sizes = list(stored)
    loss.backward()
    return sizes


@pytest.mark.parametrize(
    ("gate", "checkpointing", "recompute"),
    slow_unless(
        lambda row: not row[1] and row[0] == "per_head",
        [("per_head", False, True), ("per_head", True, True), (None, False, True), (None, True, True)]
        + [("per_head", False, False)],
    ),
)
def test_stored_activations_grow_with_frames_only_without_recomputation(
    gate: str | None, checkpointing: bool, recompute: bool
) -> None:
    def run(frames: int) -> list[list[int]]:
        models = [tiny_model(gate).train() for _ in range(2)]
        if checkpointing:
            models = [checkpointed(model) for model in models]
        return run_loopback(2, lambda comm: stored_bytes(models[comm.rank], frames, comm, recompute))

    few, many = run(8), run(32)
    if recompute:
        assert few == many and all(sizes[0] > 0 for sizes in few)
    else:
        assert all(b > a for pair in zip(few, many, strict=True) for a, b in zip(*pair, strict=True))
