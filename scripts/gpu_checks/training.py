"""A training step with the real width on two ranks in one process, against the unpatched model."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from gpu_checks.kernels import relative
from gpu_checks.model import DTYPE, build, gradients, inputs
from gpu_checks.rows import Row

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.models.mplug_owl3.configuration import GATES

RANKS = 2
SIZES = {"cuda": (16, 512), "cpu": (3, 40)}
"""Frames and text tokens."""
ALLOWED = {torch.bfloat16: (1e-2, 5e-2), torch.float32: (1e-5, 1e-5)}
"""Largest relative difference of the loss, and of any parameter's gradient.

The two computations round differently through two layers and a vision tower, to 8 or to 24 bits of mantissa.
"""


def check(device: str) -> Iterator[Row]:
    """Yield loss and gradients against the unpatched model, and time and memory of a step, for each kind of gate."""
    return chain.from_iterable(check_gate(gate, device) for gate in GATES)


def check_gate(gate: str | None, device: str) -> Iterator[Row]:
    frames, length = SIZES[device]
    model = build(device, gate)
    given = inputs(model, frames, length)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    unpatched = copy.deepcopy(model)
    loss = unpatched(**given, use_cache=False).loss
    loss.backward()
    exact_loss, exact = float(loss.detach()), gradients(unpatched)
    del unpatched, loss
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    models = [model] + [copy.deepcopy(model) for _ in range(RANKS - 1)]
    steps = run_loopback(RANKS, lambda comm: train(models[comm.rank], given, comm))
    loss_limit, gradient_limit = ALLOWED[DTYPE[device]]
    subject = f"gate {gate}, {RANKS} ranks, {count:.0f} M parameters"
    losses, found_gradients, seconds = zip(*steps, strict=True)
    error = max(abs(loss - exact_loss) / abs(exact_loss) for loss in losses)
    found = f"loss {losses[0]:.5f}, error {error:.1e}"
    yield Row("training", subject, found, f"{loss_limit:g}", error <= loss_limit)
    # A bias of keys adds one number to all scores of a row, and softmax is invariant to that: its gradient is rounding
    # error only. (In the language model, keys are rotated after the bias, so this does not hold there.)
    names = [name for name in exact if not (name.startswith("vision_model") and name.endswith("k_proj.bias"))]
    worst, name = max((relative(found_gradients[0][name], exact[name].double()), name) for name in names)
    found = f"largest error of a gradient {worst:.1e} ({name})"
    yield Row("training", subject, found, f"{gradient_limit:g}", worst <= gradient_limit)
    same = all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    found = f"parameters {'equal' if same else 'differ'} on the ranks"
    yield Row("training", f"gate {gate}, after two AdamW steps", found, "", same)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB for all ranks" if device == "cuda" else ""
    tokens = frames * (given["pixel_values"].shape[-1] // 14) ** 2
    found = f"{max(seconds) * 1e3:.0f} ms a step{peak}"
    yield Row("training", f"gate {gate}, {frames} frames, {tokens} visual tokens", found)


def train(model: Any, given: dict, comm: Communicator) -> tuple[float, dict[str, torch.Tensor], float]:
    """Take two steps of AdamW on averaged gradients; return loss and gradients of the first, seconds of the second."""
    patch_model(model, group=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    first: tuple[float, dict[str, torch.Tensor]] | None = None
    for _ in range(2):
        start = time.perf_counter()
        loss = model(**given, use_cache=False).loss
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.copy_(comm.all_reduce(p.grad) / comm.size)
        first = first or (float(loss.detach()), gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if loss.is_cuda:
            torch.cuda.synchronize()
    return *first, time.perf_counter() - start
