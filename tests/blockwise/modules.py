"""Token-wise modules that the tests compute in chunks, and the plain results that they must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.checkpointing.chunked_mlp import TokenwiseFunction, run_in_chunks

WIDTH = 8


class Gated(nn.Module):
    """Three projections, as LLaMA's, Qwen2's, IDEFICS' and Mllama's MLPs."""

    def __init__(self, inner: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training))


class Residual(nn.Module):
    """Two inputs, as MPT's MLP, and dropout that no module shows."""

    def __init__(self, inner: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), dropout

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training) + residual


def normed(inner: int = 24, dropout: float = 0.0) -> nn.Sequential:
    """With its own norm, as OpenFlamingo's gated cross-attention."""
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, WIDTH)
    )


KINDS: dict[str, Any] = {"gated": Gated, "residual": Residual, "normed": normed}


def made(kind: str, dtype: torch.dtype = torch.float64, **arguments: Any) -> nn.Module:
    """A module with random weights, always the same."""
    torch.manual_seed(0)
    return KINDS[kind](**arguments).to(dtype)


def inputs_for(kind: str, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """As many inputs (*shape, WIDTH) as the module takes; they want gradients."""
    generator = torch.Generator().manual_seed(1)
    count = 2 if kind == "residual" else 1
    drawn = torch.randn(count, *shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return [x.clone().requires_grad_() for x in drawn]


def chunked(module: nn.Module, size: int, *inputs: Tensor) -> Tensor:
    """The module in chunks of `size` tokens."""
    return run_in_chunks(TokenwiseFunction(module.forward, [module], module), size, *inputs)


def weights_of(y: Tensor) -> Tensor:
    """Random numbers that make a loss of y in which no gradient repeats."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)


def gradients(y: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """Those of a weighted sum of y."""
    return list(torch.autograd.grad((y * weights_of(y)).sum(), of))
