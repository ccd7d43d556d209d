"""Layer: pure Python, then one process. Which rank owns which frames and tokens, and sharding tensors accordingly."""

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
    with pytest.raises(ShapeError, match="total=-1"):
        frame_range(-1)


def test_positions_of_each_layout() -> None:
    found = {layout: [sequence_positions(12, rank, 3, layout).tolist() for rank in range(3)] for layout in LAYOUTS}
    assert found["zigzag"] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert found["striped"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert found["contiguous"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_token_has_one_home_and_positions_ascend(size: int, layout: str) -> None:
    step = shard_multiple(size, layout)
    for total in (step, 3 * step, 8 * step):
        positions = [sequence_positions(total, rank, size, layout) for rank in range(size)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(total))
        assert all(p.numel() == total // size and bool((p.diff() > 0).all()) for p in positions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_length_is_minimal(layout: str) -> None:
    for size in (1, 2, 3, 4, 8):
        for total in range(0, 40):
            padded = padded_length(total, size, layout)
            assert padded % shard_multiple(size, layout) == 0 and padded >= max(total, 1)
            assert padded - shard_multiple(size, layout) < max(total, 1)
            sequence_positions(padded, size - 1, size, layout)


def shard_and_unshard(comm: Communicator, layout: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The unsharded tensor, its gradient under a different loss on each rank, and the shard."""
    x = torch.arange(48.0).view(2, 24).movedim(1, dim % 2).clone().requires_grad_()
    shard = shard_sequence(x, dim, comm, layout)
    whole = unshard_sequence(shard, dim, comm, layout)
    (whole * (comm.rank + 1)).sum().backward()
    return whole.detach(), x.grad, shard.detach()


def assert_inverse(results: list[tuple[Tensor, Tensor, Tensor]], layout: str, dim: int) -> None:
    n = len(results)
    expected = torch.arange(48.0).view(2, 24).movedim(1, dim % 2)
    for rank, (whole, grad, shard) in enumerate(results):
        assert torch.equal(whole, expected)
        mine = sequence_positions(24, rank, n, layout)
        assert torch.equal(shard, expected.index_select(dim, mine))
        # a token's gradient is the sum over the ranks' losses, on its owner rank
        wanted = torch.zeros_like(grad).index_fill(dim, mine, n * (n + 1) / 2)
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_unshard_inverts_shard(dim: int, layout: str) -> None:
    for n in (1, 2, 3, 4):
        assert_inverse(run_loopback(n, shard_and_unshard, layout, dim), layout, dim)


def test_invalid_sizes_and_layouts_raise() -> None:
    with pytest.raises(ShapeError, match="10 tokens cannot be sharded over 3 ranks in the zigzag layout.* 6, .* 12"):
        sequence_positions(10, 0, 3, "zigzag")
    with pytest.raises(ConfigError, match="'spiral' is unknown; choose one of zigzag, striped, contiguous"):
        shard_multiple(2, "spiral")
    with pytest.raises(ShapeError, match="start=3, stop=2, total=4"):
        FrameShard(3, 2, 4)
    with pytest.raises(ShapeError, match="start=0, stop=5, total=4"):
        FrameShard(0, 5, 4)
    for made in (lambda: FrameShard(0.0, 1.0, 2.0), lambda: frame_range(2.5)):  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=r"0\.0|2\.5"):
            made()
    assert FrameShard(0, 0, 0).total == 0
