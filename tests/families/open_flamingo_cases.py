"""What OpenFlamingo tests run: cases, the unpatched outcome in this process, and the patched one on ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny_open_flamingo import MEDIA, PAD, kept_flamingo, pixels, text
from torch import Tensor

from mllm_seqpar import FrameShard, frame_range, patch_model, unpatch_model
from outcomes import Outcome, average, error, worst_gradient

TOLERANCE = 1e-5
"""float32 through a perceiver of 6 layers and a language model; a wrong mask or position shows as 1e-3 and more."""
PATIENCE = 240.0
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One batch of a tiny Flamingo.

    Attributes:
        media: for each sample, where its media tokens stand.
        images: media of each sample.
        length: tokens of the longest sample.
        padding: "left", "right" or None: every sample after the first is shorter by 3 more tokens.
        immediate: `only_attend_immediate_media`.
        every: a cross-attention block before each `every`-th layer.
        labels: whether there are any.
        local_frames: each rank passes only its own media, with `visual_shard`.
        options: of patch_model.
    """

    media: tuple[tuple[int, ...], ...] = ((1, 4, 7),)
    images: int = 3
    length: int = 13
    padding: str | None = None
    immediate: bool = True
    every: int = 1
    labels: bool = True
    local_frames: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


def model_of(name: str, case: Case) -> Any:
    """The case's model, kept between cases."""
    model = kept_flamingo(name, case.every, case.immediate)
    model.zero_grad(set_to_none=True)
    return model.eval()


def inputs_of(case: Case) -> Inputs:
    """The arguments of `Flamingo.forward`."""
    ids = text(*case.media, length=case.length)
    mask = torch.ones_like(ids)
    if case.padding:
        for sample in range(1, len(ids)):
            gone = slice(None, 3 * sample) if case.padding == "left" else slice(-3 * sample, None)
            ids[sample, gone], mask[sample, gone] = PAD, 0
    inputs = {"vision_x": pixels(len(case.media), case.images), "lang_x": ids, "attention_mask": mask}
    if case.labels:
        inputs["labels"] = ids.masked_fill((ids == MEDIA) | (mask == 0), -100)
    return inputs


def own_media(inputs: Inputs) -> Inputs:
    """The same inputs as a rank passes them that holds only its own media."""
    flat = inputs["vision_x"].flatten(0, 1)
    own = frame_range(len(flat))
    return inputs | {
        "vision_x": flat[own.start : own.stop],
        "visual_shard": FrameShard(own.start, own.stop, len(flat)),
    }


def run(model: Any, inputs: Inputs) -> Outcome:
    """One pass, with backward when there are labels."""
    out = model(**inputs)
    if out.loss is not None:
        out.loss.backward()
    assert not model.lang_encoder.is_conditioned()
    loss = None if out.loss is None else out.loss.item()
    return Outcome(loss, out.logits.detach(), [], {name: p.grad for name, p in model.named_parameters()}, {})


@functools.cache
def _reference(name: str, key: str) -> Outcome:
    case = _CASES[key]
    return run(model_of(name, case), inputs_of(case))


_CASES: dict[str, Case] = {}


def reference(name: str, case: Case) -> Outcome:
    """The unpatched model in this process; the same whatever the options, so computed once."""
    plain = replace(case, options={}, local_frames=False)
    _CASES[repr(plain)] = plain
    return _reference(name, repr(plain))


def patched_rank(rank: int, world: int, name: str, case: Case) -> Outcome:
    """On a rank: the patched model's outcome."""
    model, inputs = model_of(name, case), inputs_of(case)
    if case.local_frames:
        inputs = own_media(inputs)
    patch_model(model, **case.options)
    try:
        outcome = run(model, inputs)
    finally:
        unpatch_model(model)
    average(outcome.grads, world)
    if rank:
        outcome.grads = {}
    return outcome


def check(outcomes: list[Outcome], expected: Outcome, case: Case, tolerance: float = TOLERANCE) -> None:
    """Every rank's numbers against the unpatched model's; what padding rows compute is nobody's concern."""
    real = inputs_of(case)["attention_mask"].bool()
    whole = not case.labels or case.options.get("self_attention") == "local" or case.options.get("logits") == "full"
    for outcome in outcomes:
        assert outcome.loss == outcomes[0].loss  # the same number, not nearly
        if expected.loss is not None:
            assert outcome.loss is not None
            assert abs(outcome.loss - expected.loss) <= tolerance * abs(expected.loss)
        if whole or len(outcomes) == 1:
            assert error(outcome.logits[real], expected.logits[real]) < tolerance
    if expected.loss is not None:
        value, name = gradient_error(outcomes[0].grads, expected.grads)
        assert value < tolerance, (value, name)


def gradient_error(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> tuple[float, str]:
    """The worst relative error of any gradient, gates as one vector.

    A gate's gradient is one sum of thousands of numbers of both signs, which may cancel: alone it has no scale.
    """
    return worst_gradient(_gates_together(found), _gates_together(expected))


def _gates_together(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    gates = [name for name in grads if name.endswith("_gate")]
    given = [grads[name] for name in gates]
    assert all(grad is not None for grad in given)
    others: dict[str, Tensor | None] = {name: grad for name, grad in grads.items() if name not in gates}
    return others | {"gates": torch.cat([grad for grad in given if grad is not None])}
