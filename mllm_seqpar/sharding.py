"""Which rank owns which frames and text tokens: frames in contiguous ranges, tokens in one of three layouts.

The functions are pure index arithmetic, the same on every rank; `shard_sequence` and `unshard_sequence` apply it to
tensors. The objective is the sum of all ranks' losses: the adjoint of a slice pads with zeros, and the adjoint of an
all-gather sums over ranks. The average of parameter gradients over the group is then the gradient of one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

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


class HostFrames:
    """Frames, or visual features, that stay in host memory until the patched model moves this rank's, some at a time.

    FSDP2, DDP, accelerate and `Trainer` move the tensors among the arguments of a model to its device, and the root of
    FSDP2 casts them under a mixed-precision policy: all frames of a rank at once, and the whole of a mapped file. They
    pass on an object of this class as it is::

        model(**text, image_embeds=HostFrames(features), visual_shard=shard)

    `SeqParTrainer` makes them of the frames that the data collator returns.
    """

    # A dataclass, or a class with a method `to`, would be taken apart or moved.
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"HostFrames({self.tensor.dtype}, {tuple(self.tensor.shape)} on {self.tensor.device})"


def tensor_of(value: Any) -> Any:
    """Return the tensor of a `HostFrames`, and any other value unchanged."""
    return value.tensor if isinstance(value, HostFrames) else value


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


@lru_cache(maxsize=256)
def sequence_positions(total: int, rank: int, size: int, layout: str) -> Tensor:
    """Return the global positions of the tokens of `rank`, ascending, (total / size,) int64 on the CPU.

    zigzag: chunks `rank` and ``2 * size - 1 - rank`` of ``2 * size`` equal chunks; striped: every size-th token from
    `rank` on; contiguous: the rank-th of `size` equal chunks. Zigzag and striped balance causal attention.
    """
    positions = torch.arange(total)
    return torch.cat([positions[span] for span in _spans(total, rank, size, layout)])


def _spans(total: int, rank: int, size: int, layout: str) -> list[slice]:
    """Return the tokens of `rank`. Slices, unlike indices, need no tensor that is copied to the device."""
    step = shard_multiple(size, layout)
    if total % step:
        raise ShapeError(
            f"a sequence of {total} tokens cannot be sharded over {size} ranks in the {layout} layout; pad it to a "
            f"multiple of {step}, for example to {padded_length(total, size, layout)}"
        )
    if layout == "striped":
        return [slice(rank, total, size)]
    chunks, numbers = (2 * size, (rank, 2 * size - 1 - rank)) if layout == "zigzag" and size > 1 else (size, (rank,))
    length = total // chunks
    return [slice(number * length, (number + 1) * length) for number in numbers]


def shard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """(..., S, ...), the same on every rank -> this rank's (..., S / n, ...) along `dim`. No communication.

    Raises:
        ShapeError: S is not a multiple of `shard_multiple(n, layout)`.
    """
    comm = as_communicator(group)
    if comm.size == 1:
        shard_multiple(1, layout)  # checks the name of the layout
        return x
    spans = _spans(x.shape[dim], comm.rank, comm.size, layout)
    return torch.cat([x[(slice(None),) * (dim % x.dim()) + (span,)] for span in spans], dim)


def unshard_sequence(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """This rank's (..., s, ...) -> (..., n * s, ...) on every rank, in the original order, by one all-gather.

    The inverse of `shard_sequence`. Differentiable: backward sums the ranks' gradients of each token.
    """
    comm = as_communicator(group)
    if comm.size == 1:
        return x
    length = x.shape[dim]
    _spans(length * comm.size, comm.rank, comm.size, layout)  # checks the length
    gathered = gather_shards(x, comm)
    if layout == "striped":
        return torch.stack(gathered, dim % x.dim() + 1).flatten(dim % x.dim(), dim % x.dim() + 1)
    if layout == "contiguous":
        return torch.cat(gathered, dim)
    halves = [shard.split(length // 2, dim) for shard in gathered]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)
