"""Layer: one process. A training step of each family on fake CUDA tensors, over torch's fake process group.

Fake tensors have no values, so nothing of a step may depend on them but what the host reads at its beginning. The
operators are those of CUDA, with the kernels that "auto" chooses there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from emulated_device import to_device
from fake_cuda import fake_cuda
from family_cases import BATCHES, CROSS_ATTENTION
from family_harness import build
from mllm_seqpar import patch_model
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs


@pytest.fixture
def fake_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's process group without other ranks: a gather returns this rank's tensor for each rank."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()[:16].clone())
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def _fake(x: Tensor) -> Tensor:
    dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda")


def _read_by_host(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the values of what `ForwardInputs.read` copies to the host."""
    found = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and not x.is_floating_point()}
    if "media_nums_per_sample" in inputs:
        found["media_nums_per_sample"] = torch.tensor(inputs["media_nums_per_sample"])
    for name in ("cross_attention_mask", "image_attention_mask"):
        if name in found:
            found[name] = found[name] == 1
    if "lang_x" in found:
        from tiny_models.open_flamingo import MEDIA

        found["input_ids"] = found["lang_x"]
        found["time"] = (found["lang_x"] == MEDIA).cumsum(-1)
    return found


STORED: dict[str, Any] = {"strategy": "ring", "recompute_visual": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),  # towers of other families read their grids
    [*((family, {}) for family in CROSS_ATTENTION), ("mplug_owl3", STORED)],
)
def test_step_reads_the_device_in_one_place_only(
    family: str, options: dict[str, Any], fake_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build(family, replace(BATCHES[family], train=True))
    values, reads = _read_by_host(inputs), []

    def read(self: ForwardInputs, numbers: Sequence[Tensor] = ()) -> list[Tensor]:
        wanted = self.read_by_host()
        self._host.update({name: values[name].reshape(x.shape) for name, x in wanted.items()})
        reads.append(len(numbers))
        return [torch.zeros(x.shape, dtype=x.dtype) for x in numbers]

    monkeypatch.setattr(ForwardInputs, "read", read)
    with fake_cuda(autograd=True), torch.autograd.set_multithreading_enabled(False):
        to_device(model, _fake)
        patch_model(model, **options)
        loss = model(**to_device(inputs, _fake)).loss
        loss.backward()  # raises HostSynchronisation where the host would wait for the device
    assert len(reads) == 1 and loss.device.type == "cuda"
    assert sum(weight.grad is not None for weight in model.parameters()) > len(list(model.parameters())) // 2
