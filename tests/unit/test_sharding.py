"""Layer: pure Python, then one process. Which rank owns which frames and tokens, and sharding tensors accordingly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import AgreementError, ConfigError, ShapeError
from mllm_seqpar.sharding import (
    FRAME_LAYOUTS,
    LAYOUTS,
    FrameShard,
    FrameSizes,
    balanced_spans,
    frame_bounds,
    frame_range,
    frame_ranges,
    in_frame_order,
    join_spans,
    padded_length,
    part_of_spans,
    sequence_positions,
    shard_multiple,
    shard_sequence,
    take_spans,
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_zigzag_frames_are_two_chunks_from_both_ends(size: int) -> None:
    for total in range(40):
        chunks = [range(*bounds) for bounds in frame_bounds(total, 2 * size)]
        by_rank = run_loopback(size, lambda comm, total=total: frame_ranges(total, comm, "zigzag"))
        for rank, ranges in enumerate(by_rank):
            assert [f for part in ranges for f in part] == [*chunks[rank], *chunks[2 * size - 1 - rank]]
            assert all(ranges) and len(ranges) <= (1 if rank == size - 1 else 2)
        lengths = sorted(sum(map(len, ranges)) for ranges in by_rank)
        assert lengths == sorted(stop - start for start, stop in frame_bounds(total, size)), "as for contiguous frames"
    assert frame_ranges(7) == (range(7),) and frame_ranges(0) == ()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_of_frames_state_their_ranges_and_have_one_layout(size: int) -> None:
    for total in range(23):
        x = torch.arange(total)
        for layout in FRAME_LAYOUTS:
            shards = run_loopback(size, lambda comm, total=total, layout=layout: FrameShard.of(total, comm, layout))
            parts = [take_spans(x, shard.spans) for shard in shards]
            assert [len(shard) for shard in shards] == [len(part) for part in parts] and all(shards)
            assert torch.equal(in_frame_order(parts, [shard.spans for shard in shards]), x)
            # Without a frame for each rank to give away, the layouts are the same on all ranks.
            found = {shard.layout(rank, size) for rank, shard in enumerate(shards)}
            assert found == {"contiguous" if total <= size or size == 1 else layout}
            for shard in shards:
                assert dataclasses.replace(shard) == shard and shard.total == total
                for start, stop in itertools.combinations(range(len(shard) + 1), 2):
                    part = take_spans(x, part_of_spans(shard.spans, start, stop))
                    assert torch.equal(part, take_spans(x, shard.spans)[start:stop])
    assert FrameShard(2, 5, 9).spans == ((2, 5),) and FrameShard(2, 5, 9).layout(0, 2) is None
    assert FrameShard(0, 2, 9, ((2, 4), (6, 6), (7, 9))).spans == ((0, 4), (7, 9))


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


ODD_SHARDS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], type[Exception], str]] = {
    "length": (lambda x: {"x": x[:, :3]}, ShapeError, "a sequence of 6 tokens cannot be sharded over 2 ranks"),
    "layout": (lambda x: {"layout": "spiral"}, ConfigError, "text_layout: 'spiral' is unknown"),
    "dim": (lambda x: {"dim": 2}, ShapeError, "dim=2; x has 2 dimensions, shape (3, 4)"),
    "other length": (lambda x: {"x": x[:, :2]}, AgreementError, "shape: rank 0: (3, 4); rank 1: (3, 2)"),
    "other dim": (lambda x: {"x": x[:2, :2], "dim": 0}, AgreementError, "dim: rank 0: 1; rank 1: 0"),
    "other layout": (lambda x: {"layout": "striped"}, AgreementError, "layout: rank 0: zigzag; rank 1: striped"),
    "dtype": (lambda x: {"x": x.double()}, AgreementError, "dtype: rank 0: torch.float32; rank 1: torch.float64"),
    "gradients": (lambda x: {"x": x.detach()}, AgreementError, "gradients: rank 0: True; rank 1: False"),
}
"""What rank 1 passes to `unshard_sequence` instead of (3, 4) in zigzag along dim 1, and what it raises."""


@pytest.mark.parametrize("name", ODD_SHARDS)
def test_wrong_shard_of_one_rank_is_an_error_on_every_rank(name: str) -> None:
    change, kind, message = ODD_SHARDS[name]

    def run(comm: Communicator) -> Exception | None:
        x = torch.zeros(3, 4, requires_grad=True)
        given = {"x": x, "dim": 1} | (change(x) if comm.rank else {})
        return attempt(lambda: unshard_sequence(**given, group=comm))[1]

    first, odd = run_loopback(2, run)
    assert type(first) is AgreementError and message in str(first), first
    assert type(odd) is kind and message in str(odd), odd


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: sequence_positions(10, 0, 3, "zigzag"), "10 tokens cannot .* 3 ranks in the zigzag layout.* 6, .* 12"),
        (lambda: shard_multiple(2, "spiral"), "'spiral' is unknown; choose one of zigzag, striped, contiguous"),
        (lambda: FrameShard(3, 2, 4), "start=3, stop=2, total=4"),
        (lambda: FrameShard(0, 5, 4), "start=0, stop=5, total=4"),
        (lambda: FrameShard(0.0, 1.0, 2.0), r"0\.0"),
        (lambda: FrameShard(2, 4, 8, ((3, 6),)), r"more=\(\(3, 6\),\); needs .* ascending"),
        (lambda: frame_ranges(2.5), r"2\.5"),
        (lambda: frame_ranges(4, None, "striped"), "'striped' is unknown; frames have one of contiguous, zigzag"),
        (lambda: frame_range(2.5), r"2\.5"),
        (lambda: frame_range(-1), "total=-1"),
    ],
)
def test_invalid_sizes_and_layouts_raise(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError if "is unknown" in message else ShapeError, match=message):
        call()
    assert FrameShard(0, 0, 0).total == 0


def loads(sizes: FrameSizes, ranks: int, layout: str) -> list[int]:
    """The units of every rank, whose frames are all frames once."""
    by_rank = sizes.spans(ranks, layout)
    numbers = [number for spans in by_rank for span in spans for number in range(*span)]
    assert sorted(numbers) == list(range(sizes.total)) and len(by_rank) == ranks
    assert all(join_spans(sorted(spans)) == spans for spans in by_rank)
    return [sizes.count(spans) for spans in by_rank]


@pytest.mark.parametrize("layout", FRAME_LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_whole_frames_are_balanced_by_their_tokens(ranks: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(ranks)
    video = FrameSizes(256, torch.randint(216, 226, (256,), generator=generator))
    found = loads(video, ranks, layout)
    assert max(found) <= 1.05 * sum(found) / ranks
    image = FrameSizes(256, [16385] + [65] * 255)  # as good as whole frames allow
    found = loads(image, ranks, layout)
    assert max(found) <= max(16385, 1.05 * sum(found) / ranks)
    if layout == "zigzag" and ranks > 1:  # the first and the last frames are of one rank
        spans = video.spans(ranks, layout)
        assert spans[0][0][0] == 0 and spans[0][-1][1] == 256 and len(spans[0]) == 2
        ends = [video.count((span,)) for span in spans[0]]
        assert abs(ends[0] - ends[1]) <= 2 * 226


def test_contiguous_frames_have_the_smallest_maximum() -> None:
    for seed in range(60):
        sizes = torch.randint(1, 12, (1 + seed % 8,), generator=torch.Generator().manual_seed(seed))
        for ranks in range(1, 5):
            found = FrameSizes(len(sizes), sizes)
            if isinstance(found.per_frame, int):  # all equal: by number, as ever
                assert found.spans(ranks) == FrameSizes(len(sizes)).spans(ranks)
                continue
            cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), ranks - 1)
            edges = ((0, *cut, len(sizes)) for cut in cuts)
            best = min(max(int(sizes[a:b].sum()) for a, b in itertools.pairwise(edge)) for edge in edges)
            assert max(loads(found, ranks, "contiguous")) == best
            loads(found, ranks, "zigzag")


class CountedReads(list[int]):
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("two_ended", [False, True])
def test_more_ranks_than_frames_take_time_in_proportion_to_ranks(two_ended: bool) -> None:
    """The planner shards the frames of a plan that fits nowhere over up to 65,536 ranks."""
    reads = []
    for ranks in (50, 200, 800):
        offsets = CountedReads(itertools.accumulate([230, 230, 2040] * 15, initial=0))
        balanced_spans(offsets, ranks, two_ended)
        reads.append(offsets.reads)
    assert reads[2] - reads[1] < 100 * 600 and reads[1] - reads[0] < 100 * 150


def test_sizes_of_frames() -> None:
    sizes = FrameSizes(4, torch.tensor([2, 1, 3, 2]))
    assert sizes.count() == 8 and sizes.units(((1, 3), (3, 4))) == ((2, 6), (6, 8)) and sizes.count(((0, 2),)) == 3
    assert FrameSizes(3, [5, 5, 5]) == FrameSizes(3, 5) != FrameSizes(3, [5, 5, 4]) and FrameSizes(2) == FrameSizes(
        2, 1
    )
    assert sizes != FrameSizes(4, [2, 1, 2, 3]) and sizes.fact != FrameSizes(4, [2, 1, 2, 3]).fact
    assert sizes.joined(2) == FrameSizes(2, [3, 5]) and FrameSizes(6, 4).joined(3) == FrameSizes(2, 12)
    assert FrameShard.of(0, "self", sizes=[]) == FrameShard.of(0, "self")  # a text without frames
    assert FrameSizes(0, torch.tensor([])).spans(2) == ((), ())
    shard = FrameShard.of(4, "self", "contiguous", [2, 1, 3, 2])
    assert shard.spans == ((0, 4),) and frame_range(4, "self", [2, 1, 3, 2]) == range(4)
    by_rank = run_loopback(2, lambda comm: FrameShard.of(4, comm, "zigzag", [2, 1, 3, 2]))
    assert [shard.spans for shard in by_rank] == [((0, 1), (3, 4)), ((1, 3),)]
    assert [shard.layout(rank, 2, sizes) for rank, shard in enumerate(by_rank)] == ["zigzag"] * 2
    for wrong, message in (
        ([1, 2], r"sizes is \(2,\) torch.int64; expected \(4,\) integers"),
        (torch.ones(4), r"torch.float32; expected"),
        ([1, 0, 2, 3], "a frame of 0 tokens; every frame needs at least 1"),
        ([1, 2, -3, 3], "a frame of -3 tokens"),
    ):
        with pytest.raises(ShapeError, match=message):
            frame_ranges(4, "self", sizes=wrong)
