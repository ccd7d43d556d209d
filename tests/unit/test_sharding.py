"""Layer: pure Python, then one process. Which rank owns which frames and tokens, and sharding tensors accordingly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.sharding import (
    LAYOUTS,
    FrameShard,
    frame_bounds,
    frame_range,
    padded_length,
    sequence_positions,
    shard_multiple,
    shard_sequence,
    unshard_sequence,
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_frames_are_sharded_in_order_and_first_ranks_hold_one_more(size: int) -> None:
    for total in range(20):
        bounds = frame_bounds(total, size)
        assert [f for start, stop in bounds for f in range(start, stop)] == list(range(total))
        lengths = [stop - start for start, stop in bounds]
        assert lengths == [total // size + (rank < total % size) for rank in range(size)]


def test_frame_range_of_each_rank() -> None:
    assert frame_range(7) == range(0, 7)
    assert run_loopback(3, lambda comm: frame_range(7, comm)) == [range(0, 3), range(3, 5), range(5, 7)]
    assert run_loopback(3, lambda comm: len(frame_range(1, comm))) == [1, 0, 0]


def test_positions_of_each_layout() -> None:
    found = {layout: [sequence_positions(12, rank, 3, layout).tolist() for rank in range(3)] for layout in LAYOUTS}
    assert found["zigzag"] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert found["striped"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert found["contiguous"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_token_of_the_minimal_padded_text_has_one_owner(size: int, layout: str) -> None:
    step = shard_multiple(size, layout)
    for total in range(40):
        padded = padded_length(total, size, layout)
        assert padded % step == 0 and padded - step < max(total, 1) <= padded
        positions = [sequence_positions(padded, rank, size, layout) for rank in range(size)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(padded))
        assert all(p.numel() == padded // size and bool((p.diff() > 0).all()) for p in positions)


def shard_and_unshard(comm: Communicator, layout: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The unsharded tensor, its gradient under a different loss on each rank, and the shard."""
    x = torch.arange(48.0).view(2, 24).movedim(1, dim % 2).clone().requires_grad_()
    shard = shard_sequence(x, dim, comm, layout)
    whole = unshard_sequence(shard, dim, comm, layout)
    (whole * (comm.rank + 1)).sum().backward()
    return whole.detach(), x.grad, shard.detach()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_unshard_inverts_shard(dim: int, layout: str) -> None:
    expected = torch.arange(48.0).view(2, 24).movedim(1, dim % 2)
    for n in (1, 2, 3, 4):
        for rank, (whole, grad, shard) in enumerate(run_loopback(n, shard_and_unshard, layout, dim)):
            mine = sequence_positions(24, rank, n, layout)
            assert torch.equal(whole, expected) and torch.equal(shard, expected.index_select(dim, mine))
            # a token's gradient is the sum over the ranks' losses, on its owner rank
            assert torch.equal(grad, torch.zeros_like(grad).index_fill(dim, mine, n * (n + 1) / 2))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: sequence_positions(10, 0, 3, "zigzag"), "10 tokens cannot .* 3 ranks in the zigzag layout.* 6, .* 12"),
        (lambda: shard_multiple(2, "spiral"), "'spiral' is unknown; choose one of zigzag, striped, contiguous"),
        (lambda: FrameShard(3, 2, 4), "start=3, stop=2, total=4"),
        (lambda: FrameShard(0, 5, 4), "start=0, stop=5, total=4"),
        (lambda: FrameShard(0.0, 1.0, 2.0), r"0\.0"),
        (lambda: frame_range(2.5), r"2\.5"),
        (lambda: frame_range(-1), "total=-1"),
    ],
)
def test_invalid_sizes_and_layouts_raise(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError if "spiral" in message else ShapeError, match=message):
        call()
    assert FrameShard(0, 0, 0).total == 0
