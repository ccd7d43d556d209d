"""Layer: one process, loopback ranks on an emulated CUDA device. How often the host waits; where tensors are.

The emulation fails where an operator mixes tensors of the device and of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from emulated_device import DEVICE, DeviceTensor, Watch, mark, place, to_device
from family_cases import BATCHES, CROSS_ATTENTION, Owl
from family_harness import TOLERANCE, build, compare_gradients, expected_tokens, reference, settings, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.comm import LoopbackCommunicator, ProcessGroupCommunicator, run_loopback
from mllm_seqpar.runtime import host_copies, visual_features

READS = 2
"""One copy of everything that the host plans by, and one of what the ranks compare."""


class _OnDevice(LoopbackCommunicator):
    """Loopback ranks that exchange control tensors on the device, as over NCCL."""

    def __init__(self, comm: LoopbackCommunicator) -> None:
        super().__init__(comm.world, comm.rank)

    device = property(lambda self: DEVICE)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _emulated_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()[:16].clone())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))  # older than Triton programs


CAUSAL: dict[str, Any] = {"causal": True}
FUNCTIONS = [(lv_xattn, {}), (ring_attention, {}), (ring_attention, CAUSAL), (mesh_attention, {})]


@pytest.mark.parametrize(("function", "options"), [*FUNCTIONS, (ulysses_attention, {})])
def test_no_rank_of_an_attention_function_waits_for_its_device(function: Any, options: dict[str, Any]) -> None:
    def step(comm: LoopbackCommunicator) -> Watch:
        on_device = _OnDevice(comm)
        shapes = ((2, 4, 8, 16), *2 * [(2, 2, 8 if options else 12, 16)])
        q, k, v = (to_device(torch.randn(shape, requires_grad=True)) for shape in shapes)
        with Watch() as watch, place("call"):
            o = function(q, k, v, group=on_device, kernel="blocked_matmul", **options)
            with place("backward"):
                o.float().square().sum().backward()
        assert o.shape == q.shape and all(isinstance(x.grad, DeviceTensor) for x in (q, k, v))
        return watch

    for watch in run_loopback(2, step):
        assert watch.places("synchronisation", "backward") == watch.places("blocking copy", "backward") == []
        waits = watch.places("synchronisation") + watch.places(
            "blocking copy"
        )  # the ranks compare what they were given
        assert watch.count("synchronisation") <= READS and all("comm/base.py" in place for place in waits), waits


def _layers(family: str, model: Any) -> list[Any]:
    match family:
        case "mplug_owl3":
            return list(model.language_model.model.layers)
        case "idefics":
            return [*model.model.layers, *model.model.gated_cross_attn_layers]
        case "mllama" | "moss_vl" | "video_mllama":
            return list(model.model.language_model.layers)
    return list(model.lang_encoder._get_decoder_layers())


def _patched_on_device(
    family: str, case: Any, comm: Any, checkpointing: bool, on_host: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return the patched model, with its decoder layers marked as "layer", and its inputs, some of which stay on host.

    `comm` is a loopback rank, or None for the ranks of the process group.
    """
    model, inputs = build(family, case)
    if checkpointing and family != "open_flamingo":  # whose layers keep a graph of their own
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kept = {name: inputs[name] for name in on_host if name in inputs}
    model, inputs = to_device(model), to_device(inputs) | kept
    with Watch():
        patch_model(model, group=comm and _OnDevice(comm), kernel="blocked_matmul", **case.options)
    mark(_layers(family, model), "layer")
    return model, inputs


def _training_step(family: str, case: Any) -> list[tuple[Watch, float]]:
    """Return what the step of each rank does, and its loss."""

    def rank(comm: LoopbackCommunicator) -> tuple[Watch, float]:
        model, inputs = _patched_on_device(family, case, comm, checkpointing=True)
        with Watch() as watch:
            loss = model(**inputs).loss
            with place("backward"):
                loss.backward()
        return watch, float(loss.detach().elem)

    return run_loopback(2, rank)


STEPS = [(family, {}) for family in CROSS_ATTENTION]
STEPS += [(family, {"self_attention": "local"}) for family in BATCHES if family in ("mplug_owl3", "open_flamingo")]
STEPS += [("mplug_owl3", {"logits": "none"})]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), STEPS)
def test_training_step_reads_the_device_twice_and_never_in_layers(family: str, options: dict[str, str]) -> None:
    case = replace(BATCHES[family], train=True).with_options(**options)
    if family == "open_flamingo":
        case = case.with_model(language_model="mpt")
    expected = reference(family, case).loss
    for watch, loss in _training_step(family, case):
        assert abs(loss - expected) < TOLERANCE
        for where in ("layer", "backward"):
            assert watch.places("synchronisation", where) == []
            assert watch.places("blocking copy", where) == []
        found = watch.places("synchronisation", "outside")
        # Where text is not sharded, transformers makes its masks as in the unpatched model.
        ours = [place for place in found if "masking_utils" not in place]
        assert len(ours) <= READS, ours
        assert all("comm/base.py" in place for place in watch.places("blocking copy")), watch.places("blocking copy")


DECODING = {"mplug_owl3": 0, "moss_vl": 0, "idefics": 1, "mllama": 1, "video_mllama": 1, "open_flamingo": 1}
"""Reads for each token: the mask over images, and with it the frames' checksum; OpenFlamingo's new media tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("family", CROSS_ATTENTION)
def test_decoded_token_reads_the_device_at_most_once(family: str) -> None:
    case = replace(BATCHES[family], labels=None).with_options(shard_prompt_from=1)

    def rank(comm: LoopbackCommunicator) -> list[Watch]:
        model, inputs = _patched_on_device(family, case, comm, checkpointing=False)
        watches = []
        for tokens in (2, 4):
            with Watch() as watch, torch.no_grad():
                model.generate(**inputs, **settings(max_new_tokens=tokens, use_cache=True))
            watches.append(watch)
        return watches

    for short, long in run_loopback(2, rank):
        for watch in (short, long):
            assert watch.places("synchronisation", "layer") == []
            assert watch.places("blocking copy", "layer") == []
        # `generate` of transformers itself reads whether all samples are finished.
        extra = long.count("synchronisation") - short.count("synchronisation") - 2
        assert extra == 2 * DECODING[family], long.found - short.found
        assert long.count("blocking copy") == short.count("blocking copy")


@pytest.fixture
def fake_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's process group without other ranks: a gather returns this rank's tensor for each rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(ProcessGroupCommunicator, "device", DEVICE)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mllama", ["mllama", "mplug_owl3"]))
def test_training_step_over_a_process_group_never_waits_in_layers(family: str, fake_process_group: None) -> None:
    model, inputs = _patched_on_device(family, replace(BATCHES[family], train=True), None, checkpointing=True)
    with torch.autograd.set_multithreading_enabled(False), Watch() as watch:
        loss = model(**inputs).loss
        with place("backward"):
            loss.backward()
    assert watch.places("synchronisation", "layer") == watch.places("synchronisation", "backward") == []
    assert watch.places("blocking copy", "layer") == watch.places("blocking copy", "backward") == []
    assert watch.count("synchronisation") <= READS, watch.places("synchronisation")


OFFLOAD = {"visual_offload": "cpu", "vision_chunk_size": 1}
OFFLOADED = {family: (family, BATCHES[family]) for family in CROSS_ATTENTION if family != "mplug_owl3"}
OFFLOADED["features"] = "mplug_owl3", Owl(frames=(3, 1), features="projected", wants_grad=("image_embeds",))


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
        self.on = lambda stream: nullcontext()
        self.is_pinned = lambda x: False

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def device_empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return DeviceTensor(torch.empty(*shape, dtype=dtype))


@pytest.fixture
def emulated_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "CudaStreams", _EmulatedStreams)
    monkeypatch.setattr(visual_features, "CHUNK_BYTES", 1)
    monkeypatch.setattr(visual_features, "CUDA_CHUNK_BYTES", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLOADED)
def test_training_step_with_offload_equals_unpatched_on_device(name: str, emulated_streams: None) -> None:
    family, case = OFFLOADED[name]

    def rank(comm: LoopbackCommunicator) -> tuple[float, dict[str, Tensor | None]]:
        given = case.with_options(**OFFLOAD)
        model, inputs = _patched_on_device(family, given, comm, checkpointing=False, on_host=("image_embeds",))
        with Watch():
            loss = model(**inputs).loss
            loss.backward()
        assert "image_embeds" not in inputs or not isinstance(inputs["image_embeds"].grad, DeviceTensor)
        grads = {n: None if p.grad is None else p.grad.elem for n, p in model.named_parameters()}
        return float(loss.detach().elem), grads

    expected, found = reference(family, case), run_loopback(2, rank)
    compare_gradients([grads for _, grads in found], expected.grads)
    assert all(abs(loss - expected.loss) < TOLERANCE for loss, _ in found)


@pytest.mark.slow
def test_tokens_with_offload_equal_unpatched_on_device(emulated_streams: None) -> None:
    case = replace(BATCHES["mplug_owl3"], labels=None).with_options(**OFFLOAD, shard_prompt_from=1)

    def rank(comm: LoopbackCommunicator) -> Tensor:
        model, inputs = _patched_on_device("mplug_owl3", case, comm, checkpointing=False)
        with Watch(), torch.no_grad():
            return model.generate(**inputs, **settings(max_new_tokens=3)).elem

    expected = expected_tokens("mplug_owl3", case, {"max_new_tokens": 3})
    assert all(torch.equal(found, expected) for found in run_loopback(2, rank))
