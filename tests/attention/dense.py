"""Float64 dense attention, written from the definition: what every distributed result is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v in float64; q (B, H, S, D), k and v (B, G, T, D), visible (B or 1, S, T) bool or None.

    Rows that see nothing give o = 0, lse = -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return p @ v, lse


def relative_error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in the Euclidean norm, in float64; absolute where the reference is zero."""
    x, reference = x.double(), reference.double()
    assert x.shape == reference.shape, (x.shape, reference.shape)
    assert torch.isfinite(x).all()
    norm = reference.norm().item()
    return ((x - reference).norm() / (norm or 1.0)).item()
