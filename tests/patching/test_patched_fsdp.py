"""Layer: gloo ranks. The patched model under FSDP2 and DDP trains and generates as the unpatched one in one process."""

from typing import Any

import pytest
import torch
from patched import GATES, PATIENCE, Case, Inputs, inputs_of, local_frames
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mllm_seqpar import patch_model
from outcomes import error, worst_gradient
from ranks import ranks
from tiny import tiny_model

STEPS = 3
VIDEO = Case(frames=(3, 2))
OTHER_VIDEO = Case(frames=(1,), length=13)  # on 2 ranks and more, one without frames
TEXT = Case(frames=(0, 0), length=11)
TOLERANCE = 1e-5


def shard(model: Any, mesh: DeviceMesh | None = None) -> None:
    """FSDP2 the way a user sets it up: a unit per decoder layer and vision layer, and the rest."""
    for layer in [*model.language_model.model.layers, *model.vision_model.encoder.layers]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def whole(x: torch.Tensor | None) -> torch.Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(model: Any, batches: list[Inputs], sharded: bool) -> dict[str, Any]:
    """AdamW steps; losses, norms of all gradients together, and the last step's gradients and weights."""
    # epsilon far above rounding, which Adam would else make whole steps of where a gradient is zero
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for inputs in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = model(**inputs).loss
        loss.backward()
        grads = {name: whole(weight.grad) for name, weight in model.named_parameters()}
        found["losses"].append(loss.item())
        found["norms"].append(sum(g.norm().item() ** 2 for g in grads.values() if g is not None) ** 0.5)
        optimizer.step()
    if sharded:
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
    return found | {"grads": grads, "weights": {name: whole(weight) for name, weight in model.named_parameters()}}


def fsdp_rank(
    rank: int, world: int, gate: str | None, order: str, checkpointing: bool, options: dict[str, Any]
) -> dict[str, Any]:
    model = tiny_model(gate).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if order == "patched first":
        patch_model(model, **options)
        shard(model)
    else:
        shard(model)
        patch_model(model, **options)
    batches = [inputs_of(gate, case, model) for case in (VIDEO, TEXT, OTHER_VIDEO)]
    found = train(model, batches, sharded=True)
    tokens = model.eval().generate(**generation_inputs(gate, model))
    texts = model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False, eos_token_id=None)
    return (found if rank == 0 else {"losses": found["losses"]}) | {"tokens": tokens, "texts": texts}


def generation_inputs(gate: str | None, model: Any) -> dict[str, Any]:
    inputs = inputs_of(gate, Case(frames=(2, 1), labels=None), model)
    return inputs | {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("world", "gate", "order", "checkpointing", "options"),
    [
        (2, "per_head", "patched first", False, {}),
        (2, None, "sharded first", True, {"strategy": "replicate"}),
        (3, None, "patched first", False, {"vision_chunk_size": 1}),
        (4, "per_head", "sharded first", True, {"vision_chunk_size": 1}),
        (4, None, "patched first", True, {"strategy": "ulysses", "self_attention": "ulysses"}),
        (4, "per_head", "patched first", True, {"strategy": "auto", "self_attention": "mesh", "tile": (2, 2)}),
    ],
)
def test_fsdp2(world: int, gate: str | None, order: str, checkpointing: bool, options: dict[str, Any]) -> None:
    model = tiny_model(gate).train()
    expected = train(model, [inputs_of(gate, case, model) for case in (VIDEO, TEXT, OTHER_VIDEO)], sharded=False)
    model.eval()
    tokens = model.generate(**generation_inputs(gate, model))
    outcomes = ranks(world).run(fsdp_rank, gate, order, checkpointing, options, timeout=PATIENCE)
    compare_training(outcomes, expected)
    assert all(torch.equal(outcome["tokens"], tokens) for outcome in outcomes)
    assert all(torch.equal(outcome["texts"], outcomes[0]["texts"]) for outcome in outcomes)


def compare_training(outcomes: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for outcome in outcomes:
        assert outcome["losses"] == outcomes[0]["losses"]
    for name in ("losses", "norms"):
        assert outcomes[0][name] == pytest.approx(expected[name], rel=TOLERANCE)
    value, name = worst_gradient(outcomes[0]["grads"], expected["grads"])
    assert value < 10 * TOLERANCE, (value, name)  # after two updates of weights that differ in their last bits
    for name, weight in expected["weights"].items():
        assert error(outcomes[0]["weights"][name], weight) < TOLERANCE, name


def two_groups(rank: int, world: int, gate: str | None, cases: list[list[Case]]) -> dict[str, Any]:
    """Data parallel 2 x sequence parallel 2 under one FSDP; each group has its own batch at every step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model = tiny_model(gate).train()
    shard(model, mesh["dp", "sp"]._flatten("all"))
    patch_model(model, group=mesh["sp"], vision_chunk_size=1)  # groups whose towers run as often, with other frames
    group = mesh["dp"].get_local_rank()
    own = cases[group]
    batches = [local_inputs(gate, case, model, mesh["sp"]) for case in own]
    found = train(model, batches, sharded=True)
    with torch.no_grad():
        prompt = own[0]
        inputs = {k: v for k, v in inputs_of(gate, prompt, model).items() if k != "labels"}
        # one group goes on when the other has its tokens, and needs its shards of the weights
        new = {"max_new_tokens": 2 + 3 * group, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = model.eval().generate(**inputs, **new)
    assert tokens.shape[1] == inputs["input_ids"].shape[1] + new["max_new_tokens"]
    return found if rank == 0 else {"losses": found["losses"]}


def local_inputs(gate: str | None, case: Case, model: Any, group: Any) -> Inputs:
    inputs = inputs_of(gate, case, model)
    return local_frames(inputs, group) if sum(case.frames) else inputs


FEATURES = Case(frames=(2,), features=True)
NO_FEATURES = Case(frames=(0,), length=13, arguments={"image_embeds": torch.zeros(0, 4, 64)})


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_one_group_has_text_only_when_another_has_video(gate: str | None, kind: str) -> None:
    """FSDP gathers a module's weights when it runs: a group that skipped the tower would hang the others."""
    cases = [[TEXT, VIDEO, TEXT], [OTHER_VIDEO, TEXT, VIDEO]]
    if kind == "features":
        cases = [[NO_FEATURES, FEATURES], [FEATURES, NO_FEATURES]]
    outcomes = ranks(4).run(two_groups, gate, cases, timeout=PATIENCE)
    assert outcomes[0]["losses"] == outcomes[1]["losses"] and outcomes[2]["losses"] == outcomes[3]["losses"]

    model = tiny_model(gate).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for pair in zip(*cases, strict=True):
        optimizer.zero_grad(set_to_none=True)
        both = [model(**inputs_of(gate, case, model)).loss for case in pair]
        (sum(both) / 2).backward()
        losses.append([loss.item() for loss in both])
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        optimizer.step()
    for step, pair in enumerate(losses):
        for group, loss in enumerate(pair):
            assert outcomes[2 * group]["losses"][step] == pytest.approx(loss, rel=TOLERANCE)
    value, name = worst_gradient(outcomes[0]["grads"], grads)
    assert value < 10 * TOLERANCE, (value, name)


def ddp_rank(rank: int, world: int, gate: str | None) -> dict[str, Any]:
    model = tiny_model(gate).train()
    freeze_unused(model)
    wrapped = DistributedDataParallel(model)
    patch_model(wrapped)
    found = train(wrapped, [inputs_of(gate, case, model) for case in (VIDEO, OTHER_VIDEO)], sharded=False)
    for name in ("grads", "weights"):
        found[name] = {key.removeprefix("module."): x for key, x in found[name].items()}
    return found if rank == 0 else {"losses": found["losses"]}


def freeze_unused(model: nn.Module) -> None:
    """The tower's last layer and what follows it, which no model of this family uses: DDP wants a gradient for all."""
    last = len(model.vision_model.encoder.layers) - 1
    for name, weight in model.vision_model.named_parameters():
        if name.startswith((f"encoder.layers.{last}.", "post_layernorm", "head")):
            weight.requires_grad_(False)


@pytest.mark.parametrize("gate", GATES)
def test_ddp(gate: str | None) -> None:
    """Without `find_unused_parameters`: a rank without frames has gradients for the tower, too."""
    model = tiny_model(gate).train()
    freeze_unused(model)
    expected = train(model, [inputs_of(gate, case, model) for case in (VIDEO, OTHER_VIDEO)], sharded=False)
    compare_training(ranks(2).run(ddp_rank, gate, timeout=PATIENCE), expected)


def twenty_steps(rank: int, world: int, gate: str | None) -> dict[str, Any]:
    model = tiny_model(gate).train()
    shard(model)
    patch_model(model)
    return train(model, twenty_batches(gate, model), sharded=True)


def twenty_batches(gate: str | None, model: Any) -> list[Inputs]:
    return [inputs_of(gate, case, model) for case in (VIDEO, OTHER_VIDEO, TEXT, VIDEO) * 5]


def test_twenty_steps_on_one_process_and_on_four() -> None:
    model = tiny_model("per_head").train()
    expected = train(model, twenty_batches("per_head", model), sharded=False)
    found = ranks(4).run(twenty_steps, "per_head", timeout=PATIENCE)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["losses"][-1] < found["losses"][0] / 2
