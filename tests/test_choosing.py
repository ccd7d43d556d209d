"""Layer: one process. What "auto" knows of a mask, and that it does not choose anew for every length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import FrameBlockMasks, FrameMask, FullBlockMasks
from mllm_seqpar.planner import Cluster, write_cluster
from mllm_seqpar.planner.call_cost import Visual
from mllm_seqpar.runtime.selection import StrategySelector, selector_for
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.sharding import frame_bounds

CLUSTER = Cluster(
    name="eight",
    gpus_per_node=8,
    attention_forward=1e14,
    attention_backward=1e14,
    matmul=2e14,
    memory_bytes=8e10,
    node_link=2e11,
    node_latency_s=1e-5,
    network_link=2e10,
    network_latency_s=2e-5,
)
PROBLEM = Problem(rows=512, keys=(400_000,) * 8, heads=28, kv_heads=4, dim=128)
VISUAL = Visual(dim=3584, layers=4)


def full(problem: Problem) -> FullBlockMasks:
    return FullBlockMasks(1, problem.rows, problem.keys)


@pytest.mark.parametrize("dense", [False, True])
def test_shares_and_counts_are_those_of_the_mask(dense: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    bounds, frames, tables, masks = frame_bounds(10, 4), torch.arange(10), [], []
    for _ in range(4):
        first, stop = (torch.randint(0, 11, (2, 6), generator=generator) for _ in range(2))
        table = (frames >= first[..., None]) & (frames < stop[..., None])
        tables.append(table)
        masks.append(FrameMask.from_dense(table, 3) if dense else FrameMask.from_intervals(first, stop, 3, 10))
    blocks = FrameBlockMasks(masks, bounds)
    assert blocks.share == pytest.approx(torch.stack(tables).float().mean().item())
    for i, table in enumerate(tables):
        for j, (start, stop) in enumerate(bounds):
            assert blocks.shares()[i][j] == pytest.approx(table[..., start:stop].float().mean().item())
            assert blocks.counts()[i][j] == table[..., start:stop].any(-1).sum()


def test_lengths_that_are_nearly_alike_are_one_choice() -> None:
    selector = StrategySelector(CLUSTER)
    first = selector.choose(PROBLEM, full(PROBLEM), training=True, visual=VISUAL)
    for keys in ((399_271,) * 8, (400_000,) * 7 + (399_271,), (380_000,) * 8):
        near = replace(PROBLEM, keys=keys)
        assert selector.choose(near, full(near), training=True, visual=VISUAL) is first
    far = replace(PROBLEM, keys=(800_000,) * 8)
    assert selector.choose(far, full(far), training=True, visual=VISUAL) is not first
    assert selector.choose(PROBLEM, full(PROBLEM), training=False, visual=VISUAL) is not first


def test_the_crossover() -> None:
    """Long video and little text: LV-XAttn. Few frames: replication. Not gathered beforehand: never replication."""
    slow = StrategySelector(replace(CLUSTER, node_link=1e9, network_link=1e9))
    for keys, strategy in ((400_000, "lv-xattn"), (200, "replicate")):
        problem = replace(PROBLEM, rows=4096, keys=(keys,) * 8)
        assert slow.choose(problem, full(problem), training=True, visual=VISUAL).strategy == strategy
        assert slow.choose(problem, full(problem), training=True, visual=None).strategy != "replicate"


def test_a_mask_that_leaves_each_rank_its_own_frames_needs_no_links() -> None:
    """Rows go straight, and none has anywhere to go: LV-XAttn takes as long over the slowest link as over any."""
    frames, bounds = 8 * 64, frame_bounds(8 * 64, 8)
    masks = []
    for start, stop in bounds:
        row = torch.zeros(1, PROBLEM.rows, dtype=torch.long)
        masks.append(FrameMask.from_intervals(row + start, row + stop, 729, frames))
    problem = replace(PROBLEM, keys=(64 * 729,) * 8)
    found = [
        StrategySelector(replace(CLUSTER, node_link=rate)).choose(
            problem, FrameBlockMasks(masks, bounds), training=True, visual=None
        )
        for rate in (1e5, 1e12)
    ]
    assert [choice.strategy for choice in found] == ["lv-xattn", "lv-xattn"]
    assert found[0].seconds == pytest.approx(found[1].seconds)


def test_links_that_one_process_could_not_measure_are_not_decided_by(tmp_path: Path) -> None:
    write_cluster(replace(CLUSTER, links="none"), tmp_path / "alone.yaml")
    config = SeqParConfig(strategy="auto", cluster=str(tmp_path / "alone.yaml"))

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="2 ranks need gpus_per_node, node_link and network_link"):
            selector_for(config, comm, torch.device("cpu"), torch.float32)

    run_loopback(2, on_rank)
    assert selector_for(config, as_communicator(None), torch.device("cpu"), torch.float32) is not None
