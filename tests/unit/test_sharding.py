"""Layer: pure Python, then one process. Which rank owns which frames and tokens, and sharding tensors accordingly."""

import pytest
import torch

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


def test_positions_of_each_layout() -> None:
    found = {layout: [sequence_positions(12, rank, 3, layout).tolist() for rank in range(3)] for layout in LAYOUTS}
    assert found["zigzag"] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert found["striped"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert found["contiguous"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_token_has_one_home_and_padding_is_minimal(size: int, layout: str) -> None:
    step = shard_multiple(size, layout)
    for total in range(0, 40):
        padded = padded_length(total, size, layout)
        assert padded % step == 0 and padded - step < max(total, 1) <= padded
        positions = [sequence_positions(padded, rank, size, layout) for rank in range(size)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(padded))
        assert all(p.numel() == padded // size and bool((p.diff() > 0).all()) for p in positions)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_unshard_inverts_shard(dim: int, layout: str) -> None:
    expected = torch.arange(48.0).view(2, 24).movedim(1, dim % 2)

    def on_rank(comm: Communicator) -> None:
        x = expected.clone().requires_grad_()
        shard = shard_sequence(x, dim, comm, layout)
        whole = unshard_sequence(shard, dim, comm, layout)
        (whole * (comm.rank + 1)).sum().backward()  # a different loss on each rank
        mine = sequence_positions(24, comm.rank, comm.size, layout)
        assert torch.equal(whole, expected) and torch.equal(shard, expected.index_select(dim, mine))
        # a token's gradient is the sum over the ranks' losses, on its owner rank
        assert torch.equal(x.grad, torch.zeros_like(x).index_fill(dim, mine, comm.size * (comm.size + 1) / 2))

    for n in (1, 2, 3, 4):
        run_loopback(n, on_rank)


def test_invalid_sizes_and_layouts_raise() -> None:
    with pytest.raises(ShapeError, match="10 tokens cannot be sharded over 3 ranks in the zigzag layout.* 6, .* 12"):
        sequence_positions(10, 0, 3, "zigzag")
    with pytest.raises(ConfigError, match="'spiral' is unknown; choose one of zigzag, striped, contiguous"):
        shard_multiple(2, "spiral")
    for start, stop in ((3, 2), (0, 5)):
        with pytest.raises(ShapeError, match=f"start={start}, stop={stop}, total=4"):
            FrameShard(start, stop, 4)
    assert FrameShard(0, 0, 0).total == 0
    for made in (lambda: FrameShard(0.0, 1.0, 2.0), lambda: frame_range(2.5), lambda: frame_range(-1)):  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=r"0\.0|2\.5|total=-1"):
            made()
