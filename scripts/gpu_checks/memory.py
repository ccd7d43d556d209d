"""What a forward pass saves for backward, with and without recomputing K and V of the frames, and the cost in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_checks.model import build, inputs
from gpu_checks.rows import Row

from mllm_seqpar import patch_model, unpatch_model

SIZES = {"cuda": (64, 1024), "cpu": (4, 48)}
"""Frames of the shorter video, and text tokens."""
GROWTH = 0.02
"""Growth that recomputation may have, as a fraction of the growth without it. It should be zero."""


def check(device: str) -> Iterator[Row]:
    """Yield the bytes saved for a video and for one twice as long, and the time of a step."""
    from harness import medians_ms

    frames, length = SIZES[device]
    model = build(device)
    model.vision_model.requires_grad_(False)
    saved: dict[str, list[int]] = {}
    times = {}
    shorter, longer = (inputs(model, count, length, encoded=True) for count in (frames, 2 * frames))
    for name, recompute in (("recomputed", True), ("stored", False)):
        patch_model(model, recompute_visual=recompute)
        saved[name] = []
        for given in (shorter, longer):
            excluded = [*model.parameters(), *given.values()]
            saved[name].append(saved_bytes(lambda given=given: model(**given, use_cache=False).loss, excluded))
        steps = {name: lambda: model(**shorter, use_cache=False).loss.backward()}
        times |= medians_ms(steps, device, repeats=5)
        unpatch_model(model)
    growth = {name: second - first for name, (first, second) in saved.items()}
    allowed = GROWTH * growth["stored"]
    limits = {"recomputed": (f"growth {mib(allowed)}", growth["recomputed"] <= allowed), "stored": ("", None)}
    for name, (first, second) in saved.items():
        found = f"{mib(first)} for {frames} frames, {mib(second)} for {2 * frames}"
        yield Row("memory", f"K and V {name}, 1 hyper layer", found, *limits[name])
    ratio = times["recomputed"] / times["stored"]
    found = f"{times['recomputed']:.1f} ms recomputed, {times['stored']:.1f} ms stored: {ratio:.3f} x"
    yield Row("memory", f"forward and backward, {frames} frames, 2 layers", found)


def mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def saved_bytes(run: Callable[[], torch.Tensor], excluded: list[torch.Tensor]) -> int:
    """Return the bytes that a result's graph holds in addition to `excluded`, from the allocator (CUDA) or autograd
    (CPU).
    """
    from harness import SavedBytes

    if excluded[0].is_cuda:
        run()  # the first call allocates workspaces that are never freed
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run()
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated() - before
        del loss
        return size
    saved = SavedBytes(excluded)
    with saved.counting():
        run()
    return saved.bytes
