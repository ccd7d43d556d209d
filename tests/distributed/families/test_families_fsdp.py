"""Layer: gloo ranks. Patched models under FSDP2 and DDP train and generate as the unpatched ones in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from family_cases import BATCHES, FUSED, QWENS
from family_harness import TOLERANCE, family_module, inputs_of, model_of, reference, settings
from fsdp2_on_cpu import local, total_norm, whole
from mllm_seqpar import patch_model
from mllm_seqpar.errors import AgreementError, ConfigError
from outcomes import error, worst_gradient
from ranks import ranks
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.mllama import tiny_model as tiny_mllama
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.mplug_owl3 import tiny_model
from tolerances import assert_as_near_as_unpatched

VIDEO, ONE_FRAME, TEXT = Owl(frames=(3, 2)), Owl(frames=(1,)), Owl(frames=(0, 0), length=11)
ONE_TEXT = Owl(frames=(0,))
FEATURES = Owl(frames=(2,), features="projected")
NO_FEATURES = Owl(frames=(0,), arguments={"image_embeds": torch.zeros(0, 4, 64)})
IMAGES, ONE_IMAGE, WORDS = BATCHES["mllama"], Mllama(frames=((2,),), length=9), Mllama(frames=((), ()))
SHORT, ONE_PICTURE = Mllama(frames=((2,),), length=5), Idefics(frames=(1,), length=9)
CHUNKS = {"mlp_chunk_size": 5, "vision_chunk_size": 1}


def shard(model: Any, family: str, mesh: Any = None, **options: Any) -> None:
    """Apply FSDP2 as a user does: one unit for each of the family's layers, and one for the rest."""
    for unit in family_module(family).shard_units(model):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    # Epsilon is far above rounding, which otherwise becomes whole steps where a gradient is zero.
    # Shards without their DTensors, which take a fifth of a run's time in the optimizer.
    return torch.optim.AdamW([local(p) for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def train(model: Any, steps: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Train on the mean loss of the batches of each step.

    Returns:
        the losses of each step, its gradient norm, and the last step's gradients and weights.
    """
    optimizer, found = adamw(model), {"losses": [], "norms": []}
    for batches in steps:
        model.zero_grad(set_to_none=True)
        losses = torch.stack([model(**inputs).loss for inputs in batches])
        losses.mean().backward()
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        found["losses"].append(losses.tolist())
        found["norms"].append(total_norm(grads.values()))
        trained = [p for p in model.parameters() if p.requires_grad]
        for shard_of, weight in zip(optimizer.param_groups[0]["params"], trained, strict=True):
            shard_of.grad = None if weight.grad is None else local(weight.grad)
        optimizer.step()
    weights = dict(model.named_parameters())
    if any(isinstance(x, DTensor) for x in weights.values()):
        grads, weights = whole(grads), whole(weights)
    return found | {"grads": grads, "weights": weights}


def owl_steps(model: Any, *cases: Owl) -> list[list[dict[str, Any]]]:
    return [[inputs_of("mplug_owl3", case, model)] for case in cases]


@dataclass(frozen=True)
class Run:
    """A training run: `groups` has the batches of each data-parallel group, one for each step."""

    family: str
    world: int
    groups: list[list[Any]]
    checkpointing: bool = False
    sharded_first: bool = True
    local_frames: bool = False
    head_unit: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def new_model(self) -> Any:
        return model_of(self.family, self.groups[0][0].with_model(**self.model)).train()

    def tokens(self, model: Any, number: int) -> Any:
        """Return what a group generates; with two groups, one continues when the other has finished."""
        inputs = inputs_of(self.family, replace(self.groups[number][0], labels=None), model)
        return model.eval().generate(**inputs, **settings(max_new_tokens=3 + 2 * number))


def fsdp_rank(rank: int, world: int, run: Run) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (len(run.groups), world // len(run.groups)), mesh_dim_names=("dp", "sp"))
    model, group = run.new_model(), mesh["sp"]
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not run.sharded_first:
        patch_model(model, group=group, **run.options)
    everyone = mesh["dp", "sp"]._flatten("all")
    if run.head_unit:
        fully_shard(model.lm_head, mesh=everyone)
    shard(model, run.family, everyone)
    if run.sharded_first:
        patch_model(model, group=group, **run.options)
    number = mesh["dp"].get_local_rank()
    batches = []
    for case in run.groups[number]:
        inputs = inputs_of(run.family, case, model)
        local = run.local_frames and any(case.frames)
        batches.append([family_module(run.family).local_frames(inputs, group) if local else inputs])
    found = train(model, batches)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    if run.family == "mplug_owl3":
        found["tokens"] = run.tokens(model, number)
    return found if rank == 0 else {name: found[name] for name in ("losses", "tokens") if name in found}


def check_fsdp(run: Run) -> None:
    """Compare each group's losses and tokens, and the last gradients and weights, with one unpatched process."""
    family_module(run.family)
    outcomes, model = ranks(run.world).run(fsdp_rank, run), run.new_model()
    steps = zip(*run.groups, strict=True)
    expected = train(model, [[inputs_of(run.family, case, model) for case in cases] for cases in steps])
    for rank, found in enumerate(outcomes):
        number = rank // (run.world // len(run.groups))
        losses = [step[number] for step in expected["losses"]]
        assert [loss for (loss,) in found["losses"]] == pytest.approx(losses, rel=TOLERANCE), rank
        assert "tokens" not in found or torch.equal(found["tokens"], run.tokens(model, number))
    value, name = worst_gradient(outcomes[0]["grads"], expected["grads"])
    assert value < 10 * TOLERANCE, (value, name)  # the weights differ in their last bits after an update
    for name, weight in expected["weights"].items():
        assert error(outcomes[0]["weights"][name], weight) < TOLERANCE, name


THREE = [[VIDEO, TEXT, ONE_FRAME]]
AUTO_AND_MESH = {"strategy": "auto", "self_attention": "mesh", "tile": (2, 2), "vision_chunk_size": 1}
ULYSSES = {"model": FUSED, "options": {"strategy": "ulysses", "self_attention": "ulysses"}}
AUTO = {"strategy": "auto", "self_attention": "auto", "vision_chunk_size": 1}
RUNS: dict[str, Run] = {
    "gated": Run("mplug_owl3", 2, THREE, sharded_first=False),
    "fused, checkpointing, ulysses": Run("mplug_owl3", 4, THREE, True, **ULYSSES),
    "gated, checkpointing, auto and mesh": Run("mplug_owl3", 4, THREE, True, False, options=AUTO_AND_MESH),
    # FSDP gathers a module's weights when it runs: a group that skipped the tower or a layer would hang the others.
    "two groups, one with text only, each calibrates in its first pass": Run(
        *("mplug_owl3", 4, [[VIDEO, TEXT, VIDEO], [TEXT, ONE_FRAME, TEXT]], True),
        **{"local_frames": True, "model": FUSED, "options": AUTO},
    ),
    "two groups, one without features": Run("mplug_owl3", 2, [[NO_FEATURES, FEATURES], [FEATURES, NO_FEATURES]]),
    "two groups, one with text only beside features": Run("mplug_owl3", 2, [[TEXT, FEATURES], [FEATURES, ONE_TEXT]]),
    "two groups of mllama, one with text only, then one without chunks": Run(
        "mllama", 4, [[IMAGES, WORDS, SHORT], [WORDS, ONE_IMAGE, IMAGES]], True, options=CHUNKS
    ),
    "two groups of idefics": Run(
        "idefics", 2, [[BATCHES["idefics"], ONE_PICTURE], [ONE_PICTURE, BATCHES["idefics"]]], True
    ),
}
_QWEN = QWENS["qwen3_vl"]
_QWEN_WORDS, _PICTURE = replace(_QWEN, frames=((), ()), length=9), replace(_QWEN, frames=(((4, 4),),), length=11)
RUNS["two groups of qwen3_vl, one with text only"] = Run(
    "qwen3_vl", 4, [[_QWEN, _QWEN_WORDS], [_QWEN_WORDS, _PICTURE]], True, local_frames=True, options=CHUNKS
)
_FEW, _FEW_WORDS = replace(_QWEN, labels="few"), replace(_QWEN_WORDS, labels="few")  # some ranks have no target
_NO_LOGITS = Run("qwen3_vl", 4, [[_FEW, _FEW_WORDS], [_QWEN_WORDS, _FEW]], head_unit=True, options={"logits": "none"})
RUNS |= {
    "no logits": _NO_LOGITS,
    "no logits, patched first, checkpointing": replace(_NO_LOGITS, world=2, sharded_first=False, checkpointing=True),
}
if "open_flamingo" in BATCHES:
    _MEDIA = BATCHES["open_flamingo"]
    _ONE_MEDIUM = type(_MEDIA)(frames=((2, 6),), media=1)
    RUNS["two groups of open_flamingo"] = Run("open_flamingo", 4, [[_MEDIA, _ONE_MEDIUM], [_ONE_MEDIUM, _MEDIA]])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_fsdp2_equals_unpatched(name: str) -> None:
    check_fsdp(RUNS[name])


def pixels_beside_features(rank: int, world: int) -> None:
    case = (ONE_FRAME, FEATURES)[rank]
    model = tiny_model().train()
    shard(model, "mplug_owl3")
    patch_model(model, group=dist.new_subgroups(1)[0])
    model(**inputs_of("mplug_owl3", case, model))


def test_pixels_beside_features_are_an_error_on_all_ranks() -> None:
    found = ranks(2).errors(pixels_beside_features)
    assert all(isinstance(x, AgreementError) and "pass pixels and others pass features" in str(x) for x in found), found


def freeze_unused(model: nn.Module) -> None:
    """Freeze the tower's last layer and head, which no model of this family uses: DDP needs a gradient for the rest."""
    last = len(model.vision_model.encoder.layers) - 1
    for name, weight in model.vision_model.named_parameters():
        if name.startswith((f"encoder.layers.{last}.", "post_layernorm", "head")):
            weight.requires_grad_(False)


def qwen_ddp_rank(rank: int, world: int, family: str) -> dict[str, Any]:
    model = model_of(family, QWENS[family]).train()
    steps = [[inputs_of(family, case, model)] for case in (QWENS[family], FEW_FRAMES[family])]
    found = train(patch_model(DistributedDataParallel(model), logits="none"), steps)
    return found | {"grads": {name.removeprefix("module."): x for name, x in found["grads"].items()}}


FEW_FRAMES = {
    family: replace(case, frames=(((1, 4, 4), (2, 2)),), length=16, labels="few") for family, case in QWENS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("family", QWENS)
def test_ddp_of_decoder_only_models_equals_unpatched(family: str) -> None:
    """A rank without frames has gradients for the tower too, and one without targets for the head."""
    model = model_of(family, QWENS[family]).train()
    steps = [[inputs_of(family, case, model)] for case in (QWENS[family], FEW_FRAMES[family])]
    expected = train(model, steps)
    for found in ranks(3).run(qwen_ddp_rank, family):
        check_trajectory(found, expected, TOLERANCE)
        assert worst_gradient(found["grads"], expected["grads"])[0] < 10 * TOLERANCE


def ddp_rank(rank: int, world: int, gate: str | None) -> dict[str, Any]:
    model = tiny_model(gate).train()
    freeze_unused(model)
    found = train(patch_model(DistributedDataParallel(model)), owl_steps(model, VIDEO, ONE_FRAME))
    return found | {"grads": {name.removeprefix("module."): x for name, x in found["grads"].items()}}


def check_trajectory(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert torch.tensor(found["losses"]).allclose(torch.tensor(expected["losses"]), rtol=tolerance, atol=0)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)


@pytest.mark.parametrize("gate", ["per_head", pytest.param(None, marks=pytest.mark.slow)])
def test_ddp_without_find_unused_parameters_equals_unpatched(gate: str | None) -> None:
    """A rank without frames has gradients for the tower too."""
    model = tiny_model(gate).train()
    freeze_unused(model)
    expected = train(model, owl_steps(model, VIDEO, ONE_FRAME))
    for found in ranks(2).run(ddp_rank, gate):
        check_trajectory(found, expected, TOLERANCE)
        assert worst_gradient(found["grads"], expected["grads"])[0] < 10 * TOLERANCE


STEPS = (VIDEO, ONE_FRAME, TEXT, VIDEO) * 2


def eight_steps(rank: int, world: int) -> dict[str, Any]:
    model = tiny_model().train()
    shard(model, "mplug_owl3")
    patch_model(model)
    return train(model, owl_steps(model, *STEPS))


@pytest.mark.slow
def test_eight_steps_follow_the_unpatched_trajectory() -> None:
    model = tiny_model().train()
    found = ranks(2).run(eight_steps)[0]
    check_trajectory(found, train(model, owl_steps(model, *STEPS)), 1e-4)
    assert found["losses"][-1][0] < found["losses"][0][0] / 2


def narrow(rank: int, world: int, gate: str | None, patched: bool = True) -> tuple[float, dict[str, Any]]:
    """Return the loss and gradients in bfloat16: by FSDP2's policy if patched, otherwise by bfloat16 weights."""
    model = tiny_model(gate).train()
    inputs = inputs_of("mplug_owl3", VIDEO, model)
    if patched:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, "mplug_owl3", mp_policy=policy)
        patch_model(model)
    else:
        model, inputs = model.bfloat16(), inputs | {"pixel_values": inputs["pixel_values"].bfloat16()}
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), whole(grads) if patched else grads


@pytest.mark.rounding
@pytest.mark.slow
@pytest.mark.parametrize("gate", ["per_head", None])
def test_bf16_policy_is_as_near_to_float32_as_unpatched(gate: str | None) -> None:
    exact = reference("mplug_owl3", VIDEO.with_model(gate=gate))
    found = ranks(2).run(narrow, gate)
    assert found[0][0] == found[1][0] and abs(found[0][0] - exact.loss) < 0.02 * exact.loss
    expected = {name: grad for name, grad in exact.grads.items() if grad is not None}
    assert_as_near_as_unpatched(found[0][1], narrow(0, 1, gate, patched=False)[1], expected)


def units_within_mlps(rank: int, world: int) -> None:
    for unit in ("down_proj", "mlp"):
        model = tiny_mllama().train()
        for path, module in model.model.language_model.named_modules():
            if path.endswith(unit):
                fully_shard(module)
        fully_shard(model)
        patch_model(model, **CHUNKS)
        inputs = inputs_of("mllama", IMAGES, model)
        if unit == "down_proj":
            message = "(?s)down_proj within (FSDP)?MllamaTextMLP.*call fully_shard on the decoder layer"
            with pytest.raises(ConfigError, match=message):
                model(**inputs)
        else:
            model(**inputs).loss.backward()


@pytest.mark.slow
def test_fsdp_units_within_a_chunked_mlp_are_refused() -> None:
    """They would be gathered for each chunk, and the ranks of two groups may have different numbers of chunks."""
    ranks(2).run(units_within_mlps)
