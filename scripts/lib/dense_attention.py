"""Float64 dense attention, written from the definition: what every distributed result is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def _scores(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v for every sample and query head, the scores, and their log-sum-exp."""
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = scale * q @ k.mT
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    return k, v, scores, torch.logsumexp(scores, dim=-1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v in float64; q (B, H, S, D), k and v (B, G, T, D), visible (B or 1, S, T) bool or None.

    Rows that see nothing give o = 0, lse = -inf.
    """
    _, v, scores, lse = _scores(q.double(), k.double(), v.double(), visible, scale)
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)) @ v, lse


def squared_terms(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """Return the sum of squares of the terms that attention and its backward pass add up, for each row or key.

    Its root is what the rounding error of any implementation is proportional to. Where terms do not cancel it is about
    the size of the result; where they do, as in dq with a single visible key, the result says nothing about rounding.
    "o", "lse", "dq" are (B, H, S), "dk", "dv" are (B, H, T): key heads are repeated, sums over their rows are left out.
    """
    q, do = q.double(), do.double()
    k, v, scores, lse = _scores(q, k.double(), v.double(), visible, scale)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    p2, o = p.square(), p @ v
    # ds = p (dp - delta), where dp and delta are sums over the head's channels
    ds2 = scale**2 * p2 * (do.square() @ v.square().mT + (do * o).square().sum(-1, keepdim=True))
    scores2 = scale**2 * q.square() @ k.square().mT + scores.square()
    return {
        "o": (p2 @ v.square()).sum(-1),
        "lse": (p2 * scores2.masked_fill(p2 == 0, 0.0)).sum(-1),
        "dq": (ds2 @ k.square()).sum(-1),
        "dk": (ds2.mT @ q.square()).sum(-1),
        "dv": (p2.mT @ do.square()).sum(-1),
    }
