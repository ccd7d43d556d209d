"""What a forward pass keeps for backward, with and without recomputing K and V of the frames, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_checks.model import build, embeds, text
from gpu_checks.rows import Row

from mllm_seqpar import patch_model, unpatch_model

SIZES = {"cuda": (64, 1024), "cpu": (4, 48)}
"""Frames (and twice as many), tokens of text."""
GROWTH = 0.02
"""Of what is kept without recomputation; with it, nothing may grow with the video."""


def check_memory(device: str) -> Iterator[Row]:
    """Yield what is kept for a video and for one twice as long, and the time of a step."""
    from measure import medians_ms

    frames, length = SIZES[device]
    model: Any = build(device)
    model.vision_model.requires_grad_(False)
    kept: dict[str, list[int]] = {}
    for name, options in {"recomputed": {"recompute_visual": True}, "kept": {"recompute_visual": False}}.items():
        patch_model(model, **options)
        sizes = []
        for count in (frames, 2 * frames):
            inputs = text(count, length, device) | embeds(count, device)
            given = [*model.parameters(), *inputs.values()]
            sizes.append(kept_bytes(lambda inputs=inputs: model(**inputs, use_cache=False).loss, given))
        kept[name] = sizes
        unpatch_model(model)
    growth = {name: second - first for name, (first, second) in kept.items()}
    for name, (first, second) in kept.items():
        allowed = GROWTH * growth["kept"]
        yield Row(
            "memory",
            f"K and V {name}, 1 hyper layer",
            f"{mib(first)} for {frames} frames, {mib(second)} for {2 * frames}",
            f"growth {mib(allowed)}" if name == "recomputed" else "",
            growth[name] <= allowed if name == "recomputed" else None,
        )
    inputs = text(frames, length, device) | embeds(frames, device)
    times = {}
    for name, recompute in (("recomputed", True), ("kept", False)):
        patch_model(model, recompute_visual=recompute)
        steps = {name: lambda: model(**inputs, use_cache=False).loss.backward()}
        times |= medians_ms(steps, device, repeats=5)
        unpatch_model(model)
    ratio = times["recomputed"] / times["kept"]
    found = f"{times['recomputed']:.1f} ms recomputed, {times['kept']:.1f} ms kept: {ratio:.3f} x"
    yield Row("memory", f"forward and backward, {frames} frames, 2 layers", found)


def mib(size: float) -> str:
    """Return bytes as text."""
    return f"{size / 2**20:.2f} MiB"


def kept_bytes(run: Callable[[], torch.Tensor], given: list[torch.Tensor]) -> int:
    """Return the bytes that the graph of a result holds beside what is given.

    On CUDA by the allocator, on CPU by what autograd saves.
    """
    if given[0].is_cuda:
        run()  # the first call allocates workspaces, which stay
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run()
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated() - before
        del loss
        return size
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run()
        del loss
    for x in given:
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())
