"""Layer: one process. The selector of a patched model: its cache, its mask, its cluster; clusters that are measured."""

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clusters import FAST, with_

from mllm_seqpar.attention.call_spec import call_spec_for
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.masks import BlockMasks, FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.planner import calibrate as calibration
from mllm_seqpar.planner import write_cluster
from mllm_seqpar.planner.auto import ClusterSelector, selector_for
from mllm_seqpar.planner.calibrate import AttentionShape, calibrate
from mllm_seqpar.runtime.strategy_selector import CROSS, CROSS_MESH, SELF_MESH, VisualProjection
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, ParallelSpec
from mllm_seqpar.sharding import frame_bounds

CLUSTER = with_(FAST, gpus_per_node=8, node_latency_s=1e-5, network_link=2e10)
PROBLEM = Problem(rows=512, keys=(400_000,) * 8, heads=28, kv_heads=4, dim=128)

LIKE = torch.empty(0, dtype=torch.bfloat16)


def full(problem: Problem) -> BlockMasks:
    return BlockMasks.full(1, problem.rows, problem.keys)


def for_pass(selector: ClusterSelector, problem: Problem, training: bool = True) -> ParallelSpec:
    return selector.select(
        problem,
        full(problem),
        CROSS,
        LIKE,
        training=training,
        visual=VisualProjection(dim=3584, layers=4, trained=training),
    )


@pytest.mark.parametrize("dense", [False, True])
def test_mask_statistics_match_the_dense_mask(dense: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    bounds, frames, tables, masks = frame_bounds(10, 4), torch.arange(10), [], []
    for _ in range(4):
        first, stop = (torch.randint(0, 11, (2, 6), generator=generator) for _ in range(2))
        table = (frames >= first[..., None]) & (frames < stop[..., None])
        tables.append(table)
        masks.append(FrameMask.from_dense(table, 3) if dense else FrameMask.from_intervals(first, stop, 3, 10))
    blocks = frame_masks(masks, [(span,) for span in bounds])
    assert blocks.visible_fraction == pytest.approx(torch.stack(tables).float().mean().item())
    for i, table in enumerate(tables):
        for j, (start, stop) in enumerate(bounds):
            assert blocks.visible_fractions()[i][j] == pytest.approx(table[..., start:stop].float().mean().item())
            assert blocks.visible_row_counts()[i][j] == table[..., start:stop].any(-1).sum()


def test_similar_lengths_share_one_selection() -> None:
    selector = ClusterSelector(CLUSTER)
    first = for_pass(selector, PROBLEM)
    for keys in ((399_271,) * 8, (400_000,) * 7 + (399_271,), (380_000,) * 8):
        assert for_pass(selector, replace(PROBLEM, keys=keys)) is first
    assert for_pass(selector, replace(PROBLEM, keys=(800_000,) * 8)) is not first
    assert for_pass(selector, PROBLEM, training=False) is not first


@pytest.mark.parametrize("all_pairs", [False, True])
def test_rows_are_sent_among_all_pairs_where_transfers_are_exposed(all_pairs: bool) -> None:
    """The planner decides; calls of the patched model then have the direct schedule and 16-bit results."""
    selector = ClusterSelector(with_(CLUSTER, node_link=5e8, all_pairs=all_pairs))
    problem = replace(PROBLEM, keys=(200_000,) * 8, direct_element=2)
    selected = selector.select(problem, full(problem), CROSS, LIKE, training=True)
    assert selected == ParallelSpec("lv-xattn", (8, 1), all_pairs=all_pairs)
    spec = call_spec_for(selected, full(problem), problem, torch.float32)
    assert spec.direct == all_pairs and spec.accumulate_dtype == torch.float32
    assert spec.result_dtype("q", torch.bfloat16) == (torch.bfloat16 if all_pairs else torch.float32)
    fast = ClusterSelector(with_(CLUSTER, node_link=2e11, all_pairs=all_pairs))
    assert not fast.select(problem, full(problem), CROSS, LIKE, training=True).all_pairs


def test_replication_is_selected_for_short_videos_and_whole_passes_only() -> None:
    assert CROSS.strategies == STRATEGIES
    slow = ClusterSelector(with_(CLUSTER, node_link=1e9, network_link=1e9))
    for keys, strategy in ((400_000, "lv-xattn"), (200, "replicate")):
        problem = replace(PROBLEM, rows=4096, keys=(keys,) * 8)
        assert for_pass(slow, problem).strategy == strategy
        assert slow.select(problem, full(problem), CROSS, LIKE, training=True).strategy != "replicate"


def test_overlap_ratios_depend_on_the_cluster() -> None:
    problem = replace(PROBLEM, rows=4096, keys=(4096,) * 8)
    ratios = []
    for link in (1e9, 1e11):
        selector = ClusterSelector(with_(CLUSTER, node_link=link))
        found, causal = (
            selector.select(problem, full(problem), kind, LIKE, training=True, mesh_shape=(4, 2)).overlap_ratios
            for kind in (CROSS_MESH, SELF_MESH)
        )
        assert causal[0].q == pytest.approx(2 * found[0].q, rel=0.1)
        ratios.append(found)
    assert ratios[0][0].kv > 10 * ratios[1][0].kv
    # dQ is as large as O, and a block of the backward pass takes longer
    assert ratios[0][1].o < 0.5 * ratios[0][0].o
    ring = selector.select(problem, full(problem), CROSS_MESH, LIKE, training=True, mesh_shape=(1, 8))
    assert ring.overlap_ratios is None


def test_call_has_the_overlap_ratios_of_its_selection() -> None:
    problem = replace(PROBLEM, rows=4096, keys=(4096,) * 8)
    select = ClusterSelector(CLUSTER).select
    selected = select(problem, full(problem), CROSS_MESH, LIKE, training=True, mesh_shape=(4, 2))
    call = call_spec_for(selected, full(problem), problem, torch.float32)
    by_bytes = call_spec_for(replace(selected, overlap_ratios=None), full(problem), problem, torch.float32)
    assert call.overlap_ratios == selected.overlap_ratios != by_bytes.overlap_ratios


def test_pruned_mask_makes_the_links_irrelevant() -> None:
    """Each rank's rows attend only to frames of the same rank, so LV-XAttn sends nothing."""
    frames, bounds = 8 * 64, frame_bounds(8 * 64, 8)
    row = torch.zeros(1, PROBLEM.rows, dtype=torch.long)
    masks = [FrameMask.from_intervals(row + start, row + stop, 729, frames) for start, stop in bounds]
    problem = replace(PROBLEM, keys=(64 * 729,) * 8)
    blocks = frame_masks(masks, [(span,) for span in bounds])
    seconds = []
    for rate in (1e5, 1e12):
        selector = ClusterSelector(with_(CLUSTER, node_link=rate))
        assert selector.select(problem, blocks, CROSS, LIKE, training=True).strategy == "lv-xattn"
        seconds += [selection.seconds for selection in selector._selections.values()]
    assert seconds[0] == pytest.approx(seconds[1])


def test_cluster_file_is_compared_between_ranks_and_with_their_number(tmp_path: Path) -> None:
    for rank in range(2):
        write_cluster(with_(CLUSTER, name=f"cluster of rank {rank}"), tmp_path / f"{rank}.yaml")
    write_cluster(with_(CLUSTER, links="none"), tmp_path / "one-process.yaml")

    def selector(comm: Communicator, name: str) -> ClusterSelector:
        config = SeqParConfig(strategy="auto", cluster=str(tmp_path / name))
        return selector_for(config, comm)

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="2 ranks need gpus_per_node, node_link and network_link"):
            selector(comm, "one-process.yaml")
        with pytest.raises(AgreementError, match="cluster of rank"):
            selector(comm, f"{comm.rank}.yaml")

    run_loopback(2, on_rank)
    assert selector(as_communicator(None), "one-process.yaml").cluster.links == "none"
    named = selector_for(SeqParConfig(strategy="auto", cluster="a100-80g-4x4"), as_communicator(None))
    assert named.cluster.name == "a100-80g-4x4"


SHAPE = AttentionShape(heads=2, kv_heads=2, dim=16)


@pytest.mark.parametrize(
    ("hosts", "links"),
    [("aa", "node"), *(pytest.param(hosts, "all", marks=pytest.mark.slow) for hosts in ("aabb", "abab"))],
)
def test_ranks_of_one_or_two_nodes_agree_on_what_they_measured(
    hosts: str, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads loopback-0 to loopback-3, two on each host name, one node after the other or in turn."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[int(threading.current_thread().name[-1])])
    ranks = len(hosts)
    cluster, *others = run_loopback(ranks, lambda comm: calibrate(comm, shape=SHAPE))
    assert all(other == cluster for other in others)
    assert all(1e6 < rate < 1e15 for rate in (cluster.attention_forward, cluster.attention_backward, cluster.matmul))
    assert cluster.node_link > 1e5 and cluster.node_latency_s >= 0
    assert cluster.step_overhead_s > 0 and cluster.block_overhead_s > 0
    assert (cluster.gpus_per_node, cluster.links) == (2, links)
    if links == "node":
        assert cluster.network_link == cluster.node_link and cluster.network_link_per_gpu is None
    else:
        assert 0 < cluster.network_link_per_gpu <= cluster.network_link


def test_rates_of_masks_and_towers_are_of_visible_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU measures them; here with small sizes, and a clock by which everything takes a second."""
    monkeypatch.setattr(calibration._Meter, "seconds", lambda self, work, repeats=3: work() is None or 1.0)
    meter = calibration._Meter(as_communicator(None), torch.device("cpu"), AttentionShape(heads=4, kv_heads=2, dim=32))
    with torch.no_grad():
        found = meter.rates_of(meter.block(8, 15, calibration.stairs(rows=8, frames=3, tokens=5)))
        tower = meter.tower_rate(width=8, heads=2, inner=16, tokens=5, frames=3)
    visible = sum(row * 4 // 8 for row in range(8)) * 5  # keys of the frames before each row
    assert found == (4 * visible * 4 * 32, 10 * visible * 4 * 32)
    assert tower == 3 * 5 * (2 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 5 * 8)
    assert calibrate(as_communicator(None), shape=SHAPE).tower is None


def test_one_rank_measures_no_links() -> None:
    cluster = calibrate(as_communicator(None), shape=AttentionShape(dtype=torch.bfloat16), name="alone")
    assert cluster.name == "alone" and cluster.gpus_per_node == 1 and "bfloat16" in cluster.source
    assert cluster.links == "none" and cluster.node_latency_s == cluster.step_overhead_s == 0
