"""Layer: loopback ranks on an emulated CUDA device. No operator mixes tensors of the device and offloaded features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_device import DEVICE, DeviceTensor, Watch, to_device
from family_cases import BATCHES, CROSS_ATTENTION, Owl
from family_harness import TOLERANCE, build, expected_tokens, reference, settings
from mllm_seqpar import patch_model
from mllm_seqpar.comm import LoopbackCommunicator, run_loopback
from mllm_seqpar.runtime import offload, visual_features

OFFLOAD = {"visual_offload": "cpu", "vision_chunk_size": 1}
CASES = {family: (family, BATCHES[family]) for family in CROSS_ATTENTION}
CASES["features"] = "mplug_owl3", Owl(frames=(3, 1), features="projected", wants_grad=("image_embeds",))


class _Nothing:
    """A stream or an event; operators on the emulated device run at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class _EmulatedStreams:
    """Takes the place of `CudaStreams`."""

    def __init__(self) -> None:
        self.copy_stream = self.current = lambda device: _Nothing()
        self.event = _Nothing
        self.keep = lambda x, stream: None

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def is_pinned(self, x: Tensor) -> bool:
        return False

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def device_empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return DeviceTensor(torch.empty(*shape, dtype=dtype))


class _OnDevice(LoopbackCommunicator):
    device = property(lambda self: DEVICE)  # type: ignore[assignment]

    def __init__(self, comm: LoopbackCommunicator) -> None:
        super().__init__(comm.world, comm.rank)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CudaStreams", _EmulatedStreams)
    monkeypatch.setattr(visual_features, "CHUNK_BYTES", 1)
    monkeypatch.setattr(visual_features, "CUDA_CHUNK_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()[:16].clone())


@contextmanager
def on_device(family: str, case: Any, comm: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the patched model and its inputs; features of the caller stay on the host."""
    model, inputs = build(family, case)
    on_host = {name: x for name, x in inputs.items() if name == "image_embeds"}
    model, inputs = to_device(model), to_device(inputs) | on_host
    with Watch():
        patch_model(model, group=_OnDevice(comm), kernel="blocked_matmul", **case.options)
        yield model, inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_step_with_offload_equals_unpatched_on_device(name: str) -> None:
    family, case = CASES[name]
    case = case.with_options(**OFFLOAD)

    def rank(comm: LoopbackCommunicator) -> tuple[float, dict[str, Tensor]]:
        with on_device(family, case, comm) as (model, inputs):
            loss = model(**inputs).loss
            loss.backward()
            grads = {n: p.grad.elem for n, p in model.named_parameters() if p.grad is not None}
            if "image_embeds" in inputs:
                assert not isinstance(inputs["image_embeds"].grad, DeviceTensor)
            return float(loss.detach().elem), grads

    expected = reference(family, case)
    found = run_loopback(2, rank)
    for name, grad in expected.grads.items():
        if grad is not None:
            mean = sum(grads[name] for _, grads in found) / 2
            assert (mean - grad).norm() <= TOLERANCE * grad.norm() + 1e-6, name
    assert all(abs(loss - expected.loss) < TOLERANCE for loss, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mplug_owl3", "idefics"])
def test_tokens_with_offload_equal_unpatched_on_device(family: str) -> None:
    case = replace(BATCHES[family], labels=None).with_options(**OFFLOAD, shard_prompt_from=1)

    def rank(comm: LoopbackCommunicator) -> Tensor:
        with on_device(family, case, comm) as (model, inputs), torch.no_grad():
            return model.generate(**inputs, **settings(max_new_tokens=3)).elem

    expected = expected_tokens(family, case, {"max_new_tokens": 3})
    assert all(torch.equal(found, expected) for found in run_loopback(2, rank))
