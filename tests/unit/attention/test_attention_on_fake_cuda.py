"""Layer: one process. Distributed attention with autograd on a fake CUDA device: no rank waits for its device.

Ranks are threads. Every operator has the shapes, dtypes and devices of a GPU and no data (`fake_cuda`).
"""

from __future__ import annotations

import pytest
import torch

from fake_cuda import NoHostSynchronisation, fake_cuda
from mllm_seqpar.attention import functional
from mllm_seqpar.comm import run_loopback


def step(comm, mode, name, **options):
    """Compute one attention and its gradients on this rank."""
    with mode, NoHostSynchronisation():
        shapes = ((4, 8), (2, 8 if options.get("causal") else 12), (2, 8 if options.get("causal") else 12))
        q, k, v = (
            torch.empty(2, h, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h, length in shapes
        )
        o = getattr(functional, name)(q, k, v, group=comm, **options)
        o.float().square().sum().backward()
    assert o.shape == q.shape and o.dtype == q.dtype
    for x in (q, k, v):
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, x.dtype, x.device)
    return str(o.device)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lv_xattn", {}),
        ("ring_attention", {}),
        ("ring_attention", {"causal": True}),
        ("mesh_attention", {}),
        ("ulysses_attention", {}),
    ],
)
def test_no_rank_waits_for_its_device(name, options):
    with fake_cuda(autograd=True, may_synchronise=True) as mode:
        assert run_loopback(2, lambda comm: step(comm, mode, name, **options)) == ["cuda:0", "cuda:0"]
