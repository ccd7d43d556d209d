"""Dense attention in float64, with memory in S x T: the reference that tests compare against."""

from __future__ import annotations

import torch
from torch import Tensor

from . import base


class ReferenceKernel:
    name = "reference"

    def unsupported_reason(self, q: Tensor, k: Tensor, *, causal: bool, masked: bool) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if base.is_empty(q, k):
            return base.empty_forward(q)
        scores = _scores(q, k, scale, causal, mask)
        lse = scores.logsumexp(dim=-1)
        p = torch.exp(scores - base.safe_lse(lse).unsqueeze(-1))
        o = torch.einsum("bgrst,bgtd->bgrsd", p, v.double())
        out = base.accumulator(q.dtype)
        return o.reshape(q.shape).to(out), lse.reshape(q.shape[:3]).to(out)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        lse: Tensor,
        *,
        scale: float,
        causal: bool = False,
        mask: Tensor | None = None,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if base.is_empty(q, k):
            return base.empty_backward(q, k, v)
        delta = base.delta_of(do, o, delta)
        q5, do5, delta5 = (_group(x, k.shape[1]).double() for x in (q, do, delta))
        p = torch.exp(
            _scores(q, k, scale, causal, mask) - base.safe_lse(_group(lse, k.shape[1]).double()).unsqueeze(-1)
        )
        dp = torch.einsum("bgrsd,bgtd->bgrst", do5, v.double())
        ds = p * (dp - delta5.unsqueeze(-1)) * scale
        dq = torch.einsum("bgrst,bgtd->bgrsd", ds, k.double()).reshape(q.shape)
        dk = torch.einsum("bgrst,bgrsd->bgtd", ds, q5)
        dv = torch.einsum("bgrst,bgrsd->bgtd", p, do5)
        out = base.accumulator(q.dtype)
        return dq.to(out), dk.to(out), dv.to(out)


def _group(x: Tensor, groups: int) -> Tensor:
    """(B, H, S, ...) -> (B, G, R, S, ...)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """Return the scaled scores (B, G, R, S, T) in float64, -inf for hidden entries."""
    scores = torch.einsum("bgrsd,bgtd->bgrst", _group(q, k.shape[1]).double(), k.double()) * scale
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().unsqueeze(0)
    return scores if mask is None else scores.masked_fill(~mask[:, None, None], -torch.inf)
