"""Layer: one process. `patch_model` refuses unknown models and options, and launched processes without a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from family_harness import traces
from mllm_seqpar import SeqParConfig, frame_range, patch_model, register_adapter, unpatch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import AdapterError, AgreementError, ConfigError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patching import patch_of
from mllm_seqpar.patching import registry as adapters
from model_copies import tiny_model
from tiny_models.mplug_owl3 import tiny_frames, tiny_text


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"strategie": "ring"}, "unknown option strategie; the options are strategy, self_attention"),
        (("rings",), {}, "strategy: 'rings' is unknown; choose one of lv-xattn, ring"),
        (("ring",), {"tile": (2, 1)}, "neither strategy='ring' nor self_attention='ring' takes one"),
        ((), {"config": {"strategy": "ring"}}, "config: expected a SeqParConfig, got dict"),
        ((), {"group": "world"}, "group: expected a ProcessGroup"),
    ],
)
def test_bad_options_are_refused_before_anything_changes(arguments: tuple, options: dict, message: str) -> None:
    model = tiny_model()
    before = traces(model)
    with pytest.raises(ConfigError, match=message):
        patch_model(model, *arguments, **options)
    assert traces(model) == before


def test_options_override_the_config() -> None:
    config, expected = (SeqParConfig(strategy="ring", text_layout=layout) for layout in ("striped", "contiguous"))
    patch = patch_of(patch_model(tiny_model(), config=config, text_layout="contiguous"))
    assert patch is not None and patch.context.config == expected


def test_unknown_model_is_refused_with_the_known_families() -> None:
    with pytest.raises(
        AdapterError, match=r"no adapter matches torch.*Linear\. Supported families: IDEFICS, .*register_ad"
    ):
        patch_model(nn.Linear(2, 2))


def test_model_that_differs_from_its_config_is_refused_before_anything_changes() -> None:
    model = tiny_model()
    model.language_model.model.layers[0].self_attn = model.language_model.model.layers[1].self_attn
    before = traces(model)
    with pytest.raises(AdapterError, match=r"layer 0 has Qwen2Attention, but config.hyper_layers is \[1, 3\]"):
        patch_model(model)
    assert traces(model) == before


def test_subclass_with_a_forward_of_its_own_is_refused_before_anything_changes() -> None:
    class Doubled(MPlugOwl3ForConditionalGeneration):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = 2 * out.loss
            return out

    class Named(MPlugOwl3ForConditionalGeneration):
        pass

    model = tiny_model()
    model.__class__ = Doubled
    before = traces(model)
    with pytest.raises(AdapterError, match="Doubled overrides the forward of MPlugOwl3ForConditionalGeneration"):
        patch_model(model)
    assert traces(model) == before
    model.__class__ = Named
    assert patch_of(patch_model(model))


def bilinears(fails: bool = False) -> Any:
    """Return an adapter from outside this package, whose installation may fail half-way."""

    def install(model: nn.Module, context: Any, patch: Any) -> None:
        patch.set(model, "forward", lambda *_: context.comm.size)
        if fails:
            raise RuntimeError("half-way")

    checks = {"matches": lambda model: isinstance(model, nn.Bilinear), "check": lambda model, context: None}
    return SimpleNamespace(name="bilinears", install=install, **checks)


def test_installation_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_registered", {})
    register_adapter(bilinears())
    inner = nn.Bilinear(2, 2, 2)
    wrapper = nn.Sequential(inner)
    before = traces(wrapper)
    patch_model(wrapper)
    assert inner(None) == 1
    unpatch_model(wrapper)
    assert traces(wrapper) == before
    register_adapter(bilinears(fails=True))  # an adapter of the same name replaces the earlier one
    with pytest.raises(RuntimeError, match="half-way"):
        patch_model(wrapper)
    assert traces(wrapper) == before


def test_installation_that_fails_on_one_rank_is_undone_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_registered", {})
    adapter = bilinears()
    install = adapter.install

    def failing(model: nn.Module, context: Any, patch: Any) -> None:
        install(model, context, patch)
        if context.comm.rank == 1:
            raise RuntimeError("half-way")

    adapter.install = failing
    register_adapter(adapter)

    def rank(comm: Communicator) -> tuple[Exception | None, bool]:
        inner = nn.Bilinear(2, 2, 2)
        before = traces(inner)
        _, error = attempt(lambda: patch_model(inner, group=comm))
        return error, traces(inner) == before

    (first, *restored), (second, *also_restored) = run_loopback(2, rank)
    assert isinstance(first, AgreementError) and "patch_model: rank 1: RuntimeError: half-way" in str(first)
    assert isinstance(second, RuntimeError) and restored == also_restored == [True]


NO_GROUP = r"=4, so a launcher started 4 processes, but .*init_process_group.*PartialState.*group=\"self\""


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_launched_processes_without_a_process_group_are_refused(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "1")
    for call in (lambda: patch_model(model), lambda: frame_range(8)):
        with pytest.raises(ConfigError, match=NO_GROUP):
            call()
    assert patch_of(patch_model(model, group="self")) and frame_range(8, "self") == range(8)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},  # torchrun inside of srun
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of sbatch, which runs once
        {"WORLD_SIZE": "4"},  # no process has a rank
    ],
)
def test_single_processes_need_no_process_group(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert frame_range(8) == range(8)


def test_process_group_created_after_patching_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of torch.multiprocessing have no environment variables before they join a group."""
    models = patch_model(tiny_model()), patch_model(tiny_model(), group="self")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    ids, frames = tiny_text(2), tiny_frames(2)
    for call in (lambda: models[0](ids, frames), lambda: models[0].language_model(ids)):
        with pytest.raises(ConfigError, match="patched for one process, before the process group of 2 ranks existed"):
            call()
    models[1](ids, frames)
