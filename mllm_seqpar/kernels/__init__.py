"""Block kernels behind one protocol, and the choice among them.

    kernel, reason = choose_kernel("auto", q, k)
    o, lse = kernel.forward(q, k, v, scale=scale)                       # one block; blocks merge by their lse
    rows = FinalRows(q, o, lse, do)                                     # o, lse of the MERGED rows
    dq, dk, dv = kernel.backward(rows, k, v, scale=scale)               # gradients of blocks add up

`kernels.base` defines the protocol.
"""

from .base import BlockKernel, FinalRows
from .registry import KernelOption, KernelRate, available_kernels, choose_kernel, kernel_by_name, kernel_names

__all__ = [
    "BlockKernel",
    "FinalRows",
    "KernelOption",
    "KernelRate",
    "available_kernels",
    "choose_kernel",
    "kernel_by_name",
    "kernel_names",
]
