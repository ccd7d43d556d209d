"""Which rank owns which frames and text tokens: frames in contiguous ranges, tokens in one of three layouts.

The functions are pure index arithmetic, the same on every rank; `shard_sequence` and `unshard_sequence` apply it to
tensors. The objective is the sum of all ranks' losses: the adjoint of a slice pads with zeros, and the adjoint of an
all-gather sums over ranks. The average of parameter gradients over the group is then the gradient of one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from .comm import Group, as_communicator
from .comm.autograd import gather_shards
from .errors import ConfigError, ShapeError

LAYOUTS = ("zigzag", "striped", "contiguous")


@dataclass(frozen=True)
class FrameShard:
    """The frames ``start <= f < stop`` of `total`, for a caller that passes only this rank's shard.

    `start` and `stop` must be those of `frame_range(total, group)`.
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        if not all(map(_is_count, (self.start, self.stop, self.total))):
            raise ShapeError(
                f"FrameShard: start={self.start!r}, stop={self.stop!r}, total={self.total!r}; expected three ints"
            )
        if not 0 <= self.start <= self.stop <= self.total:
            raise ShapeError(
                f"FrameShard: start={self.start}, stop={self.stop}, total={self.total}; "
                "needs 0 <= start <= stop <= total"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def frame_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of every rank's frames: contiguous; the first ``total % size`` ranks hold one more."""
    base, extra = divmod(total, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def frame_range(total: int, group: Group = None) -> range:
    """Return the global numbers of this rank's frames out of `total`; the range may be empty."""
    if not _is_count(total) or total < 0:
        raise ShapeError(f"frame_range: total={total!r}; expected the number of frames, an int of 0 or more")
    comm = as_communicator(group)
    return range(*frame_bounds(total, comm.size)[comm.rank])


def shard_multiple(size: int, layout: str) -> int:
    """Return the number that the length of a sequence must be a multiple of, to be sharded over `size` ranks."""
    if layout not in LAYOUTS:
        raise ConfigError(f"text_layout: {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    return size if size == 1 or layout != "zigzag" else 2 * size


def padded_length(total: int, size: int, layout: str) -> int:
    """Return the smallest positive length from `total` on that can be sharded over `size` ranks."""
    step = shard_multiple(size, layout)
    return max(step, (total + step - 1) // step * step)


def sequence_positions(total: int, rank: int, size: int, layout: str) -> Tensor:
    """Return the global positions of the tokens of `rank`, ascending, (total / size,) int64 on the CPU.

    zigzag: chunks `rank` and ``2 * size - 1 - rank`` of ``2 * size`` equal chunks; striped: every size-th token from
    `rank` on; contiguous: the rank-th of `size` equal chunks. Zigzag and striped balance causal attention.
    """
    step = shard_multiple(size, layout)
    if total % step:
        raise ShapeError(
            f"a sequence of {total} tokens cannot be sharded over {size} ranks in the {layout} layout; pad it to a "
            f"multiple of {step}, for example to {padded_length(total, size, layout)}"
        )
    if layout == "striped":
        return torch.arange(rank, total, size)
    if layout == "contiguous" or size == 1:
        chunk = total // size
        return torch.arange(rank * chunk, (rank + 1) * chunk)
    chunk = total // (2 * size)
    tail = 2 * size - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(tail * chunk, (tail + 1) * chunk)])


def shard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """(..., S, ...), the same on every rank -> this rank's (..., S / n, ...) along `dim`. No communication.

    Raises:
        ShapeError: S is not a multiple of `shard_multiple(n, layout)`.
    """
    comm = as_communicator(group)
    index = sequence_positions(x.shape[dim], comm.rank, comm.size, layout)
    return x if comm.size == 1 else x.index_select(dim, index.to(x.device))


def unshard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """This rank's (..., s, ...) -> (..., n * s, ...) on every rank, in the original order, by one all-gather.

    The inverse of `shard_sequence`. Differentiable: backward sums the ranks' gradients of each token.
    """
    comm = as_communicator(group)
    if comm.size == 1:
        return x
    total = x.shape[dim] * comm.size
    order = torch.cat([sequence_positions(total, rank, comm.size, layout) for rank in range(comm.size)])
    gathered = torch.cat(gather_shards(x, comm), dim=dim)
    return gathered.index_select(dim, torch.argsort(order).to(x.device))
