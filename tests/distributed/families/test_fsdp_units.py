"""Layer: gloo ranks. FSDP2 units of any size, and what FSDP2 does with the state of a pass."""

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
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_module_children_bottom_up
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from family_cases import BATCHES, CROSS_ATTENTION, QWENS
from family_harness import TOLERANCE, family_module, inputs_of, model_of
from fsdp2_on_cpu import whole
from mllm_seqpar import patch_model
from mllm_seqpar.attention.keys import CallSpec
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention
from mllm_seqpar.runtime import visual_features
from mllm_seqpar.runtime.forward_state import ForwardState
from outcomes import worst_gradient
from ranks import ranks
from tiny_models.mplug_owl3 import Case as Owl
from tolerances import assert_as_near_as_unpatched

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@dataclass(frozen=True)
class Wrapping:
    """A model whose modules that match `units` are FSDP2 units, or accelerate's SIZE_BASED_WRAP if that is empty.

    Attributes:
        units: a pattern of the end of names, such as those of the K and V projections.
        groups: the batches of the sequence-parallel groups.
        whole: whether the model itself is a unit too.
        checkpointing: whether layers are recomputed in backward.
        lora: whether the model has LoRA adapters, which are all that is trained.
        options: options of `patch_model`.
        steps: the number of steps, of which the second finds what the first one left behind.
    """

    family: str
    units: str
    groups: tuple[Any, ...] = ()
    whole: bool = True
    checkpointing: bool = False
    lora: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1

    @property
    def cases(self) -> tuple[Any, ...]:
        return self.groups or (BATCHES[self.family],)

    def model(self) -> Any:
        model = model_of(self.family, self.cases[0]).train()
        if self.lora:
            torch.manual_seed(0)
            targets = family_module(self.family).LORA_TARGETS
            get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def shard(self, model: Any, **options: Any) -> list[str]:
        """Apply FSDP2, and return the names of the units."""
        names = {module: name for name, module in model.named_modules()}
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=3000)
        large = fsdp2_prepare_auto_wrap_policy(SimpleNamespace(auto_wrap_policy=policy, min_num_params=3000), model)
        units = []
        for module in dict.fromkeys(get_module_children_bottom_up(model)[:-1]):
            wanted = re.search(f"({self.units})$", names[module]) if self.units else large(module)
            if wanted and not isinstance(module, nn.ModuleList):
                units.append(module)
        for unit in units:
            fully_shard(unit, **options)
        if self.whole:
            fully_shard(model, **options)
        assert units
        return [names[unit] for unit in units]


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients as FSDP2 reduced them; those that nothing reduces are averaged here."""
    for p in model.parameters():
        if p.grad is not None and not isinstance(p.grad, DTensor):
            torch.distributed.all_reduce(p.grad)
            p.grad /= torch.distributed.get_world_size()
    return whole({name: p.grad for name, p in model.named_parameters()})


def step(rank: int, world: int, wrapping: Wrapping, chunk_bytes: int = 1) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss of this rank's group, and the gradients of the mean loss."""
    mesh = init_device_mesh("cpu", (len(wrapping.cases), world // len(wrapping.cases)), mesh_dim_names=("dp", "sp"))
    model = wrapping.model()
    inputs = inputs_of(wrapping.family, wrapping.cases[mesh["dp"].get_local_rank()], model)
    patch_model(model, group=mesh["sp"], **wrapping.options)
    wrapping.shard(model)
    # One frame to a chunk, so that the ranks have different numbers of chunks.
    with mock.patch.object(visual_features, "CHUNK_BYTES", chunk_bytes):
        for _ in range(wrapping.steps):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
    return loss.item(), grads_of(model)


OFFLOAD, CHUNKED = {"visual_offload": "cpu"}, {"vision_chunk_size": 1}
KV = {
    "mplug_owl3": r"v_kv_proj|input_layernorm",
    "mllama": r"cross_attn\.(k_proj|v_proj|k_norm)",
    "idefics": r"cross_attn\.(k_proj|v_proj|k_layer_norm)",
    "open_flamingo": r"\.to_kv",
}
PICTURES, WORDS = Owl(frames=(3, 2)), Owl(frames=(0, 0), length=11)
WRAPPINGS: dict[str, tuple[int, Wrapping]] = {
    "size-based": (2, Wrapping("mplug_owl3", "", steps=2)),
    "size-based, mllama, checkpointing": (3, Wrapping("mllama", "", checkpointing=True)),
    "size-based, idefics, offload": (2, Wrapping("idefics", "", options=OFFLOAD | CHUNKED)),
    "v_kv_proj and norm, offload, checkpointing": (
        *(3, Wrapping("mplug_owl3", KV["mplug_owl3"], checkpointing=True, options=OFFLOAD, steps=2)),
    ),
    "v_kv_proj, two groups, one without frames": (
        4,
        Wrapping("mplug_owl3", KV["mplug_owl3"], (PICTURES, WORDS), checkpointing=True),
    ),
    "every linear, ulysses": (2, Wrapping("mplug_owl3", r"_proj|fc\d", options={"strategy": "ulysses"})),
    "hyper attention alone, without the rest": (2, Wrapping("mplug_owl3", "self_attn", whole=False)),
    "k_proj of LoRA and what is in it": (
        *(2, Wrapping("mplug_owl3", r"v_kv_proj(|\.lora_A\.default|\.base_layer)", lora=True, steps=2)),
    ),
    "mllama, replicate": (2, Wrapping("mllama", KV["mllama"], options={"strategy": "replicate"})),
    "mllama, K and V saved": (2, Wrapping("mllama", KV["mllama"], options={"recompute_visual": False}, steps=2)),
    "idefics, mesh": (2, Wrapping("idefics", KV["idefics"], options={"strategy": "mesh"})),
    # A pass calls modules within these, and not these themselves.
    "mllama, the language model, tower and embeddings": (
        *(2, Wrapping("mllama", r"\.language_model|\.vision_model|embed_tokens", checkpointing=True)),
    ),
    "idefics, the inner model": (2, Wrapping("idefics", r"^model", whole=False, checkpointing=True)),
    "mplug_owl3, language model and tower": (2, Wrapping("mplug_owl3", r"^language_model|^vision_model")),
}
_QWEN = QWENS["qwen2_5_vl"]
WRAPPINGS |= {
    "size-based, qwen2_5_vl, two groups, one without frames": (
        2,
        Wrapping(
            "qwen2_5_vl", "", (_QWEN, replace(_QWEN, frames=((), ()), length=9)), checkpointing=True, options=CHUNKED
        ),
    ),
    "qwen3_vl, the inner model": (2, Wrapping("qwen3_vl", r"^model", whole=False, checkpointing=True)),
    "qwen3_vl, every linear, LoRA": (3, Wrapping("qwen3_vl", r"_proj|qkv|lora_[AB]\.default", lora=True)),
}
if "open_flamingo" in BATCHES:
    _OFFLOADED = Wrapping("open_flamingo", KV["open_flamingo"], options=OFFLOAD, steps=2)
    WRAPPINGS["open_flamingo, offload"] = (2, _OFFLOADED)
QUICK = ("size-based", "v_kv_proj and norm, offload, checkpointing")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WRAPPINGS])
def test_gradients_are_the_unpatched_models_for_any_units(name: str) -> None:
    size, wrapping = WRAPPINGS[name]
    family_module(wrapping.family)
    model, losses = wrapping.model(), []
    for case in wrapping.cases:
        run = getattr(family_module(wrapping.family), "unpatched_forward", lambda model, inputs: model(**inputs))
        losses.append(run(model, inputs_of(wrapping.family, case, model)).loss)
    torch.stack(losses).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for rank, (loss, grads) in enumerate(ranks(size).run(step, wrapping)):
        assert loss == pytest.approx(losses[rank // (size // len(losses))].item(), rel=TOLERANCE)
        value, worst = worst_gradient(grads, expected)
        assert value < 10 * TOLERANCE, (value, worst)


def narrow(rank: int, world: int, wrapping: Wrapping, patched: bool) -> dict[str, Tensor]:
    """Return the gradients in FSDP2's mixed precision."""
    model = wrapping.model()
    inputs = inputs_of(wrapping.family, wrapping.cases[0], model)
    if patched:
        patch_model(model, **wrapping.options)
    wrapping.shard(model, **BF16)
    model(**inputs).loss.backward()
    return {name: grad for name, grad in grads_of(model).items() if grad is not None}


@pytest.mark.rounding
@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapping",
    [
        Wrapping("mllama", KV["mllama"], checkpointing=True),
        Wrapping("mllama", KV["mllama"], checkpointing=True, options=OFFLOAD),
        Wrapping("mllama", KV["mllama"], checkpointing=True, options={"recompute_visual": False}),
        Wrapping("qwen3_vl", "", checkpointing=True),
    ],
    ids=["mllama", "offload", "saved", "qwen3_vl"],
)
def test_units_in_mixed_precision_are_as_near_to_float32_as_unpatched(wrapping: Wrapping) -> None:
    model = wrapping.model()
    model(**inputs_of(wrapping.family, wrapping.cases[0], model)).loss.backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found, unpatched = (ranks(2).run(narrow, wrapping, patched)[0] for patched in (True, False))
    assert_as_near_as_unpatched(found, unpatched, exact)


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
    for unit in (*family_module(family).shard_units(model), model):
        fully_shard(unit, **policy)
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


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "mplug_owl3" else pytest.mark.slow) for f in CROSS_ATTENTION]
)
def test_state_of_a_pass_does_not_go_through_the_layers_of_fsdp2(family: str) -> None:
    """Only hidden states do: no gradient of the features, and no copy of the state, which would plan anew."""
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
        model = model_of("mplug_owl3", PICTURES).train()
        inputs = inputs_of("mplug_owl3", PICTURES, model)
        patch_model(model)
        layers = {type(unit) for unit in family_module("mplug_owl3").shard_units(model)} if inner else set()
        options = {"use_orig_params": original, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(layers), **options)
        with pytest.raises(ConfigError, match=r"sharded by FSDP1.*fully_shard.*fsdp_version: 2"):
            wrapped(**inputs)
    model = FullyShardedDataParallel(model_of("mplug_owl3", PICTURES), device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match="sharded by FSDP1"):
        patch_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
def test_fsdp1_is_refused_on_all_ranks(inner: bool) -> None:
    ranks(2).run(fsdp1, inner)


def generate(rank: int, world: int) -> Tensor:
    case = replace(PICTURES, labels=None)
    model = model_of("mplug_owl3", case)
    patch_model(model)
    units = Wrapping("mplug_owl3", KV["mplug_owl3"]).shard(model)
    assert units and any(isinstance(module, FSDPModule) for module in model.modules())
    inputs = inputs_of("mplug_owl3", case, model)
    with mock.patch.object(visual_features, "CHUNK_BYTES", 1):
        return model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.slow
def test_generation_with_projections_as_units_equals_unpatched() -> None:
    case = replace(PICTURES, labels=None)
    model = model_of("mplug_owl3", case)
    inputs = inputs_of("mplug_owl3", case, model)
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    for found in ranks(3).run(generate):
        assert torch.equal(found, expected)
