"""Layer: one process. Tokens that a rank owns and caches, reports of a context, checksums and masks of frames."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_seqpar.attention.keys import cast_for_attention
from mllm_seqpar.comm import Communicator, LoopbackCommunicator, LoopbackWorld, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.digests import checksum, sampled_bits, sampling_step
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import BlockMask
from mllm_seqpar.masks.frame_mask import mask_over_samples
from mllm_seqpar.recomputation import AutocastState
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.loss import sharded_causal_lm_loss, shifted
from mllm_seqpar.runtime.star import StarText, block_length
from mllm_seqpar.runtime.text import TextKVCache, TextShards, packed_starts


def test_packed_sequences_start_where_positions_are_not_consecutive() -> None:
    for positions, starts in [
        ([[0, 1, 2, 3]], None),
        ([[5]], None),
        ([[0, 0]], [[0, 1]]),
        ([[0, 1, 0, 1, 2, 0]], [[0, 0, 2, 2, 2, 5]]),
        ([[0, 1, 2], [0, 1, 0]], [[0, 0, 0], [0, 0, 2]]),
    ]:
        found = packed_starts(torch.tensor(positions))
        assert (found if found is None else found.tolist()) == starts


def test_rows_are_gathered_from_their_owners_and_padding_is_nobodys() -> None:
    x = torch.arange(1.0, 11.0)[None, :, None]

    def run(comm: Communicator) -> None:
        text = TextShards(1, 10, comm, "zigzag")
        rows = torch.tensor([9, 0, 4])
        assert text.gather_rows(text.shard(x, 1), rows).flatten().tolist() == [10.0, 1.0, 5.0]
        assert text.unshard(text.shard(x, 1, fill=-1), 1).equal(x) and text.local * comm.size == text.padded
        assert text.positions(comm.rank)[text.own].max() < 10
        window = text.blocks(3)
        assert text.blocks(3) is window and text.blocks() is not window
        visible = sum(visible_entries(window.block(comm.rank, j), text.local) for j in range(comm.size))
        own = text.positions(comm.rank)
        assert visible >= sum(min(3, int(p) + 1) for p in own[text.own])

    for n in (1, 2, 3):
        run_loopback(n, run)


def visible_entries(mask: BlockMask, rows: int, keys: int = 0) -> int:
    return rows * keys if mask is None else sum(layer.visible for layer in mask)


def test_new_tokens_are_kept_in_turn_and_cropped() -> None:
    def run(comm: Communicator) -> tuple[list[int], ...]:
        cache = TextKVCache(TextShards(1, 5, comm, "contiguous"))
        before = cache.positions.tolist()
        cache.extend(4)
        fresh, valid = list(range(4)[cache.fresh]), torch.ones(1, 9).index_fill_(1, torch.tensor([7]), 0)
        visible = [
            visible_entries(cache.mask(4, mask, window), 4, len(cache.positions))
            for mask, window in ((None, None), (None, 3), (valid, None))
        ]
        cache.crop(20)
        total = cache.total
        cache.crop(6)
        return before, fresh, visible, cache.positions.tolist(), [total, cache.total]

    # Queries 5 to 8. Rank 0 keeps keys 0, 1, 2, 6, 8 and rank 1 keeps 3, 4, 5, 7.
    assert run_loopback(2, run) == [
        ([0, 1, 2], [1, 3], [3 + 4 + 4 + 5, 0 + 1 + 1 + 2, 3 + 4 + 4 + 5], [0, 1, 2], [9, 6]),
        ([3, 4], [0, 2], [3 + 3 + 4 + 4, 3 + 2 + 2 + 1, 3 + 3 + 3 + 3], [3, 4, 5], [9, 6]),
    ]


def test_star_prompt_is_split_into_equal_blocks_and_the_query() -> None:
    lengths = [(1, 1), (2, 1), (33, 4), (4096, 4), (10_000, 3), (3, 4)]
    assert [block_length(*pair) for pair in lengths] == [0, 1, 7, 960, 3248, 0]

    def run(comm: Communicator) -> tuple[list[int], list[int], int | None, int]:
        text = StarText(1, 10, comm)
        return text.positions(comm.rank).tolist(), list(range(8)[text.own]), text.new_token_rank, text.local

    assert run_loopback(2, run) == [
        ([0, 1, 2, 3, 8, 8, 8, 8], [0, 1, 2, 3], 1, 8),
        ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7], 1, 8),
    ]


def test_weights_are_compared_in_passes_1_2_4_8_and_reports_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mllm_seqpar.runtime.context")
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        caplog.clear()
        context = SeqParContext(LoopbackCommunicator(LoopbackWorld(size), rank), SeqParConfig())
        for trains in (False, True):  # counted apart, so that training that follows an evaluation is checked at once
            assert [context.compares_weights(trains) for _ in range(8)] == [p in (1, 2, 4, 8) for p in range(1, 9)]
        for _ in range(2):
            context.report_approximation(16, 4)
            context.count_shards((6, 12), (3, 5))
        texts = [record.getMessage() for record in caplog.records]
        assert sum("holds 6 of 12 text tokens" in text for text in texts) == 1
        assert len(texts) == (2 if rank == 0 else 1)


def test_small_functions_of_a_pass() -> None:
    labels = torch.tensor([[7, 8, 9]])
    assert shifted(labels).tolist() == [[8, 9, -100]] and shifted(labels, 0).tolist() == [[8, 9, 0]]
    with torch.autocast("cpu", torch.bfloat16):
        wide, narrow = cast_for_attention(torch.zeros(1).double(), torch.zeros(1))
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.bfloat16)
    state = AutocastState("cpu", True, torch.bfloat16)
    with state.again():
        assert AutocastState.current("cpu") == state and not torch.is_autocast_cache_enabled()


def test_loss_of_a_float64_model_is_summed_in_float64() -> None:
    logits, targets = torch.randn(1, 3000, 7, dtype=torch.float64), torch.randint(7, (1, 3000))
    exact = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").double().mean().item()

    def run(comm: Communicator) -> torch.Tensor:
        text = TextShards(1, 3000, comm, "zigzag")
        return sharded_causal_lm_loss(text.shard(logits, 1), targets, text)

    for loss in run_loopback(2, run):
        assert loss.dtype == torch.float64 and loss.item() == pytest.approx(exact, rel=1e-12)


def test_checksum_depends_on_each_entry_and_their_order() -> None:
    entries = [[0], [0, 0], [1, 0], [0, 1], [1, 2, 3], [3, 2, 1]]
    assert len({checksum(torch.tensor(x)) for x in entries}) == len(entries)
    assert checksum(torch.tensor([4, 5]), None, torch.tensor([6])) == checksum(torch.tensor([4, 5, 6]))
    assert checksum(None) == checksum(torch.zeros(0)) == 0
    table = torch.tensor([[True, False, False], [True, True, False]])
    assert checksum(table) != checksum(table.T) == checksum(table.T.contiguous())
    for total, sampled in ((3, 3), (8192, 2731), (8191, 8191)):
        assert sampled_bits(torch.zeros(total)).numel() == sampled
    frames = torch.arange(24.0).view(1, 2, 3, 4)
    assert sampled_bits(frames).equal(sampled_bits(frames.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("size", [(64, 3, 384, 384), (128, 3, 224, 224), (96, 729, 1152), (3, 4096, 4096)])
def test_samples_of_videos_are_not_in_one_column(size: tuple[int, ...]) -> None:
    """Videos with black borders are equal in their first columns and rows."""
    places = torch.arange(0, math.prod(size), sampling_step(torch.empty(size, device="meta"), 4096))
    for extent, found in ((size[-1], places % size[-1]), (size[-2], places // size[-1] % size[-2])):
        counts = torch.bincount(found * 16 // extent, minlength=16)
        assert int(counts.min()) > 128, "a sixteenth of the columns or rows has fewer than half of its samples"


def test_checksum_copies_nothing() -> None:
    class Storages(TorchDispatchMode):
        seen: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.seen.add(result.untyped_storage().data_ptr())
            return result

    mask = torch.ones(1, 64, 32, dtype=torch.bool)
    with Storages() as storages:
        checksum(mask)
    assert storages.seen <= {mask.untyped_storage().data_ptr()}
    mask.untyped_storage().resize_(0)  # as FSDP2 frees gathered parameters


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("gaps", [False, True])
def test_mask_of_a_table_has_a_layer_for_each_run_of_a_row(samples: int, gaps: bool) -> None:
    first, stop = torch.randint(0, 6, (2, 4, 30, 1), generator=torch.Generator().manual_seed(1)).sort(0).values
    visible = (first <= torch.arange(5)) & (torch.arange(5) < stop)
    if gaps:
        visible[0, 0] = torch.tensor([True, False, True, True, False])
    mask = mask_over_samples(visible, 3, 5 * samples)
    assert len(mask.bounds) == 1 + gaps
    expected = torch.zeros(4, 30, 5 * samples, dtype=torch.bool)
    for row in range(4):
        start = row // (4 // samples) * 5
        expected[row, :, start : start + 5] = visible[row]
    assert mask.table().equal(expected)


def test_gradients_of_rows_that_every_rank_has_are_refused_by_the_block_kernels() -> None:
    """The merge over ranks has no backward pass; without the error, gradients would be missing silently."""

    def run(comm: Communicator) -> None:
        state = ForwardState(SeqParContext(comm, SeqParConfig()), text_length=5)
        q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        o = state.attend(q, [state.text_keys(q, k, v)], 1.0)
        torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))
        for trained in (q, k):
            trained.requires_grad_()
            with pytest.raises(ConfigError, match="use_cache: a pass with a cache has no backward pass"):
                state.attend(q, [state.text_keys(q, k, v)], 1.0)
            with torch.no_grad():
                torch.testing.assert_close(state.attend(q, [state.text_keys(q, k, v)], 1.0), o)
            trained.requires_grad_(False)

    run_loopback(2, run)
