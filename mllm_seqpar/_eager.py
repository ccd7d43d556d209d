"""Keeping what no graph can hold out of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which inside torch.compile runs as it is, in a break of the graph.

    For what plans on the host and talks to other ranks: traced, it would be compiled anew for every shape and mask, and
    collectives would be exchanged for others. It is torch.compiler.disable; but that imports torch's compiler, which
    takes as long as all the rest of this package, so here only those who compile do.
    """
    outside: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not outside:
            outside.append(torch.compiler.disable(function))
        return outside[0](*args, **kwargs)

    return call
