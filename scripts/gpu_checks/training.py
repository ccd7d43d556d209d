"""A training step of the real width on two ranks in one process, against the unpatched model on one."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks.kernels import relative
from gpu_checks.model import DTYPE, build, gradients, pixels, text
from gpu_checks.rows import Row

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.models.mplug_owl3.configuration import GATES

RANKS = 2
SIZES = {"cuda": (16, 512), "cpu": (3, 40)}
"""Frames and tokens of text."""
ALLOWED = {torch.bfloat16: (1e-2, 5e-2), torch.float32: (1e-5, 1e-5)}
"""Relative difference of the loss, and of any parameter's gradient.

The two computations round differently: 8 bits of mantissa through two layers and a vision tower, or 24 bits.
"""


def check_training(device: str) -> Iterator[Row]:
    """Yield loss and gradients against the unpatched model, and time and memory of a step, with each kind of gate."""
    for gate in GATES:
        yield from check_gate(gate, device)


def check_gate(gate: str | None, device: str) -> Iterator[Row]:
    """Yield the rows of one gate."""
    frames, length = SIZES[device]
    inputs = text(frames, length, device) | pixels(frames, device)
    model: Any = build(device, gate)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    alone = copy.deepcopy(model)
    loss = alone(**inputs, use_cache=False).loss
    loss.backward()
    exact_loss, exact = float(loss), gradients(alone)
    del alone, loss
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    models = [model] + [copy.deepcopy(model) for _ in range(RANKS - 1)]
    steps = run_loopback(RANKS, lambda comm: train(models[comm.rank], inputs, comm))
    of_loss, of_gradient = ALLOWED[DTYPE[device]]
    subject = f"gate {gate}, {RANKS} ranks, {count:.0f} M parameters"
    off = max(abs(step.loss - exact_loss) / abs(exact_loss) for step in steps)
    yield Row("training", subject, f"loss {steps[0].loss:.5f}, off by {off:.1e}", f"{of_loss:g}", off <= of_loss)
    # A bias on keys adds one number to all scores of a row, which softmax does not see: its gradient is rounding only.
    # (Not so in the text, where keys are rotated.)
    names = [name for name in exact if not (name.startswith("vision_model") and name.endswith("k_proj.bias"))]
    worst, name = max((relative(steps[0].gradients[name], exact[name].double()), name) for name in names)
    found = f"gradients off by at most {worst:.1e} ({name})"
    yield Row("training", subject, found, f"{of_gradient:g}", worst <= of_gradient)
    same = all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    found = f"parameters {'equal' if same else 'differ'} on the ranks"
    yield Row("training", f"gate {gate}, after two AdamW steps", found, "", same)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB for all ranks" if device == "cuda" else ""
    tokens = frames * (inputs["pixel_values"].shape[-1] // 14) ** 2
    found = f"{max(step.seconds for step in steps) * 1e3:.0f} ms a step{peak}"
    yield Row("training", f"gate {gate}, {frames} frames, {tokens} visual tokens", found)


@dataclass
class Trained:
    """Loss and gradients of the first step of a rank, and the time of the second."""

    loss: float
    gradients: dict[str, torch.Tensor]
    seconds: float


def train(model: Any, inputs: dict, comm: Communicator) -> Trained:
    """Take two steps on one rank: forward, backward, the group's mean of every gradient, AdamW."""
    patch_model(model, group=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    result: Trained | None = None
    for _ in range(2):
        start = time.perf_counter()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.copy_(comm.all_reduce(p.grad) / comm.size)
        result = result or Trained(float(loss.detach()), gradients(model), 0.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss.is_cuda:
            torch.cuda.synchronize()
        result.seconds = time.perf_counter() - start
    assert result is not None
    return result
