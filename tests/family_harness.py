"""Run a patched tiny model of any family on several ranks, and the unpatched model on one, with the same inputs.

The ranks are threads of this process (`run_loopback`), each with its own copy of the model. `outcome` and `tokens` also
run on the ranks of a process group. The unpatched model is the reference for everything. The models and batches come
from the modules of `tiny_models`, which describes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from mllm_seqpar import patch_model, patches
from mllm_seqpar.comm import Communicator, run_loopback
from model_copies import copy_of
from outcomes import Outcome, average, error, run_case, worst_gradient
from selections import slow_unless as slow_unless  # most callers use both

T = TypeVar("T")

TOLERANCE = 1e-5
"""Float32 through a few layers and their gradients. A wrong mask, scale or position shows as 1e-3 and more."""

FAMILIES = tuple(sorted(patches.FAMILIES))


@functools.cache
def family_module(family: str) -> Any:
    """Return `tiny_models.<family>`; skip the test if the package of the family's models is not installed."""
    return pytest.importorskip(f"tiny_models.{family}", exc_type=ImportError)


def model_of(family: str, case: Any) -> Any:
    """Return a new copy of the case's model."""
    model = copy_of(family_module(family).tiny_model, **case.model_overrides())
    return (model.double() if case.double else model).train(case.train)


def inputs_of(family: str, case: Any, model: Any) -> dict[str, Any]:
    """Return the arguments of the unpatched model's forward."""
    inputs = family_module(family).inputs_of(case, model)
    for name, x in inputs.items():
        if case.double and isinstance(x, Tensor) and x.is_floating_point():
            inputs[name] = x.double()
    return inputs


def build(family: str, case: Any) -> tuple[Any, dict[str, Any]]:
    """Return a new copy of the case's model, and the arguments of the unpatched model's forward."""
    model = model_of(family, case)
    return model, inputs_of(family, case, model)


def patched(family: str, case: Any, group: Any) -> tuple[Any, dict[str, Any]]:
    """Return the patched model of this rank and the inputs that it passes."""
    model, inputs = build(family, case)
    if case.local_frames:
        inputs = family_module(family).local_frames(inputs, group, case.frame_layout)
    return patch_model(model, group=group, **case.options), inputs


def on_ranks(size: int, family: str, case: Any, fn: Callable[[Any, dict[str, Any], Communicator], T]) -> list[T]:
    """Return `fn(model, inputs, comm)` of each rank, with its patched model and the inputs that it passes."""
    return run_loopback(size, lambda comm: fn(*patched(family, case, comm), comm))


def forward(family: str, model: Any, inputs: dict[str, Any]) -> Any:
    """Call the model, with hidden states where the family's forward can return them."""
    return model(**inputs) if family == "open_flamingo" else model(**inputs, output_hidden_states=True)


def outcome(family: str, case: Any, group: Any) -> Outcome:
    """Return the result of the patched model on this rank."""
    model, inputs = patched(family, case, group)
    return run_case(model, inputs, forward(family, model, inputs))


_references: dict[tuple[str, str], Outcome] = {}


def reference(family: str, case: Any) -> Outcome:
    """Return the result of the unpatched model; options and `local_frames` do not change it."""
    case = replace(case, options={}, local_frames=False)
    key = (family, repr(case))
    if key not in _references:
        model, inputs = build(family, case)
        run = getattr(family_module(family), "unpatched_forward", functools.partial(forward, family))
        _references[key] = run_case(model, inputs, run(model, inputs))
    return _references[key]


def check(outcomes: list[Outcome], expected: Outcome, case: Any) -> None:
    """Compare every rank's loss, logits and hidden states, and the mean gradients, with the unpatched model's.

    Rows of padding tokens are not compared.
    """
    real = slice(None) if case.real() is None else case.real()
    mode = case.options.get("logits", "auto")
    sharded = len(outcomes) > 1 and case.options.get("self_attention") != "local"
    all_logits = not sharded or mode == "full" or (mode != "local" and case.labels is None)
    for found in outcomes:
        assert found.loss == outcomes[0].loss  # bit-identical on all ranks
        if expected.loss is not None:
            assert found.loss is not None
            assert abs(found.loss - expected.loss) <= TOLERANCE * abs(expected.loss)
        if mode == "none" and case.labels is not None:
            assert found.logits is None
        else:
            assert found.logits.shape[-1] == expected.logits.shape[-1]
        if all_logits and found.logits is not None:  # for a short text, the shape alone cannot tell
            assert error(found.logits[real], expected.logits[real]) < TOLERANCE
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert error(ours[real], theirs[real]) < TOLERANCE
    if expected.loss is not None:
        compare_gradients([found.grads for found in outcomes], expected.grads)
        if not case.local_frames:
            compare_gradients([found.input_grads for found in outcomes], expected.input_grads)


def compare_gradients(found: list[Any], expected: Any, tolerance: float = TOLERANCE) -> None:
    """Compare the mean of all ranks' gradients with the unpatched model's."""
    value, name = worst_gradient(average(found), expected)
    assert value < tolerance, (value, name)


def check_exact(family: str, size: int, case: Any) -> None:
    """Compare the patched model on `size` loopback ranks with the unpatched model."""
    expected = reference(family, case)
    check(run_loopback(size, lambda comm: outcome(family, case, comm)), expected, case)


def settings(**given: Any) -> dict[str, Any]:
    """Return arguments of `generate` that fix the number of tokens."""
    return {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | given


def tokens(family: str, case: Any, given: dict[str, Any], group: Any, seed: int = 17) -> Tensor:
    """Return the tokens that the patched model generates on this rank."""
    model, inputs = patched(family, case, group)
    torch.manual_seed(seed)  # building a model draws numbers
    return model.generate(**inputs, **settings(**given))


def expected_tokens(family: str, case: Any, given: dict[str, Any]) -> Tensor:
    """Return the tokens that the unpatched model generates, with torch's generator seeded with 17."""
    model = model_of(family, case)
    generate = getattr(family_module(family), "unpatched_generate", lambda model, **inputs: model.generate(**inputs))
    torch.manual_seed(17)
    return generate(model, **inputs_of(family, case, model), **settings(**given))


def check_tokens(family: str, size: int, case: Any, given: dict[str, Any]) -> None:
    """Compare the tokens of every loopback rank with the unpatched model's.

    Loopback ranks share torch's random generator, so only one rank may sample.
    """
    expected = expected_tokens(family, case, given)
    for found in run_loopback(size, lambda comm: tokens(family, case, given, comm)):
        assert torch.equal(found, expected), (found, expected)


def traces(model: Any) -> dict[str, Any]:
    """Return everything that patching could leave behind: each attribute of each module and config, by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in (
                "use_cached_media",
                "rope_deltas",
            ):  # which unpatched OpenFlamingo and Qwen set in each pass
                found[f"{path}.{name}"] = (id(value), list(value) if isinstance(value, dict) else None)
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            found[f"{path}.config"] = (id(config), repr(sorted(vars(config).items(), key=str)))
        found[f"{path} is"] = type(module)
    return found
