"""Running a patched tiny model of any family on real ranks, and the unpatched one in this process, on the same inputs.

A family's own module (`tiny_idefics`, ...) has `model_of(case)`, `inputs_of(case, model)`, `local_frames(inputs)` and a
dictionary of cases per test; ranks find it by name, so nothing but names and results travels. The unpatched model is
the reference for everything.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from outcomes import Outcome, average, error, run_case, worst_gradient
from ranks import ranks

TOLERANCE = 1e-5
"""float32 through a few layers and their gradients; a wrong mask, scale or position shows as 1e-3 and more."""

PATIENCE = 240.0
"""Seconds for a case on ranks: the first one imports transformers in every worker, on a machine that others use."""


@dataclass(frozen=True)
class FamilyCase:
    """One batch of a tiny model; families add fields of their own.

    Attributes:
        images: images of each sample.
        length: tokens of each row.
        padding: "left" or None: every sample after the first is shorter by 2 more tokens.
        local_frames: each rank passes only its own frames, with `visual_shard`.
        labels: whether labels are passed, and gradients compared.
        wants_grad: inputs whose gradients are compared, too.
        arguments: further arguments of forward.
        model: config overrides of the tiny model.
        options: of patch_model.
        train: the model is in training mode.
        double: in float64, where a gradient is a sum that cancels down to float32's rounding.
    """

    images: tuple[int, ...] = (3,)
    length: int = 11
    padding: str | None = None
    local_frames: bool = False
    labels: bool = True
    wants_grad: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    double: bool = False

    def with_options(self, **options: Any) -> Any:
        """The same with options of `patch_model` added."""
        return replace(self, options={**self.options, **options})

    def real(self) -> Tensor | None:
        """(B, L) bool, the real tokens of a padded batch; what padding computes is nobody's concern."""
        if self.padding is None:
            return None
        mask = torch.ones(len(self.images), self.length, dtype=torch.bool)
        for sample in range(1, len(self.images)):
            mask[sample, : 2 * sample] = False
        return mask


def _prepared(module: Any, case: Any) -> tuple[Any, dict[str, Any]]:
    """The case's model, unpatched, and its inputs."""
    model = module.model_of(case).train(case.train)
    inputs = module.inputs_of(case, model)
    if case.double:
        model = copy.deepcopy(model).double()
        floats = {name for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        inputs = {name: x.double() if name in floats else x for name, x in inputs.items()}
    return model, inputs


def rank_outcome(rank: int, world: int, family: str, cases: str, name: str) -> Outcome:
    """On a rank: the patched model's outcome."""
    module = importlib.import_module(family)
    case = getattr(module, cases)[name]
    model, inputs = _prepared(module, case)
    if case.local_frames:
        inputs = module.local_frames(inputs)
    patch_model(model, **case.options)
    try:
        outcome = run_case(model, inputs)
    finally:
        unpatch_model(model)
        model.zero_grad(set_to_none=True)
    for grads in (outcome.grads, {} if case.local_frames else outcome.input_grads):
        average(grads, world)
    if rank:
        outcome.grads, outcome.input_grads = {}, {}
    return outcome


@functools.cache
def reference(family: str, cases: str, name: str) -> Outcome:
    """The unpatched model's outcome, in this process."""
    module = importlib.import_module(family)
    case = getattr(module, cases)[name]
    outcome = getattr(module, "run_unpatched", run_case)(*_prepared(module, case))
    outcome.grads = {n: None if g is None else g.clone() for n, g in outcome.grads.items()}
    module.model_of(case).zero_grad(set_to_none=True)
    return outcome


def check_case(family: str, cases: str, name: str, world: int) -> float:
    """Loss, logits, hidden states, gradients of every rank against the unpatched model's; the worst relative error."""
    case = getattr(importlib.import_module(family), cases)[name]
    expected = reference(family, cases, name)
    outcomes = ranks(world).run(rank_outcome, family, cases, name, timeout=PATIENCE)
    real, found = case.real(), []
    keep = slice(None) if real is None else real
    whole = world == 1 or case.options.get("self_attention") == "local" or not case.labels
    for outcome in outcomes:
        assert outcome.loss == outcomes[0].loss  # the same number, not nearly
        if expected.loss is not None:
            assert outcome.loss is not None
            found.append(abs(outcome.loss - expected.loss) / abs(expected.loss))
        assert outcome.logits.shape[-1] == expected.logits.shape[-1]
        if whole or case.options.get("logits") == "full":
            found.append(error(outcome.logits[keep], expected.logits[keep]))
        for mine, theirs in zip(outcome.hidden_states, expected.hidden_states, strict=True):
            found.append(error(mine[keep], theirs[keep]))
    if expected.loss is not None:
        for mine_, theirs_ in ((outcomes[0].grads, expected.grads), (outcomes[0].input_grads, expected.input_grads)):
            if theirs_ and not (case.local_frames and theirs_ is expected.input_grads):
                value, where = worst_gradient(mine_, theirs_)
                assert value < TOLERANCE, (value, where)
                found.append(value)
    assert max(found) < TOLERANCE, found
    return max(found)


def settings(**given: Any) -> dict[str, Any]:
    """Arguments of `generate` that fix the number of tokens."""
    return {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | given


def rank_tokens(rank: int, world: int, family: str, cases: str) -> dict[str, Tensor]:
    """On a rank: the tokens that the patched model generates in each case of the dictionary (case, settings)."""
    module, found = importlib.import_module(family), {}
    for name, (case, given) in getattr(module, cases).items():
        model = module.model_of(case)
        inputs = module.inputs_of(case, model)
        if case.local_frames:
            inputs = module.local_frames(inputs)
        patch_model(model, **case.options)
        torch.manual_seed(17 if rank == 0 else 1000 + rank)  # the other ranks were not seeded alike
        try:
            found[name] = model.generate(**inputs, **settings(**given))
        except Exception as caught:
            caught.add_note(f"case {name}")
            raise
        finally:
            unpatch_model(model)
    return found


def check_tokens(family: str, cases: str, world: int) -> None:
    """Every rank's tokens are the unpatched model's."""
    module = importlib.import_module(family)
    outcomes = ranks(world).run(rank_tokens, family, cases, timeout=PATIENCE)
    for name, (case, given) in getattr(module, cases).items():
        model = module.model_of(case)
        torch.manual_seed(17)
        unpatched = getattr(module, "unpatched_generate", None)
        inputs = module.inputs_of(case, model)
        expected = (model.generate if unpatched is None else functools.partial(unpatched, model))(
            **inputs, **settings(**given)
        )
        for found in outcomes:
            assert torch.equal(found[name], expected), (name, found[name], expected)
