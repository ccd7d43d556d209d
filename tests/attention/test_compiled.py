"""Layer: one process. Distributed attention inside torch.compile: one break of the graph, the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mllm_seqpar.attention import decode_attention, lv_xattn, ulysses_attention
from mllm_seqpar.masks import FrameMask

MASK = FrameMask.from_dense(torch.ones(1, 6, 3, dtype=torch.bool).tril(), 2)


@pytest.mark.parametrize("attention", [lv_xattn, ulysses_attention, decode_attention])
def test_what_plans_and_sends_stays_out_of_the_graph(attention: Callable[..., Tensor]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, mask=MASK) * 3

    wants_grad = attention is not decode_attention
    leaves = [torch.randn(1, heads, 6, 8).requires_grad_(wants_grad) for heads in (4, 2, 2)]
    compiled = torch.compile(layer, backend=kept)
    for _ in range(2):
        found, right = compiled(*leaves), layer(*leaves)
        assert torch.equal(found, right)
        if wants_grad:
            for a, b in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (found, right)), strict=True):
                assert torch.equal(a, b)
    assert [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs] == [1, 1]
