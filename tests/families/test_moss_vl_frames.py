"""Layer: one process, ranks as threads. MOSS-VL with frames of unequal size, in float64 and by its load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import MOSS
from family_harness import build, compare_gradients, model_of, patched, settings
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.runtime.frames import Frames
from moss_vl_reference import compute_in_float64
from selections import slow_unless
from tiny_models.moss_vl import Case, with_blank_images

EXACT = 1e-9
CASES = {
    "two samples": replace(MOSS, padding="left"),
    "a text without frames between others": Case(frames=(((3, 4, 6), (8, 4)), (), ((2, 6, 2),)), padding="right"),
    "one large frame": Case(frames=(((6, 2, 2), (12, 14)), ((2, 2),)), length=27),
    "fewer frames than ranks": Case(frames=(((4, 6), (2, 2)),)),
    "text only": Case(frames=((), ())),
}


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


def results(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the logits, and the gradients of a sum of them; transformers' loss is in float32."""
    logits = model(**inputs, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (logits * weights * inputs.get("attention_mask", torch.ones(logits.shape[:2]))[..., None]).sum().backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("size", slow_unless(lambda size: size == 3, [1, 2, 3, 4]))
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_in_float64_what_one_process_does(name: str, size: int, in_float64: None) -> None:
    case = replace(CASES[name], double=True, labels=None, local_frames=size % 2 == 0)
    model, inputs = build("moss_vl", case)
    logits, grads = results(model, inputs)
    real = slice(None) if case.real() is None else case.real()
    found = run_loopback(size, lambda comm: results(*patched("moss_vl", case, comm)))
    for own, _ in found:
        torch.testing.assert_close(own[real], logits[real], atol=EXACT, rtol=EXACT)
    compare_gradients([own for _, own in found], grads, EXACT)


@pytest.mark.parametrize("size", [1, 3])
def test_blank_images_have_no_effect_on_ranks(size: int) -> None:
    """The processor gives a hidden image of zeros to a text without media."""
    case = Case(frames=((), ((3, 4, 6), (8, 4)), ()), labels=None)
    expected = model_of("moss_vl", case)(**build("moss_vl", case)[1], use_cache=False).logits

    def logits(comm: Any) -> Tensor:
        model, inputs = patched("moss_vl", case, comm)
        return model(**with_blank_images(inputs, model), use_cache=False).logits.detach()

    for found in run_loopback(size, logits):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_hold_as_many_visual_tokens(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole frames are balanced by tokens: no rank has more than its share and a part of the largest frame."""
    made: list[Frames] = []
    of_shards = Frames.of_shards.__func__  # type: ignore[attr-defined]

    def recorded(*args: Any) -> Frames:
        made.append(frames := of_shards(*args))
        return frames

    monkeypatch.setattr(Frames, "of_shards", classmethod(recorded))
    media = tuple((3, 2 + 2 * (i % 3), 2 + 2 * (i % 4)) for i in range(12))
    case = Case(frames=(media,), length=60)
    tokens = [h * w // 4 + 1 for t, h, w in media for _ in range(t)]

    def encoded(comm: Any) -> int:
        model, inputs = patched("moss_vl", case, comm)
        rows: list[int] = []
        encode = model.model.encode_frames
        model.model.encode_frames = lambda *args: rows.append(len(found := encode(*args))) or found
        model(**inputs)
        return sum(rows)

    found = run_loopback(size, encoded)
    assert sum(found) == sum(tokens) and max(found) <= sum(tokens) / size + max(tokens)
    for frames in made:
        assert list(frames.key_lengths) == found


@pytest.mark.parametrize("size", [0, 1, 2])
def test_an_assistant_attends_to_the_same_frames(size: int) -> None:
    """The answer is that of greedy search, on ranks as in the unpatched model (`size` 0)."""
    case, given = Case(labels=None), settings(max_new_tokens=12)

    def assistant() -> Any:
        model = model_of("moss_vl", case)
        for number, weight in enumerate(model.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.data.add_(noise, alpha=0.02)
        return model

    model, inputs = build("moss_vl", case)
    expected = model.generate(**inputs, **given)

    def run(comm: Any) -> Tensor:
        own, passed = patched("moss_vl", case, comm)
        return own.generate(**passed, **given, assistant_model=patch_model(assistant(), group=comm))

    unpatched = [model.generate(**inputs, **given, assistant_model=assistant())]
    assert all(torch.equal(found, expected) for found in (run_loopback(size, run) if size else unpatched))
