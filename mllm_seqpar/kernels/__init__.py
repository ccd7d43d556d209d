"""Block kernels behind one protocol, and the choice among them.

    kernel, reason = choose_kernel("auto", q, k)
    o, lse = kernel.forward(q, k, v, scale=scale)                       # one block; blocks merge by their lse
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, scale=scale)      # o, lse of the MERGED rows; gradients add up

`kernels.base` defines the protocol.
"""

from .base import BlockKernel
from .registry import KernelOption, KernelRate, available_kernels, choose_kernel, kernel_by_name, kernel_names

__all__ = [
    "BlockKernel",
    "KernelOption",
    "KernelRate",
    "available_kernels",
    "choose_kernel",
    "kernel_by_name",
    "kernel_names",
]
