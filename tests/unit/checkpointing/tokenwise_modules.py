"""Token-wise modules for the tests of chunked MLPs, and helpers to compute and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.checkpointing.chunked_mlp import TokenwiseFunction, run_in_chunks

WIDTH = 8


class Gated(nn.Module):
    """Three projections, as in the MLPs of LLaMA, Qwen2, IDEFICS and Mllama."""

    def __init__(self, inner: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training))


class Residual(nn.Module):
    """Two inputs, as in MPT's MLP, and dropout without a module."""

    def __init__(self, inner: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), dropout

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training) + residual


def normed(inner: int = 24, dropout: float = 0.0) -> nn.Sequential:
    """With its own norm, as in OpenFlamingo's gated cross-attention."""
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, WIDTH)
    )


KINDS: dict[str, Any] = {"gated": Gated, "residual": Residual, "normed": normed}


def module_and_inputs(
    kind: str = "gated", *shape: int, dtype: torch.dtype = torch.float64, **arguments: Any
) -> tuple[Any, list[Tensor]]:
    """Return a module with fixed random weights, and its inputs (*shape, WIDTH), (2, 7) tokens by default."""
    torch.manual_seed(0)
    module = KINDS[kind](**arguments).to(dtype)
    count = 2 if kind == "residual" else 1
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, *(shape or (2, 7)), WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return module, [x.clone().requires_grad_() for x in values]


def chunked(module: nn.Module, size: int, *inputs: Tensor) -> Tensor:
    return run_in_chunks(TokenwiseFunction(module.forward, [module], module), size, *inputs)


def weighted_sum(y: Tensor) -> Tensor:
    """Return a loss of `y` whose gradient differs in every entry."""
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)).sum()


def with_gradients(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return `y` and the gradients of its weighted sum."""
    return [y, *torch.autograd.grad(weighted_sum(y), leaves)]
