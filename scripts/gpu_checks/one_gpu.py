"""On one GPU: the kernel that "auto" takes, and the host synchronisations of a patched model's forward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from gpu_checks.kernels import SIZES
from gpu_checks.model import build, inputs
from gpu_checks.rows import Row
from gpu_checks.trace import host_synchronisations

from mllm_seqpar import patch_model
from mllm_seqpar.kernels import choose_kernel

FRAMES, LENGTH = 4, 48
SYNCHRONISATIONS = 2
"""Host synchronisations that a forward pass may have, all of them outside of layers."""
VERSION_2 = ("flash_attn", "cuda_flash")
"""The kernels that compute with FlashAttention 2; PyTorch's is 3 or 4 where the user has activated that."""


def check(device: str) -> Iterator[Row]:
    """Yield the kernels of "auto", and the synchronisations of a forward pass."""
    yield from (auto_kernel(device, **kind) for kind in ({}, {"causal": True}, {"masked": True}))
    model = build(device)
    given = inputs(model, FRAMES, LENGTH, encoded=True)
    patch_model(model)
    yield synchronisations(lambda: model(**given, use_cache=False), device, "patched model, 1 rank")


def auto_kernel(device: str, causal: bool = False, masked: bool = False) -> Row:
    """Return the row of the kernel that "auto" takes in bf16; FlashAttention 2 fails on Hopper if 3 or 4 is there."""
    _, heads, groups, _, _, dim = SIZES[device]
    q, k = (torch.zeros(1, h, 64, dim, dtype=torch.bfloat16, device=device) for h in (heads, groups))
    kernel = choose_kernel("auto", q, k, causal=causal, masked=masked)[0]
    subject = f"bf16, head_dim {dim}, {'causal' if causal else 'masked' if masked else 'plain'}"
    if device == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        return Row("auto kernel", subject, kernel.name)
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    newer = [name for name in ("flash_attn_interface", "flash_attn.cute") if is_installed(name)]
    found = f"{kernel.name}; activated in torch: {activated}; installed: {', '.join(newer) or 'neither 3 nor 4'}"
    version_2 = kernel.name in VERSION_2 and activated is None
    return Row("auto kernel", subject, found, "not FlashAttention 2", not (newer and version_2))


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def synchronisations(run: Any, device: str, subject: str) -> Row:
    """Return the row of the host synchronisations of one call, after one call that is not counted."""
    if device != "cuda":
        return Row("host synchronisations", subject, "not measurable without CUDA")
    run()
    lines = host_synchronisations(run)
    found = f"{lines.total()} in a forward pass" + "".join(f"; {line} x {count}" for line, count in lines.items())
    return Row("host synchronisations", subject, found, str(SYNCHRONISATIONS), lines.total() <= SYNCHRONISATIONS)
