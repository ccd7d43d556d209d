"""Layer: gloo ranks. Patched models under FSDP2 with units of any size, and under DDP, equal the unpatched ones."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_module_children_bottom_up
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from family_cases import BATCHES, CROSS_ATTENTION, FUSED, QWENS
from family_harness import TOLERANCE, family_module, inputs_of, model_of, reference, settings
from fsdp2_on_cpu import local, total_norm, whole
from mllm_seqpar import patch_model
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention
from mllm_seqpar.runtime import visual_features
from mllm_seqpar.runtime.forward_state import ForwardState
from outcomes import error, worst_gradient
from ranks import ranks
from selections import slow_unless
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import Case as Owl
from tolerances import assert_as_near_as_unpatched

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
LAYERS = "layers"
"""The units that users choose: each of the family's layers."""


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
        if any(isinstance(p, DTensor) for p in model.parameters()):
            for p in model.parameters():
                if p.grad is not None and not isinstance(p.grad, DTensor):  # which no unit reduces
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
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


@dataclass(frozen=True)
class Run:
    """Training of a model that is patched and sharded by FSDP2.

    Attributes:
        groups: the batches of each sequence-parallel group, one for each step.
        units: a pattern of the end of the names of FSDP2's units, such as those of the K and V projections; `LAYERS`;
            or "" for accelerate's SIZE_BASED_WRAP.
        whole: whether the model itself is a unit too.
        sharded_first: whether the model is sharded before it is patched.
        checkpointing: whether layers are recomputed in backward.
        lora: whether the model has LoRA adapters, which are all that is trained.
        local_frames: whether a rank passes its own frames only.
        options: options of `patch_model`.
    """

    family: str
    world: int
    groups: tuple[tuple[Any, ...], ...]
    units: str = LAYERS
    whole: bool = True
    sharded_first: bool = True
    checkpointing: bool = False
    lora: bool = False
    local_frames: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def new_model(self) -> Any:
        model = model_of(self.family, self.groups[0][0]).train()
        if self.lora:
            torch.manual_seed(0)
            targets = family_module(self.family).LORA_TARGETS
            get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def shard(self, model: Any, **options: Any) -> None:
        """Apply FSDP2."""
        names = {module: name for name, module in model.named_modules()}
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=3000)
        large = fsdp2_prepare_auto_wrap_policy(SimpleNamespace(auto_wrap_policy=policy, min_num_params=3000), model)
        units = family_module(self.family).shard_units(model) if self.units == LAYERS else []
        for module in dict.fromkeys(get_module_children_bottom_up(model)[:-1]) if self.units != LAYERS else ():
            wanted = re.search(f"({self.units})$", names[module]) if self.units else large(module)
            if wanted and not isinstance(module, nn.ModuleList):
                units.append(module)
        assert units
        for unit in [*units, *([model] if self.whole else [])]:
            fully_shard(unit, **options)

    def tokens(self, model: Any, number: int) -> Any:
        """Return what a group generates; with two groups, one continues when the other has finished."""
        inputs = inputs_of(self.family, replace(self.groups[number][0], labels=None), model)
        return model.eval().generate(**inputs, **settings(max_new_tokens=3 + 2 * number))


def fsdp_rank(rank: int, world: int, run: Run) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (len(run.groups), world // len(run.groups)), mesh_dim_names=("dp", "sp"))
    model, group, number = run.new_model(), mesh["sp"], mesh["dp"].get_local_rank()
    if not run.sharded_first:
        patch_model(model, group=group, **run.options)
    if run.options.get("logits") == "none":  # the head is a unit of its own
        fully_shard(model.lm_head, mesh=mesh["dp", "sp"]._flatten("all"))
    run.shard(model, mesh=mesh["dp", "sp"]._flatten("all"))
    if run.sharded_first:
        patch_model(model, group=group, **run.options)
    batches = []
    for case in run.groups[number]:
        inputs = inputs_of(run.family, case, model)
        of_rank = run.local_frames and any(case.frames)
        batches.append([family_module(run.family).local_frames(inputs, group) if of_rank else inputs])
    # One frame to a chunk, so that the ranks have different numbers of chunks.
    size = visual_features.CHUNK_BYTES if run.units == LAYERS else 1
    with mock.patch.object(visual_features, "CHUNK_BYTES", size):
        found = train(model, batches)
        if run.family == "mplug_owl3" and run.units in (LAYERS, KV["mplug_owl3"]):
            found["tokens"] = run.tokens(model, number)
    return found if rank == 0 else {name: found[name] for name in ("losses", "tokens") if name in found}


OFFLOAD, CHUNKED = {"visual_offload": "cpu"}, {"vision_chunk_size": 1}
KV = {
    "mplug_owl3": r"v_kv_proj|input_layernorm",
    "mllama": r"cross_attn\.(k_proj|v_proj|k_norm)",
    "moss_vl": r"cross_attn\.(k_proj|v_proj|k_norm)",
    "idefics": r"cross_attn\.(k_proj|v_proj|k_layer_norm)",
    "open_flamingo": r"\.to_kv",
}
VIDEO, ONE_FRAME, TEXT = Owl(frames=(3, 2)), Owl(frames=(1,)), Owl(frames=(0, 0), length=11)
FUSED_VIDEO = VIDEO.with_model(**FUSED)
FEATURES = Owl(frames=(2,), features="projected")
NO_FEATURES = Owl(frames=(0,), arguments={"image_embeds": torch.zeros(0, 4, 64)})
IMAGES, ONE_IMAGE, WORDS = BATCHES["mllama"], Mllama(frames=((2,),), length=9), Mllama(frames=((), ()))
MOSS, ONE_CLIP, MOSS_WORDS = BATCHES["moss_vl"], Moss(frames=(((2, 4, 2),),), length=9), Moss(frames=((), ()))
IDEFICS, ONE_PICTURE = BATCHES["idefics"], Idefics(frames=(1,), length=9)
QWEN, QWEN2 = QWENS["qwen3_vl"], QWENS["qwen2_5_vl"]
QWEN_WORDS, PICTURE = replace(QWEN, frames=((), ()), length=9), replace(QWEN, frames=(((4, 4),),), length=11)
FEW, FEW_WORDS = replace(QWEN, labels="few"), replace(QWEN_WORDS, labels="few")  # some ranks have no target
CHUNKS = {"mlp_chunk_size": 5, "vision_chunk_size": 1}
SAVED = {"recompute_visual": False}
ULYSSES = {"strategy": "ulysses", "self_attention": "ulysses"}
THREE, TWICE = (VIDEO, TEXT, ONE_FRAME), (VIDEO, VIDEO)

# FSDP gathers a module's weights when it runs: a group that skipped the tower or a layer would hang the others.
RUNS: dict[str, Run] = {
    "gated": Run("mplug_owl3", 2, (THREE,), sharded_first=False),
    "fused, checkpointing, ulysses": Run(
        *("mplug_owl3", 2, ((FUSED_VIDEO, TEXT, ONE_FRAME),)), checkpointing=True, options=ULYSSES
    ),
    "gated, checkpointing, auto and mesh": Run(
        *("mplug_owl3", 4, (THREE,)),
        **{"checkpointing": True, "sharded_first": False},
        options={"strategy": "auto", "self_attention": "mesh", "tile": (2, 2), "vision_chunk_size": 1},
    ),
    "two groups, one with text only, each calibrates in its first pass": Run(
        *("mplug_owl3", 4, ((FUSED_VIDEO, TEXT, VIDEO), (TEXT, ONE_FRAME, TEXT))),
        **{"checkpointing": True, "local_frames": True},
        options={"strategy": "auto", "self_attention": "auto", "vision_chunk_size": 1},
    ),
    "two groups, one without features": Run("mplug_owl3", 2, ((NO_FEATURES, FEATURES), (FEATURES, NO_FEATURES))),
    "two groups, one with text only beside features": Run(
        *("mplug_owl3", 2, ((TEXT, FEATURES), (FEATURES, Owl(frames=(0,)))))
    ),
    "two groups of mllama, one with text only, then one without chunks": Run(
        *("mllama", 4, ((IMAGES, WORDS, Mllama(frames=((2,),), length=5)), (WORDS, ONE_IMAGE, IMAGES))),
        **{"checkpointing": True, "options": CHUNKS},
    ),
    "two groups of moss_vl, one with text only": Run(
        *("moss_vl", 4, ((MOSS, MOSS_WORDS, ONE_CLIP), (MOSS_WORDS, ONE_CLIP, MOSS))),
        **{"checkpointing": True, "local_frames": True, "options": CHUNKS},
    ),
    "size-based, moss_vl": Run("moss_vl", 3, ((MOSS, MOSS),), ""),
    "moss_vl, K and V alone, offload": Run("moss_vl", 2, ((MOSS,),), KV["moss_vl"], options=OFFLOAD),
    "moss_vl, every linear, LoRA": Run("moss_vl", 2, ((MOSS,),), r"_proj|qkv|lora_[AB]\.default", lora=True),
    "two groups of idefics": Run("idefics", 2, ((IDEFICS, ONE_PICTURE), (ONE_PICTURE, IDEFICS)), checkpointing=True),
    "two groups of qwen3_vl, one with text only": Run(
        *("qwen3_vl", 4, ((QWEN, QWEN_WORDS), (QWEN_WORDS, PICTURE))),
        **{"checkpointing": True, "local_frames": True, "options": CHUNKS},
    ),
    "no logits": Run("qwen3_vl", 4, ((FEW, FEW_WORDS), (QWEN_WORDS, FEW)), options={"logits": "none"}),
    "no logits, patched first, checkpointing": Run(
        *("qwen3_vl", 2, ((FEW, FEW_WORDS), (QWEN_WORDS, FEW))),
        **{"sharded_first": False, "checkpointing": True, "options": {"logits": "none"}},
    ),
    # Units of other sizes. With two steps, the second finds what the first one left behind.
    "size-based": Run("mplug_owl3", 2, (TWICE,), ""),
    "size-based, mllama, checkpointing": Run("mllama", 3, ((IMAGES,),), "", checkpointing=True),
    "size-based, idefics, offload": Run("idefics", 2, ((IDEFICS,),), "", options=OFFLOAD | CHUNKED),
    "v_kv_proj and norm, offload, checkpointing": Run(
        *("mplug_owl3", 3, (TWICE,), KV["mplug_owl3"]), checkpointing=True, options=OFFLOAD
    ),
    "v_kv_proj, two groups, one without frames": Run(
        *("mplug_owl3", 4, ((VIDEO,), (TEXT,)), KV["mplug_owl3"]), checkpointing=True
    ),
    "every linear, ulysses": Run(
        *("mplug_owl3", 2, ((VIDEO,),), r"_proj|fc\d"), sharded_first=False, options={"strategy": "ulysses"}
    ),
    "hyper attention alone, without the rest": Run("mplug_owl3", 2, ((VIDEO,),), "self_attn", whole=False),
    "k_proj of LoRA and what is in it": Run(
        *("mplug_owl3", 2, (TWICE,), r"v_kv_proj(|\.lora_A\.default|\.base_layer)"), lora=True
    ),
    "mllama, replicate, K and V saved": Run(
        *("mllama", 2, ((IMAGES, IMAGES),), KV["mllama"]), options=SAVED | {"strategy": "replicate"}
    ),
    "idefics, mesh": Run("idefics", 2, ((IDEFICS,),), KV["idefics"], options={"strategy": "mesh"}),
    # A pass calls modules within these, and not these themselves.
    "mllama, the language model, tower and embeddings": Run(
        *("mllama", 2, ((IMAGES,),), r"\.language_model|\.vision_model|embed_tokens"), checkpointing=True
    ),
    "idefics, the inner model": Run("idefics", 2, ((IDEFICS, IDEFICS),), "^model", whole=False, checkpointing=True),
    "mplug_owl3, language model and tower": Run("mplug_owl3", 2, ((VIDEO,),), "^language_model|^vision_model"),
    "size-based, qwen2_5_vl, two groups, one without frames": Run(
        *("qwen2_5_vl", 2, ((QWEN2,), (replace(QWEN2, frames=((), ()), length=9),)), ""),
        **{"checkpointing": True, "options": CHUNKED},
    ),
    "qwen3_vl, the inner model": Run("qwen3_vl", 2, ((QWEN, QWEN),), "^model", whole=False, checkpointing=True),
    "qwen3_vl, every linear, LoRA": Run("qwen3_vl", 3, ((QWEN,),), r"_proj|qkv|lora_[AB]\.default", lora=True),
}
if "open_flamingo" in BATCHES:
    MEDIA = BATCHES["open_flamingo"]
    ONE_MEDIUM = type(MEDIA)(frames=((2, 6),), media=1)
    RUNS["two groups of open_flamingo"] = Run("open_flamingo", 4, ((MEDIA, ONE_MEDIUM), (ONE_MEDIUM, MEDIA)))
    RUNS["open_flamingo, offload"] = Run(*("open_flamingo", 2, ((MEDIA, MEDIA),), KV["open_flamingo"]), options=OFFLOAD)
QUICK = ("size-based", "v_kv_proj and norm, offload, checkpointing")


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, RUNS))
def test_training_equals_unpatched(name: str) -> None:
    """Compare each group's losses and tokens, and the last gradients and weights, with one unpatched process."""
    run = RUNS[name]
    family_module(run.family)
    outcomes, model = ranks(run.world).run(fsdp_rank, run), run.new_model()
    steps = zip(*run.groups, strict=True)
    expected = train(model, [[inputs_of(run.family, case, model) for case in cases] for cases in steps])
    for rank, found in enumerate(outcomes):
        number = rank // (run.world // len(run.groups))
        losses = [step[number] for step in expected["losses"]]
        assert [loss for (loss,) in found["losses"]] == pytest.approx(losses, rel=TOLERANCE), rank
        assert "tokens" not in found or torch.equal(found["tokens"], run.tokens(model, number))
    value, worst = worst_gradient(outcomes[0]["grads"], expected["grads"])
    assert value < 10 * TOLERANCE, (value, worst)  # the weights differ in their last bits after an update
    for name, weight in expected["weights"].items():
        assert error(outcomes[0]["weights"][name], weight) < TOLERANCE, name


MLLAMA_IN_BF16 = Run("mllama", 2, ((IMAGES,),), KV["mllama"], checkpointing=True)
IN_BF16 = {
    "mllama": MLLAMA_IN_BF16,
    "offload": replace(MLLAMA_IN_BF16, options=OFFLOAD),
    "saved": replace(MLLAMA_IN_BF16, options=SAVED),
    "moss_vl": Run("moss_vl", 2, ((MOSS,),), KV["moss_vl"], checkpointing=True),
    "qwen3_vl": Run("qwen3_vl", 2, ((QWEN,),), "", checkpointing=True),
    "gated": Run("mplug_owl3", 2, ((VIDEO,),)),
    "fused": Run("mplug_owl3", 2, ((FUSED_VIDEO,),)),
}


def narrow(rank: int, world: int, run: Run, patched: bool) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients in FSDP2's mixed precision."""
    model = run.new_model()
    inputs = inputs_of(run.family, run.groups[0][0], model)
    if patched and not run.sharded_first:
        patch_model(model, **run.options)
    run.shard(model, **BF16)
    if patched and run.sharded_first:
        patch_model(model, **run.options)
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.rounding
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_mixed_precision_is_as_near_to_float32_as_unpatched(name: str) -> None:
    run = IN_BF16[name]
    exact = reference(run.family, run.groups[0][0])
    (loss, found), (other, _) = ranks(2).run(narrow, run, True)
    _, unpatched = ranks(2).run(narrow, run, False)[0]
    assert loss == other and abs(loss - exact.loss) < 0.02 * exact.loss
    known = {name: grad for name, grad in exact.grads.items() if grad is not None}
    assert_as_near_as_unpatched(found, unpatched, known)


@contextmanager
def calls(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a method."""
    unchanged, found = getattr(owner, name), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return unchanged(*args, **kwargs)

    static = isinstance(owner.__dict__[name], staticmethod)
    with mock.patch.object(owner, name, staticmethod(recorded) if static else recorded):
        yield found


def what_fsdp2_does(rank: int, world: int, family: str, mixed: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a step with each layer as a unit; return the shapes of gradients through FSDP2's layers, and counts."""
    case = replace(BATCHES[family], features=None)
    model = model_of(family, case).train()
    inputs = inputs_of(family, case, model)
    patch_model(model, **options)
    policy = BF16 if mixed else {}
    Run(family, world, ((case,),)).shard(model, **policy)
    counts: dict[str, int] = collections.Counter()
    with (
        calls(RegisterPostBackwardFunction, "backward") as gradients,
        calls(ForwardState, "_frame_spec") as visual,
        calls(ForwardState, "_text_spec") as text,
        calls(CallSpec, "_filled_in") as plans,
        calls(HyperAttention, "rotate_visual") as rotations,
    ):
        loss = model(**inputs).loss
        counts |= {"visual specs": len(visual), "text specs": len(text), "plans": len(plans)}
        loss.backward()
    counts["plans in backward"] = len(plans) - counts["plans"]
    widths = [tuple(x.shape) for _, *grads in gradients for x in grads]
    zeros = sum(1 for _, *grads in gradients for x in grads if not x.any())
    dtypes = {args[2].dtype for args in rotations}
    return {
        "counts": counts,
        "shapes": widths,
        "zeros": zeros,
        "units with several": [len(grads) - 1 for grads in gradients if len(grads) > 2],
        "rotations": dtypes,
    }


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mplug_owl3", CROSS_ATTENTION))
def test_state_of_a_pass_does_not_go_through_the_layers_of_fsdp2(family: str) -> None:
    """Only hidden states do: no gradient of the features, and no copy of the state, which would plan again."""
    family_module(family)
    settings = ((False, {}), (True, {}), (True, OFFLOAD))
    plain, mixed, offloaded = (ranks(2).run(what_fsdp2_does, family, *setting)[0] for setting in settings)
    for found in (plain, mixed, offloaded):
        assert found["shapes"] and not found["zeros"] and not found["units with several"], found
        assert found["counts"] == plain["counts"] or found is offloaded
        assert found["counts"]["visual specs"] == 1 and found["counts"]["text specs"] <= 1
    assert mixed["rotations"] == ({torch.float32} if family == "mplug_owl3" else set())


def fsdp1(rank: int, world: int, inner: bool) -> None:
    for original in (True, False):
        model = model_of("mplug_owl3", VIDEO).train()
        inputs = inputs_of("mplug_owl3", VIDEO, model)
        patch_model(model)
        layers = {type(unit) for unit in family_module("mplug_owl3").shard_units(model)} if inner else set()
        options = {"use_orig_params": original, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(layers), **options)
        with pytest.raises(ConfigError, match=r"sharded by FSDP1.*fully_shard.*fsdp_version: 2"):
            wrapped(**inputs)
    model = FullyShardedDataParallel(model_of("mplug_owl3", VIDEO), device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match="sharded by FSDP1"):
        patch_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
def test_fsdp1_is_refused_on_all_ranks(inner: bool) -> None:
    ranks(2).run(fsdp1, inner)


def ddp_model(family: str) -> Any:
    """Return a model whose unused parameters, the tower's last layer and head, are frozen: DDP needs all gradients."""
    model = model_of(family, DDP_STEPS[family][0]).train()
    if family == "mplug_owl3":
        last = len(model.vision_model.encoder.layers) - 1
        for name, weight in model.vision_model.named_parameters():
            if name.startswith((f"encoder.layers.{last}.", "post_layernorm", "head")):
                weight.requires_grad_(False)
    return model


DDP_STEPS = {"mplug_owl3": (VIDEO, ONE_FRAME)}
DDP_STEPS |= {f: (x, replace(x, frames=(((1, 4, 4), (2, 2)),), length=16, labels="few")) for f, x in QWENS.items()}


def ddp_rank(rank: int, world: int, family: str, options: dict[str, Any]) -> dict[str, Any]:
    model = ddp_model(family)
    steps = [[inputs_of(family, case, model)] for case in DDP_STEPS[family]]
    found = train(patch_model(DistributedDataParallel(model), **options), steps)
    return found | {"grads": {name.removeprefix("module."): x for name, x in found["grads"].items()}}


def check_trajectory(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert torch.tensor(found["losses"]).allclose(torch.tensor(expected["losses"]), rtol=tolerance, atol=0)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mplug_owl3", DDP_STEPS))
def test_ddp_without_find_unused_parameters_equals_unpatched(family: str) -> None:
    """A rank without frames has gradients for the tower too, and one without targets for the head."""
    model = ddp_model(family)
    expected = train(model, [[inputs_of(family, case, model)] for case in DDP_STEPS[family]])
    size, options = (3, {"logits": "none"}) if family in QWENS else (2, {})
    for found in ranks(size).run(ddp_rank, family, options):
        check_trajectory(found, expected, TOLERANCE)
        assert worst_gradient(found["grads"], expected["grads"])[0] < 10 * TOLERANCE


EIGHT = Run("mplug_owl3", 2, ((VIDEO, ONE_FRAME, TEXT, VIDEO) * 2,))


@pytest.mark.slow
def test_eight_steps_follow_the_unpatched_trajectory() -> None:
    model = EIGHT.new_model()
    expected = train(model, [[inputs_of("mplug_owl3", case, model)] for case in EIGHT.groups[0]])
    found = ranks(2).run(fsdp_rank, EIGHT)[0]
    check_trajectory(found, expected, 1e-4)
    assert found["losses"][-1][0] < found["losses"][0][0] / 2


def units_within_mlps(rank: int, world: int) -> None:
    for unit in ("down_proj", "mlp"):
        model = model_of("mllama", IMAGES).train()
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
