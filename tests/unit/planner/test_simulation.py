"""Layer: pure Python. The simulator and the formulas of collectives against cases worked out by hand."""

from collections.abc import Sequence

import pytest
from clusters import ROUND, all_bytes, with_

from mllm_seqpar.planner.cluster import Cost, all_gather, all_to_all
from mllm_seqpar.planner.simulation import Phase, RankTimeline, simulate

MB = 1_000_000


def ring(ranks: int, size: int, seconds: float, steps: int = 1) -> list[list[Phase]]:
    return [
        [Phase(seconds, sends=(((r + 1) % ranks, size),), sources=((r - 1) % ranks,))] * steps for r in range(ranks)
    ]


def ends(timelines: Sequence[RankTimeline]) -> tuple[float, ...]:
    return tuple(rank.seconds for rank in timelines)


def test_step_takes_the_longer_of_transfer_and_computation() -> None:
    for seconds, overlap, end, exposed, hidden in (
        (0.5, 1.0, 1.0, 0.5, 0.5),  # bound by transfers: 1 GB at 1 GB/s
        (3.0, 1.0, 3.0, 0.0, 1.0),  # bound by computation
        (3.0, 0.0, 4.0, 1.0, 0.0),  # one after the other
    ):
        found = simulate(ring(4, 1000 * MB, seconds), 4, with_(overlap=overlap))
        for one in found:
            assert (one.seconds, one.exposed, one.hidden) == pytest.approx((end, exposed, hidden))
            assert (one.node_bytes, one.network_bytes) == (1000 * MB, 0)
    # with a fraction of 0.5, half of the 3 s can run beside the transfer of 1 s or 2 s
    half = with_(overlap=0.5)
    assert ends(simulate(ring(4, 1000 * MB, 3.0), 4, half)) == pytest.approx((1.5 + 1.5,) * 4)
    assert ends(simulate(ring(4, 2000 * MB, 3.0), 4, half)) == pytest.approx((2.0 + 1.5,) * 4)


def test_ring_over_nodes_runs_at_the_speed_of_its_slowest_hop() -> None:
    """8 ranks on 2 nodes: the hops 3 -> 4 and 7 -> 0 take 1 s, the others 0.1 s."""
    found = simulate(ring(8, 100 * MB, 0.0, steps=7), 8, ROUND)
    assert max(ends(found)) == pytest.approx(7.0)
    assert [one.network_bytes for one in found] == [0, 0, 0, 700 * MB] * 2
    assert all_bytes(found, 8) == (6 * 700 * MB, 1400 * MB)


def test_transfers_share_the_network_link_of_their_node() -> None:
    """4 ranks send 100 MB each to the other node at 0.1 GB/s: 4 s together, 1 s for a rank alone."""
    phases = [[Phase(sends=(((r + 4) % 8, 100 * MB),), sources=((r + 4) % 8,))] for r in range(8)]
    assert ends(simulate(phases, 8, ROUND)) == pytest.approx((4.0,) * 8)
    alone = [phases[0], [], [], [], phases[4], [], [], []]
    assert ends(simulate(alone, 8, ROUND)) == pytest.approx((1.0, 0, 0, 0, 1.0, 0, 0, 0))
    cards = with_(network_link_per_gpu=0.5e8)
    assert ends(simulate(phases, 8, cards)) == pytest.approx((4.0,) * 8)
    assert ends(simulate(alone, 8, cards))[0] == pytest.approx(2.0)  # its network card has half the speed


def test_transfer_speeds_up_when_others_finish() -> None:
    """50 MB and 150 MB leave one node: both at half speed for 1 s, then 100 MB at full speed for 1 s."""
    phases = [[Phase(sends=((4, 50 * MB),))], [Phase(sends=((5, 150 * MB),))], [], []]
    phases += [[Phase(sources=(0,))], [Phase(sources=(1,))], [], []]
    assert ends(simulate(phases, 8, ROUND)) == pytest.approx((1.0, 2.0, 0, 0, 1.0, 2.0, 0, 0))


def test_transfer_waits_until_both_ends_have_posted_it() -> None:
    """Rank 1 computes for 2 s before it posts; the transfer of 1 GB then takes until 3 s."""
    phases = [[Phase(sends=((1, 1000 * MB),))], [Phase(2.0), Phase(sources=(0,))]]
    found = simulate(phases, 2, ROUND)
    assert ends(found) == pytest.approx((3.0, 3.0))
    assert [one.exposed for one in found] == pytest.approx([3.0, 1.0])
    assert found[0].spans == [("transfer", 2.0, 3.0), ("wait", 0.0, 3.0)]
    assert found[1].spans == [("compute", 0.0, 2.0), ("wait", 2.0, 3.0)]
    late_sender = [[Phase(2.0), Phase(sends=((1, 1000 * MB),))], [Phase(sources=(0,))]]
    assert ends(simulate(late_sender, 2, ROUND)) == pytest.approx((3.0, 3.0))


def test_latency_and_overhead_precede_the_first_byte() -> None:
    slow = with_(node_latency_s=0.25, step_overhead_s=0.5)
    found = simulate(ring(4, 1000 * MB, 1.0), 4, slow)
    assert ends(found) == pytest.approx((1.75,) * 4)
    assert ("transfer", 0.5, 1.75) in found[0].spans  # posted after the overhead; the latency is a part of it
    assert ends(simulate(ring(4, 1000 * MB, 9.0), 4, slow)) == pytest.approx((9.5,) * 4)
    # an empty transfer takes no time
    assert ends(simulate(ring(4, 0, 1.0), 4, with_(node_latency_s=5.0))) == pytest.approx((1.0,) * 4)


def test_invalid_phases_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 simulated ranks do not divide 8 ranks"):
        simulate(ring(8, 1, 0.0)[:3], 8, ROUND)
    with pytest.raises(ValueError, match="rank 0 waits forever in step 0"):
        simulate([[Phase(sends=((1, 1),))], []], 2, ROUND)


def waiting(seconds: float, node_bytes: int, network_bytes: int) -> Cost:
    """Return the cost of transfers that nothing hides."""
    near = pytest.approx(seconds)
    return Cost(near, near, 0.0, node_bytes, network_bytes)


def test_all_to_all_is_bound_by_the_fullest_link() -> None:
    """Each rank sends parts of 100 MB at 1 GB/s within a node of 4, and at 0.1 GB/s through a node's network link."""
    assert all_to_all(ROUND, 8, 4, 400 * MB) == waiting(0.3, 300 * MB, 0)
    assert all_to_all(ROUND, 8, 1, 100).seconds == 0
    # 8 ranks on 2 nodes: 16 parts leave each node
    assert all_to_all(ROUND, 8, 8, 800 * MB) == waiting(16.0, 300 * MB, 400 * MB)
    cards = with_(network_link_per_gpu=1e7)  # one network card per rank, slower than its part of the node's link
    assert all_to_all(cards, 8, 8, 800 * MB).seconds == pytest.approx(40.0)
    late = with_(network_latency_s=1.0, step_overhead_s=0.5)
    assert all_to_all(late, 8, 8, 800 * MB).seconds == pytest.approx(17.5)
    # groups of 3: node 1 holds ranks 4, 5 of group 1 and 6, 7 of group 2, and four parts leave it
    assert all_to_all(ROUND, 12, 3, 300 * MB) == waiting(4.0, 200 * MB, 200 * MB)


def test_all_gather_receives_each_shard_once_per_node() -> None:
    assert all_gather(ROUND, 1, 1e9) == Cost()
    assert all_gather(ROUND, 4, 1e8) == waiting(0.3, 300 * MB, 0)
    assert all_gather(ROUND, 8, 1e8) == waiting(4.0, 300 * MB, 400 * MB)  # 4 shards of 0.1 GB at 0.1 GB/s
    assert all_gather(with_(gpus_per_node=1), 4, 1e8) == waiting(3.0, 0, 300 * MB)
