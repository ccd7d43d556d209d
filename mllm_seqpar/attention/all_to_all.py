"""The two all-to-alls of attention dealt by heads: rows with all heads -> all rows of some heads, and back.

Gradients: the adjoint of dealing is collecting, and what several ranks have of one head then adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mllm_seqpar.comm import Communicator, Recv, Send


class HeadTensor(NamedTuple):
    """A tensor that changes hands: which of its heads each rank takes, how long each rank's part is, in what order.

    `order` sorts the parts of all ranks, one after another; None leaves them so.
    """

    label: str
    heads: Sequence[range]
    lengths: Sequence[int]
    order: Tensor | None


def shard_heads(xs: Sequence[Tensor], items: Sequence[HeadTensor], comm: Communicator) -> list[Tensor]:
    """By rows -> by heads: (B, all heads, this rank's length, D) -> (B, this rank's heads, all lengths, D)."""
    sends, recvs, arrived = [], [], []
    for x, item in zip(xs, items, strict=True):
        parts = []
        for peer, heads in enumerate(item.heads):
            mine = x[:, heads.start : heads.stop].contiguous()
            if peer == comm.rank:
                parts.append(mine)
                continue
            parts.append(x.new_empty((x.shape[0], len(item.heads[comm.rank]), item.lengths[peer], x.shape[3])))
            sends += [Send(peer, mine, item.label)] if mine.numel() else []
            recvs += [Recv(peer, parts[-1])] if parts[-1].numel() else []
        arrived.append(parts)
    comm.exchange(sends, recvs).wait()
    whole = [torch.cat(parts, dim=2) for parts in arrived]
    return [
        x if i.order is None else x.index_select(2, i.order.to(x.device)) for x, i in zip(whole, items, strict=True)
    ]


def gather_heads(xs: Sequence[Tensor], items: Sequence[HeadTensor], comm: Communicator) -> list[Tensor]:
    """By heads -> by rows, the adjoint of `shard_heads`: what several ranks have of one head adds up."""
    sends, recvs, arrived = [], [], []
    for x, item in zip(xs, items, strict=True):
        if item.order is not None:
            x = torch.empty_like(x).index_copy_(2, item.order.to(x.device), x)
        parts = []
        for peer, part in enumerate(x.split(list(item.lengths), dim=2)):
            if peer == comm.rank:
                parts.append(part)
                continue
            part = part.contiguous()
            length = item.lengths[comm.rank]
            parts.append(x.new_empty((x.shape[0], len(item.heads[peer]), length, x.shape[3])))
            sends += [Send(peer, part, item.label)] if part.numel() else []
            recvs += [Recv(peer, parts[-1])] if parts[-1].numel() else []
        arrived.append(parts)
    comm.exchange(sends, recvs).wait()
    return [_assembled(parts, item.heads) for parts, item in zip(arrived, items, strict=True)]


def _assembled(parts: Sequence[Tensor], heads: Sequence[range]) -> Tensor:
    if sum(map(len, heads)) == heads[-1].stop:
        return torch.cat(list(parts), dim=1)
    first = parts[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros((first.shape[0], heads[-1].stop, *first.shape[2:]), dtype=wide)
    for part, some in zip(parts, heads, strict=True):
        total[:, some.start : some.stop] += part
    return total.to(first.dtype)


class _Deal(torch.autograd.Function):
    """Forward: `shard_heads` of one tensor. Backward: `gather_heads` of its gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, item: HeadTensor, x: Tensor) -> Tensor:
        ctx.comm, ctx.item = comm, item
        return shard_heads([x], [item], comm)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, gather_heads([grad], [ctx.item._replace(label=f"d{ctx.item.label}")], ctx.comm)[0]


class _Collect(torch.autograd.Function):
    """Forward: `gather_heads` of one tensor. Backward: `shard_heads` of its gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, item: HeadTensor, x: Tensor) -> Tensor:
        ctx.comm, ctx.item = comm, item
        return gather_heads([x], [item], comm)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, shard_heads([grad], [ctx.item._replace(label=f"d{ctx.item.label}")], ctx.comm)[0]


def shard_heads_autograd(x: Tensor, item: HeadTensor, comm: Communicator) -> Tensor:
    """Differentiable `shard_heads` for heads of one rank each; gradients are labelled d and the label of `item`."""
    return _Deal.apply(comm, item, x)


def gather_heads_autograd(x: Tensor, item: HeadTensor, comm: Communicator) -> Tensor:
    """`gather_heads`, differentiable likewise."""
    return _Collect.apply(comm, item, x)
