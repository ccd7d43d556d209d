"""What FlashAttention 2, 3 and 4 compute, for the operators in torch and for the packages.

Sources: csrc/flash_attn/flash_api.cpp (2), hopper/flash_api.cpp (3) and flash_attn/cute/interface.py (4) of
Dao-AILab/flash-attention; torch/nn/attention/_fa3.py and _fa4.py of torch 2.13.

| | FlashAttention 2 | 3 | 4 |
|---|---|---|---|
| compute capability | 8.0 and later | 9.x | 9.x, 10.x |
| head_dim, a multiple of 8 | up to 256 | up to 256; deterministic: 192 | up to 256 on 9.x, 128 on 10.x |
| mask | no | no | no |
"""

from __future__ import annotations

import torch


def flash2_unsupported_reason(dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
    """Return why FlashAttention 2 cannot compute a block, or None."""
    if masked:
        return "takes no mask"
    if dim > 256:
        return f"takes head dims up to 256, got {dim}"
    if 192 < dim <= 224 and capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        # Backward needs more shared memory for these than consumer GPUs have.
        return f"does not differentiate head dims 193 to 224 on compute capability {capability[0]}.{capability[1]}"
    return None


def flash3_unsupported_reason(dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
    """Return why FlashAttention 3 cannot compute a block, or None."""
    if masked:
        return "takes no mask"
    if capability[0] != 9:
        return f"needs compute capability 9.x (Hopper), got {capability[0]}.{capability[1]}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    limit = 192 if deterministic else 256
    if dim > limit:
        return f"takes head dims up to {limit}{' with deterministic algorithms' if deterministic else ''}, got {dim}"
    return None


def flash4_unsupported_reason(dim: int, masked: bool, capability: tuple[int, int]) -> str | None:
    """Return why FlashAttention 4 cannot compute a block, or None."""
    if masked:
        return "takes no mask"
    if capability[0] not in (9, 10):
        return f"needs compute capability 9.x or 10.x, got {capability[0]}.{capability[1]}"
    limit = 256 if capability[0] == 9 else 128
    if dim > limit:
        return f"takes head dims up to {limit} on compute capability {capability[0]}.x, got {dim}"
    return None


def activated_flash() -> str | None:
    """Return the implementation that the user has activated under torch's flash operators, or None for torch's own.

    `torch.nn.attention.activate_flash_attention_impl("FA3")` replaces the operators of the whole process. It is the
    user's choice; nothing in this package activates one.
    """
    return torch.nn.attention.current_flash_attention_impl()
