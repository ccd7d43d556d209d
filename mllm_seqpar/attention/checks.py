"""Checks of what a caller passes to the functional layer, before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Communicator
from ..errors import AgreementError, ShapeError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ShapeError unless q (B, H, s_q, D) and k, v (B or 1, G, s_kv, D) fit: G divides H, one dtype, one device."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ShapeError(f"expected q (B, H, s_q, D) and k, v of one shape (B, G, s_kv, D); got {shapes}")
    if k.shape[0] not in (1, q.shape[0]) or k.shape[3] != q.shape[3]:
        raise ShapeError(f"k and v must have q's head dim, and its batch or a batch of 1; got {shapes}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key-value heads: no whole multiple; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ShapeError(
            f"q, k and v must share one dtype and device; got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}"
        )
    if q.dtype not in _DTYPES:
        raise ShapeError(f"q, k and v must be floating point ({', '.join(map(str, _DTYPES))}); got {q.dtype}")


def agree_on_keys(q: Tensor, k: Tensor, comm: Communicator) -> tuple[int, ...]:
    """The number of keys of every rank; one small gather.

    Raises:
        AgreementError: on every rank, when ranks disagree in anything but the number of keys.
    """
    if comm.size == 1:
        return (k.shape[2],)
    mine = [*q.shape, k.shape[0], k.shape[1], k.shape[3], _DTYPES.index(q.dtype), k.shape[2]]
    everyone = comm.gather_ints(mine)
    if any(row[:-1] != everyone[0][:-1] for row in everyone):
        rows = "; ".join(
            f"rank {r}: q {tuple(row[:4])}, k batch {row[4]}, heads {row[5]}, dim {row[6]}, {_DTYPES[row[7]]}"
            for r, row in enumerate(everyone)
        )
        raise AgreementError(f"the ranks of the group pass tensors that do not fit each other. {rows}")
    return tuple(row[-1] for row in everyone)
