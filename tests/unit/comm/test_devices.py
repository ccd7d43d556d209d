"""Layer: one process. Which devices of a model a group can transfer from; no GPU is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from family_harness import inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.comm import LoopbackCommunicator, backends, run_loopback
from mllm_seqpar.comm.backends import require_transferable
from mllm_seqpar.errors import AgreementError, ConfigError
from tiny_models.mplug_owl3 import Case

GLOO, NCCL, BOTH = "cpu:gloo,cuda:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: backends -> a group of two with them, whose NCCL transfers are on cuda:1."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group)
    monkeypatch.setattr(backends, "_nccl_device", lambda group: torch.device("cuda:1"))
    return lambda backends: SimpleNamespace(size=2, group=backends)


def model_on(*places: str) -> nn.Module:
    """Return a model with one layer on each device; CUDA tensors are fake."""
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in places))
    with FakeTensorMode():
        for layer, place in zip(layers, places, strict=True):
            layer.weight = nn.Parameter(torch.empty(2, 2, device=place))
    return layers


@pytest.mark.parametrize(
    ("backends", "places", "message"),
    [
        (
            GLOO,
            ["cpu", "cuda:0"],
            "parameter 1.weight of Sequential is on cuda:0, .* over gloo, .* CPU memory only.*nccl",
        ),
        (NCCL, ["cuda:1", "cpu"], r"parameter 1.weight .* on cpu, .* over nccl on cuda:1. Call model.to\('cuda:1'\)"),
        (NCCL, ["cuda:0"], r"parameter 0.weight .* on cuda:0, .* nccl on cuda:1.*set_device\(int\(os.environ"),
        (BOTH, ["cuda:0"], "over nccl on cuda:1"),
        (GLOO, ["cpu", "meta"], "parameter 1.weight .* on meta and has no values; load the weights"),
        (None, ["meta"], "no values"),
    ],
)
def test_model_on_a_device_without_transfers_is_refused(
    backends: str | None, places: list[str], message: str, group_of: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_transferable(group_of(backends), model_on(*places))


@pytest.mark.parametrize(
    ("backends", "places"),
    [(GLOO, ["cpu"]), (NCCL, ["cuda:1"]), (BOTH, ["cuda:1"]), (BOTH, ["cpu"]), ("cpu:fake,cuda:fake", ["cuda:0"])],
)
def test_model_on_the_device_of_its_group_is_accepted(backends: str, places: list[str], group_of: Any) -> None:
    require_transferable(group_of(backends), model_on(*places))


def test_while_patching_only_the_wrong_gpu_is_refused(group_of: Any) -> None:
    require_transferable(group_of(NCCL), model_on("cpu", "meta", "cuda:1"), moves_later=True)
    with pytest.raises(ConfigError, match=r"parameter 1.weight .* on cuda:0"):
        require_transferable(group_of(NCCL), model_on("cpu", "cuda:0"), moves_later=True)


def test_one_rank_and_ranks_in_threads_take_any_device(group_of: Any) -> None:
    require_transferable(SimpleNamespace(size=1, group=GLOO), model_on("cuda:0"))
    require_transferable(SimpleNamespace(size=2), model_on("cuda:0"))


def test_parameters_that_fsdp2_offloads_to_the_cpu_are_on_the_device_of_their_mesh(group_of: Any) -> None:
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    model, whole = nn.Linear(2, 2, bias=False), torch.ones(2, 2)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    model.weight = nn.Parameter(DTensor(whole[:1].to("meta"), spec, requires_grad=False))
    with pytest.raises(ConfigError, match="on meta and has no values"):
        require_transferable(group_of(NCCL), model)
    model.weight = nn.Parameter(DTensor(whole[:1], spec, requires_grad=False))
    assert model.weight.device.type == "cpu"
    require_transferable(group_of(NCCL), model)
    with pytest.raises(ConfigError, match="on cuda, .* gloo"):
        require_transferable(group_of(GLOO), model)


def test_only_the_parameter_asked_for_is_checked(group_of: Any) -> None:
    model = model_on("cpu", "cuda:1")
    first, second = model.parameters()
    require_transferable(group_of(NCCL), model, [second])
    with pytest.raises(ConfigError, match="parameter 0.weight"):
        require_transferable(group_of(NCCL), model, [first])


class OverNccl(LoopbackCommunicator):
    """A rank in a thread that claims to transfer over NCCL."""

    group = NCCL


@pytest.mark.parametrize("features", [None, "projected"])
def test_model_left_on_the_cpu_is_refused_in_its_first_pass_on_every_rank(features: str | None, group_of: Any) -> None:
    case = Case(frames=(2,), features=features)

    def run(comm: Any) -> None:
        model = patch_model(model_of("mplug_owl3", case), group=OverNccl(comm.world, comm.rank))
        with pytest.raises(ConfigError, match=r"on cpu, .* nccl on cuda:1. Call model.to\('cuda:1'\)"):
            model(**inputs_of("mplug_owl3", case, model))
        assert not set(comm.bytes.sent) - {"agreement"}

    run_loopback(2, run)


def test_one_rank_without_weights_makes_all_ranks_raise() -> None:
    case = Case(frames=(2,))

    def run(comm: Any) -> None:
        model = patch_model(model_of("mplug_owl3", case), group=comm)
        inputs = inputs_of("mplug_owl3", case, model)
        if comm.rank == 1:
            model.language_model.lm_head.to("meta")
        kind, message = (ConfigError, "lm_head.weight .* on meta") if comm.rank == 1 else (AgreementError, "rank 1")
        with pytest.raises(kind, match=message):
            model(**inputs)

    run_loopback(2, run)


def test_frozen_tower_may_stay_elsewhere_if_features_are_passed() -> None:
    case = Case(frames=(2,), features="projected")

    def run(comm: Any) -> Tensor:
        model = patch_model(model_of("mplug_owl3", case), group=comm)
        inputs = inputs_of("mplug_owl3", case, model)
        model.vision_model.to("meta")
        return model(**inputs).loss

    first, second = run_loopback(2, run)
    assert torch.equal(first, second)
