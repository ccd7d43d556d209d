"""Layer: loopback ranks. MOSS-Video-Preview in float64: 1 to 4 ranks compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mllama import modeling_mllama

from family_harness import build, on_ranks, slow_unless
from tiny_models.video_mllama import Case

TOLERANCE = 1e-9
CASES = {
    "more frames than ranks": Case(frames=(5, 2), length=13),
    "a rank without frames": Case(frames=(2,), length=13),
    "a sample without frames": Case(frames=(0, 3), padding="left", length=13),
    "fused channels, no mask": Case(frames=(3, 1), mask="none", model={"pool_mode": "channelFusion"}),
}


def step(model: Any, inputs: dict[str, Any], case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients; the loss weighs logits, since cross-entropy is computed in float32."""
    logits = model(**inputs).logits
    weights = torch.arange(logits.numel(), dtype=logits.dtype).cos().view_as(logits)
    real = case.real()
    weights = weights if real is None else weights * real[..., None]
    (logits * weights).sum().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("size", slow_unless(lambda size: size == 3, [1, 2, 3, 4]))
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]

    def norm(self: Any, x: Tensor) -> Tensor:  # transformers' rounds to float32
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_mllama.MllamaTextRMSNorm, "forward", norm)

    case = replace(case, double=True, labels=None, options={"logits": "full"})
    expected, gradients = step(*build("video_mllama", case), case)
    real = slice(None) if case.real() is None else case.real()

    found = on_ranks(size, "video_mllama", case, lambda model, inputs, _: step(model, inputs, case))
    for logits, _ in found:
        assert float((logits - expected)[real].abs().max()) <= TOLERANCE * float(expected[real].abs().max())
    for key, gradient in gradients.items():
        mean = sum(own[key] for _, own in found if key in own) / size
        assert float((mean - gradient).abs().max()) <= TOLERANCE * max(1.0, float(gradient.abs().max())), key
