"""Layer: one process, and gloo ranks for groups. Patching one instance changes nothing else, and can be undone."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patched import GATES, PATIENCE, Case, inputs_of, model_of, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mllm_seqpar import SeqParConfig, patch_model, register_adapter, unpatch_model
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patching import patch_of
from mllm_seqpar.patching import registry as adapters
from outcomes import error
from ranks import ranks
from tiny import tiny_config, tiny_frames, tiny_model, tiny_text


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything that patching could leave behind: every attribute of every module and config, by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = (id(value), dict(value) if isinstance(value, dict) else None)
        config = getattr(module, "config", None)
        if config is not None:
            found[f"{path}.config"] = (id(config), repr(sorted(vars(config).items(), key=str)))
        found[f"{path} is"] = (type(module), list(vars(module)))
    return found


@pytest.mark.parametrize("gate", GATES)
def test_unpatching_leaves_no_trace(gate: str | None) -> None:
    model = tiny_model(gate)
    ids, frames = tiny_text(3, 1), tiny_frames(4)
    logits, before = model(ids, frames).logits, traces(model)
    registered = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert patch_model(model, "ring", text_layout="striped") is model
    assert patch_of(model) is not None
    model(ids, frames, labels=ids).loss.backward()
    model.generate(ids, pixel_values=frames, max_new_tokens=2, pad_token_id=0)
    model.zero_grad()
    assert unpatch_model(model) is model
    assert patch_of(model) is None
    assert traces(model) == before
    assert torch.equal(model(ids, frames).logits, logits)
    now = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert {name: now[name] for name in registered} == registered  # sdpa among them
    assert set(now) - {"mllm_seqpar"} == set(registered) - {"mllm_seqpar"}
    assert "mllm_seqpar" in AttentionMaskInterface().valid_keys()  # else transformers passes no mask at all


def test_another_model_of_the_same_config_is_not_touched() -> None:
    config = tiny_config("per_head")
    torch.manual_seed(1)
    patched, other = (MPlugOwl3ForConditionalGeneration(config).eval() for _ in range(2))
    ids, frames = tiny_text(2), tiny_frames(2)
    logits, before = other(ids, frames).logits, traces(other)
    patch_model(patched)
    assert traces(other) == before and torch.equal(other(ids, frames).logits, logits)
    third = MPlugOwl3ForConditionalGeneration(config)
    assert third.language_model.model.config._attn_implementation == "sdpa"
    assert patched.vision_model.config._attn_implementation == "sdpa"  # the tower keeps its own
    assert copy.deepcopy(other)(ids, frames).logits.equal(logits)


@pytest.mark.parametrize("gate", GATES)
def test_saving_and_loading(gate: str | None, tmp_path: Path) -> None:
    model = tiny_model(gate)
    ids, frames = tiny_text(3), tiny_frames(3)
    logits, keys = model(ids, frames).logits, list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    patch_model(model)
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name
    loaded = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "patched")
    assert torch.equal(loaded(ids, frames).logits, logits)
    patch_model(loaded)
    assert error(loaded(ids, frames).logits, logits) < 1e-6


def test_a_patched_model_is_not_copied_silently() -> None:
    model = patch_model(tiny_model())
    part = model.language_model.model.layers[0].self_attn  # which PEFT's modules_to_save would copy
    for attempt in (lambda: copy.deepcopy(model), lambda: copy.deepcopy(part), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(AdapterError, match=r"cannot be copied or pickled: .*Call unpatch_model"):
            attempt()
    copied = copy.deepcopy(unpatch_model(model))
    torch.save(copied, io.BytesIO())
    assert patch_of(patch_model(copied)) is not None and patch_of(model) is None


def test_patching_twice() -> None:
    model = patch_model(tiny_model(), "ring")
    with pytest.raises(AdapterError, match=r"patched already \(SeqParConfig\(strategy='ring'.*unpatch_model first"):
        patch_model(model)
    unpatch_model(model)
    with pytest.raises(AdapterError, match="is not patched"):
        unpatch_model(model)


def test_somebody_else_replaced_the_forward() -> None:
    model = patch_model(tiny_model())
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    before = traces(model)
    with pytest.raises(AdapterError, match=r"forward was replaced by something else after patch_model"):
        unpatch_model(model)
    assert traces(model) == before
    model.forward = ours
    unpatch_model(model)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((), {"strategie": "ring"}, ConfigError, "unknown option strategie; the options are strategy, self_attention"),
        (("rings",), {}, ConfigError, "strategy: 'rings' is unknown; choose one of lv-xattn, ring"),
        (("ring",), {"tile": (2, 1)}, ConfigError, "neither strategy='ring' nor self_attention='ring' takes one"),
        ((), {"config": {"strategy": "ring"}}, ConfigError, "config: expected a SeqParConfig, got dict"),
        ((), {"group": "world"}, ConfigError, "group: expected a ProcessGroup"),
    ],
)
def test_options(arguments: tuple, options: dict, kind: type[Exception], message: str) -> None:
    model = tiny_model()
    before = traces(model)
    with pytest.raises(kind, match=message):
        patch_model(model, *arguments, **options)
    assert traces(model) == before


def test_options_come_over_those_of_the_config() -> None:
    config = SeqParConfig(strategy="ring", text_layout="striped")
    patch = patch_of(patch_model(tiny_model(), config=config, text_layout="contiguous"))
    assert patch is not None
    assert patch.context.config == SeqParConfig(strategy="ring", text_layout="contiguous")


def test_unknown_models() -> None:
    with pytest.raises(AdapterError, match=r"no adapter knows torch.*Linear\. Known families: IDEFICS, .*register_ad"):
        patch_model(nn.Linear(2, 2))
    model = tiny_model()
    model.language_model.model.layers[0].self_attn = model.language_model.model.layers[1].self_attn
    before = traces(model)
    with pytest.raises(AdapterError, match=r"layer 0 has Qwen2Attention, but config.hyper_layers is \[1, 3\]"):
        patch_model(model)
    assert traces(model) == before


class Bilinears:
    """An adapter from outside, whose installation may fail half-way."""

    name = "bilinears"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, nn.Bilinear)

    def check(self, model: nn.Module, context: Any) -> None:
        pass

    def install(self, model: nn.Module, context: Any, patch: Any) -> None:
        patch.set(model, "forward", lambda *_: context.comm.size)
        if self.fails:
            raise RuntimeError("half-way")


@pytest.fixture
def no_adapters_left() -> Iterator[None]:
    yield
    adapters._registered.clear()


@pytest.mark.usefixtures("no_adapters_left")
def test_adapters_from_outside() -> None:
    with pytest.raises(AdapterError, match="object lacks name, matches, check, install"):
        register_adapter(object())  # type: ignore[arg-type]
    register_adapter(Bilinears())
    inner = nn.Bilinear(2, 2, 2)
    wrapper = nn.Sequential(inner)
    before = traces(wrapper)
    patch_model(wrapper)
    assert inner(None) == 1
    unpatch_model(wrapper)
    assert traces(wrapper) == before
    register_adapter(Bilinears(fails=True))  # the same name: replaces it
    with pytest.raises(RuntimeError, match="half-way"):
        patch_model(wrapper)
    assert traces(wrapper) == before


CASE = Case(frames=(3,))


def loss_by_group(rank: int, world: int) -> dict[str, float]:
    """The same model over the whole world, a sub-group, a mesh of one dimension and one dimension of two."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    groups = {
        "world": None,
        "sub-group": halves[rank % 2],
        "mesh of one dimension": init_device_mesh("cpu", (4,), mesh_dim_names=("sp",)),
        "mesh dimension": mesh["sp"],
    }
    found = {}
    for name, group in groups.items():
        model = model_of("per_head", CASE)
        patch_model(model, group=group)
        patch = patch_of(model)
        assert patch is not None
        assert patch.context.comm.size == (2 if name in ("sub-group", "mesh dimension") else 4)
        found[name] = model(**inputs_of("per_head", CASE, model)).loss.item()
        unpatch_model(model)
    for group, message in ((mesh, "a DeviceMesh of 2 dimensions"), (halves[1 - rank % 2], "not a member of the group")):
        with pytest.raises(ConfigError, match=message):
            patch_model(model_of("per_head", CASE), group=group)
    return found


def test_groups() -> None:
    expected = reference("per_head", CASE).loss
    for found in ranks(4).run(loss_by_group, timeout=PATIENCE):
        assert found == {name: pytest.approx(expected, rel=1e-5) for name in found} and len(found) == 4


def test_without_torch_distributed_it_is_a_group_of_one() -> None:
    assert not dist.is_initialized()
    model = patch_model(tiny_model())
    patch = patch_of(model)
    assert patch is not None and patch.context.comm.size == 1
    model.config.output_hidden_states = True  # the language model's layers have a copy of the config, made before
    with torch.no_grad():
        out = model(tiny_text(2), tiny_frames(2))
    assert out.past_key_values is not None and len(out.hidden_states) == 5  # as unpatched


def test_torch_compile_leaves_it_as_it_is() -> None:
    """Compiling a plan of transfers takes minutes, and again for each mask."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, ids, frames = tiny_model(), tiny_text(2), tiny_frames(2)
    expected = model(ids, frames).logits
    compiled = torch.compile(patch_model(model), backend=backend)
    assert error(compiled(ids, frames).logits, expected) < 1e-5
    compiled(ids, frames, labels=ids).loss.backward()
    assert not graphs
    torch._dynamo.reset()


def test_the_attention_function_is_registered_under_a_name_of_its_own() -> None:
    patch_model(tiny_model())
    assert AttentionInterface()["mllm_seqpar"].__module__.endswith("hf_attention")


def test_the_first_pass_says_what_a_rank_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    with caplog.at_level("INFO", logger="mllm_seqpar"):
        patch_model(model)
        model(tiny_text(2), tiny_frames(2), use_cache=False)
        model(tiny_text(2), tiny_frames(2), use_cache=False)
    assert [record.getMessage() for record in caplog.records] == [
        "MPlugOwl3ForConditionalGeneration is sequence-parallel over 1 rank(s): cross-attention by lv-xattn, "
        "self-attention by ring (zigzag text)",
        "rank 0 of 1 holds 12 of 12 text tokens (padding included) and 2 of 2 frames",
    ]
