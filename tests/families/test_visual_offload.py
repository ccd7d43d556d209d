"""Layer: loopback ranks. Families with visual features in host memory against the unpatched model; races of copies."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import stream_model
from family_cases import BATCHES, CROSS_ATTENTION, FUSED, OWL, PADDED, Mllama, Moss, Owl
from family_harness import (
    check,
    check_exact,
    check_tokens,
    compare_gradients,
    on_ranks,
    outcome,
    patched,
    reference,
    slow_unless,
)
from generation_cases import LATENTS
from mllm_seqpar.attention import attend
from mllm_seqpar.comm import as_communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime import host_copies, offload, visual_features
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import Frames
from mllm_seqpar.runtime.offload import HostFeatures
from mllm_seqpar.runtime.projections import FunctionProjection
from mllm_seqpar.runtime.text import TextShards
from mllm_seqpar.sharding import FrameSizes
from outcomes import run_case
from stream_model import Race, StreamModel, on_model

PROJECTED = Owl(frames=(3, 1), features="projected", wants_grad=("image_embeds",))
CROSS_BATCHES = [(family, BATCHES[family]) for family in CROSS_ATTENTION]
EXACT: list[Any] = [
    *((family, 1 + number % 3, case) for number, (family, case) in enumerate(CROSS_BATCHES)),
    *(
        (family, 3 - number % 2, case)
        for number, (family, case) in enumerate((name, PADDED[name]) for name in CROSS_ATTENTION)
    ),
    ("mplug_owl3", 2, replace(OWL, model=FUSED)),
    ("mplug_owl3", 3, replace(PROJECTED, model=FUSED)),
    ("mplug_owl3", 1, PROJECTED),
    ("mplug_owl3", 3, Owl(frames=(1,), length=3)),  # ranks without frames
    ("mplug_owl3", 2, Owl(frames=(2, 3), local_frames=True, features="projected")),
    ("mplug_owl3", 2, OWL.with_options(self_attention="local")),
    ("mplug_owl3", 2, OWL.with_options(self_attention="ulysses").with_model(**FUSED)),
    ("mllama", 3, Mllama(frames=((2, 3, 1), (1,)), local_frames=True)),
    ("moss_vl", 3, Moss(frames=(((3, 4, 6), (12, 8)), ((2, 6, 2),)), local_frames=True)),
]
TOKENS: list[Any] = [
    *((family, 1 + number % 3, case) for number, (family, case) in enumerate(CROSS_BATCHES)),
    ("mplug_owl3", 2, replace(OWL, model=FUSED)),
    ("mplug_owl3", 3, OWL.with_options(shard_prompt_from=2).with_model(**FUSED)),
    ("idefics", 2, LATENTS.with_options(shard_prompt_from=2)),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visual_features, "CHUNK_BYTES", 1)  # one frame, or one tile, at a time


def offloaded(case: Any) -> Any:
    return case.with_options(visual_offload="cpu", vision_chunk_size=1)


@pytest.mark.parametrize(("family", "size", "case"), slow_unless(lambda row: row in EXACT[:4], EXACT))
def test_training_step_with_offload_equals_unpatched(family: str, size: int, case: Any) -> None:
    check_exact(family, size, offloaded(case))


@pytest.mark.parametrize(("family", "size", "case"), slow_unless(lambda row: row in TOKENS[:2], TOKENS))
def test_generated_tokens_with_offload_equal_unpatched(family: str, size: int, case: Any) -> None:
    check_tokens(family, size, offloaded(replace(case, labels=None)), {"max_new_tokens": 4})


@pytest.mark.parametrize("family", ["mplug_owl3", "idefics"])
def test_bytes_sent_are_those_of_lv_xattn(family: str) -> None:
    def sent(case: Any) -> list[dict[str, int]]:
        def run(model: Any, inputs: Any, comm: Any) -> dict[str, int]:
            model(**inputs).loss.backward()
            return dict(comm.bytes.sent)

        return on_ranks(3, family, case, run)

    case = BATCHES[family]  # with two samples, whose rows are sent only to ranks that hold a frame they attend to
    assert sent(offloaded(case)) == sent(case)


def test_gradients_of_an_abandoned_backward_pass_are_dropped() -> None:
    case = offloaded(PROJECTED)
    model, inputs = patched("mplug_owl3", case, "self")
    loss = model(**inputs).loss
    weight = next(weight for name, weight in model.named_parameters() if name.endswith("v_kv_proj.weight"))
    torch.autograd.grad(loss, [weight], retain_graph=True)  # sums gradients of features that nothing takes
    for _ in range(2):
        inputs["image_embeds"].grad = None
        loss.backward(retain_graph=True)
        assert torch.allclose(inputs["image_embeds"].grad, reference("mplug_owl3", case).input_grads["image_embeds"])


def test_features_are_freed_with_the_graph() -> None:
    gc.disable()
    try:
        made: list[StorageWeakRef] = []
        model, inputs = patched("mplug_owl3", offloaded(OWL), "self")
        original = offload.HostFeatures.of.__func__

        def of(cls: Any, features: Any, *args: Any) -> Any:
            made.append(StorageWeakRef(features.untyped_storage()))
            return original(cls, features, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload.HostFeatures, "of", classmethod(of))
            model(**inputs).loss.backward()
        assert len(made) == 1 and made[0].expired()
    finally:
        gc.enable()


def test_changed_parameters_are_refused_on_every_rank_before_rows_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a rank without frames, so that no rank waits for one that has raised."""
    monkeypatch.setattr(attend, "streamed_backward", lambda *args: pytest.fail("rows are sent"))

    def run(comm: Any) -> None:
        model, inputs = patched("mplug_owl3", offloaded(Owl(frames=(1,), length=3)), comm)
        loss = model(**inputs).loss
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "v_kv_proj" in name:
                    parameter.mul_(2)
        with pytest.raises(ConfigError, match="were replaced, modified, frozen or unfrozen between the forward and"):
            loss.backward()

    run_loopback(2, run, timeout=5)


def test_pass_with_a_cache_is_refused_in_grad_mode() -> None:
    model, inputs = patched("mplug_owl3", offloaded(replace(OWL, labels=None)), "self")
    with pytest.raises(ConfigError, match=r"visual_offload.*torch.no_grad"):
        model(**inputs, use_cache=True)


STEPS = {"encoded": OWL, "given": PROJECTED}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_copies_have_no_race(step: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = offloaded(STEPS[step]), StreamModel(pinned)
    expected = reference("mplug_owl3", case)
    on_model(monkeypatch, model)
    with model:
        found = outcome("mplug_owl3", case, "self")
    check([found], expected, case)
    assert model.copies > 0
    with model, torch.no_grad():
        plain, inputs = patched("mplug_owl3", replace(case, labels=None), "self")
        plain(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=True)


WAITS = (
    "current.wait_event(slot.ready)",
    "slot.free.record(current)",
    "self._stream.wait_event(slot.free)",
    "slot.ready.record(self._stream)",
    "slot.ready.synchronize()",
    "self._stream.wait_event(computed)",
    "self._stream.synchronize()",
)


@pytest.mark.parametrize("wait", WAITS)
def test_model_of_streams_finds_each_missing_wait(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(host_copies.HostCopies)
    assert source.count(wait) == 1
    broken: dict[str, Any] = dict(vars(host_copies))
    exec(compile(source.replace(wait, "pass"), "broken_copies", "exec"), broken)
    monkeypatch.setattr(stream_model, "HostCopies", broken["HostCopies"])
    model = StreamModel(pins_hosts=False)
    on_model(monkeypatch, model)
    with pytest.raises(Race), model:
        outcome("mplug_owl3", offloaded(PROJECTED), "self")


@pytest.mark.parametrize("family", ["mplug_owl3", "mllama", "moss_vl"])
def test_gradient_checkpointing_with_offload_equals_unpatched(family: str) -> None:
    case = offloaded(replace(BATCHES[family], train=True))
    expected = reference(family, case)

    def run(model: Any, inputs: Any, comm: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return run_case(model, inputs, model(**inputs))

    found = on_ranks(2, family, case, run)
    assert all(each.loss == pytest.approx(expected.loss, rel=1e-5) for each in found)
    compare_gradients([each.grads for each in found], expected.grads)


def test_dropout_of_a_projection_is_replayed_and_differs_between_chunks() -> None:
    """o is linear in the weight, so the inner products of o and of the weight with their gradients are equal."""
    weight, dropout = torch.nn.Linear(8, 32, bias=False), torch.nn.Dropout(0.5)
    context = SeqParContext(as_communicator("self"), SeqParConfig(visual_offload="cpu"))
    text = TextShards(1, 4, context.comm, "zigzag")
    features = HostFeatures.of(torch.ones(6, 2, 8), torch.zeros(6, dtype=torch.long), 6, torch.float32)
    mask = FrameMask.from_intervals(torch.zeros(1, 4).long(), torch.full((1, 4), 6), 2, 6)
    state = ForwardState(context, text=text, frames=Frames.of_shards(features, mask, text, FrameSizes(6)))
    seen = []

    def project(x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = weight(dropout(x)).flatten(0, 1).unflatten(-1, (2, 16)).transpose(0, 1)[None]
        seen.append(v.detach().clone())
        return torch.zeros_like(v), v

    q = torch.zeros(1, 2, 4, 16)
    o = state.attend(q, [state.frame_keys(q, 0, FunctionProjection(project, [weight, dropout]))], 1.0)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    forward, attention, gradients = seen[:6], seen[6::2], seen[7::2]  # backward projects each chunk for both in turn
    assert not forward[0].equal(forward[1])
    assert all(x.equal(y) and x.equal(z) for x, y, z in zip(forward, attention, gradients, strict=True))
    product = (weight.weight.detach() * weight.weight.grad).sum()
    assert product.item() == pytest.approx((o * d_o).sum().item(), rel=1e-4, abs=1e-4)
