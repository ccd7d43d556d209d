"""Layer: one process. Training steps of patched models over the model of NCCL, beside other collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from family_cases import BATCHES
from family_harness import FAMILIES, check, family_module, outcome, patched, reference, slow_unless
from nccl_model import Deadlock, NcclCommunicator, ShardedParameters, run_nccl_model
from outcomes import Outcome, run_case
from tiny_models.mplug_owl3 import Case

OPTIONS: list[dict[str, Any]] = [
    {"strategy": "lv-xattn"},
    {"strategy": "ring", "self_attention": "ulysses"},
    {"strategy": "replicate"},
    {"strategy": "ulysses", "recompute_visual": False},
]


@pytest.mark.parametrize(
    "options",
    slow_unless(lambda options: "self_attention" in options, OPTIONS),
    ids=lambda options: options["strategy"],
)
def test_training_step_equals_unpatched_whenever_data_arrives(options: dict[str, Any]) -> None:
    case = Case(frames=(3, 2), options=options)
    for how in ({"timing": "late"}, {"timing": "random", "seed": 1, "one_resource": True}):
        found = run_nccl_model(2, lambda comm: outcome("mplug_owl3", case, comm), **how)
        check(found, reference("mplug_owl3", case), case)


@pytest.mark.parametrize("family", slow_unless(lambda _: False, [f for f in FAMILIES if f != "mplug_owl3"]))
def test_training_step_of_every_family_equals_unpatched(family: str) -> None:
    family_module(family)
    case = BATCHES[family]
    found = run_nccl_model(3, lambda comm: outcome(family, case, comm), timing="random", one_resource=True)
    check(found, reference(family, case), case)


def step_beside_traffic(comm: NcclCommunicator, case: Any, without_prefetch: tuple[int, ...] = ()) -> Outcome:
    """Return the result of a step in which every decoder layer gathers, and sums the gradients of, a weight."""
    model, inputs = patched("mplug_owl3", case, comm)
    layers = model.language_model.model.layers
    shards = [torch.tensor([float(10 * i + comm.rank)]) for i in range(len(layers))]
    weights = ShardedParameters(comm.another("fsdp"), shards, prefetch=comm.rank not in without_prefetch)

    def need(i: int, following: int) -> None:
        assert weights.weight(i, following).tolist() == [10 * i + rank for rank in range(comm.size)]

    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: need(i, i + 1))
        layer.register_full_backward_pre_hook(lambda *_, i=i: need(i, i - 1))
        layer.register_full_backward_hook(lambda *_, i=i: weights.reduce(i, torch.ones(comm.size)))
    found = run_case(model, inputs, model(**inputs, output_hidden_states=True))
    weights.finish()
    assert weights.grads == {i: comm.size for i in range(len(layers))}
    return found


@pytest.mark.slow
def test_layers_may_gather_parameters_on_another_communicator() -> None:
    case = Case(frames=(3, 2))
    for options in ({}, {"timing": "early"}, {"timing": "random", "one_resource": True}):
        check(run_nccl_model(2, step_beside_traffic, case, **options), reference("mplug_owl3", case), case)
    with pytest.raises(Deadlock, match="its queue is at all_gather 1 of communicator 'fsdp'"):
        run_nccl_model(2, step_beside_traffic, case, (1,), one_resource=True)
