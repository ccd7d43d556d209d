"""Layer: one process. Ranks that are numbered across nodes: which links carry what, and that results stay exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case, assert_exact, run_case
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import LoopbackCommunicator, Pending, Recv, Send, Subgroup, run_loopback
from mllm_seqpar.comm.loopback import LoopbackWorld
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.schedules.mesh import mesh_ranks, sent_by_node
from nccl_model import NcclCommunicator, run_nccl_model

Links = Counter[tuple[int, int, str]]
"""The number of sends from one node to another, by (rank, peer, label)."""


class FakeTopology(NcclCommunicator):
    """A communicator that counts the sends between nodes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.between: Links = Counter()

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        for send in sends:
            if self.nodes[send.peer] != self.nodes[self.rank]:
                self.between[self.rank, send.peer, send.label] += 1
        return super().exchange(sends, recvs)


def check_on(nodes: Sequence[int], **options: Any) -> Links:
    """Assert that a case is exact on ranks of these nodes, and return the sends between nodes, forward and backward."""
    case = Case(**options)

    def run(comm: FakeTopology) -> tuple[dict[str, Any], Links]:
        comm.kept.nodes = tuple(nodes)
        result = run_case(comm, case)
        return result, Counter({key: n for key, n in comm.between.items() if key[2] not in ("agreement", "mask")})

    results = run_nccl_model(len(nodes), run, communicator=FakeTopology)
    assert_exact(case, [result for result, _ in results])
    total: Links = Counter()
    for _, between in results:
        total += between
    return total


def links_per_node(between: Links, nodes: Sequence[int]) -> tuple[Counter[int], Counter[int]]:
    """Return the number of links out of each node and into each node."""
    links = {(rank, peer) for rank, peer, _ in between}
    return Counter(nodes[rank] for rank, _ in links), Counter(nodes[peer] for _, peer in links)


INTERLEAVED, UNEVEN, CONTIGUOUS = (0, 1, 0, 1, 0, 1), (0, 1, 1, 0, 2, 1), (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize("nodes", [INTERLEAVED, UNEVEN, CONTIGUOUS], ids=["interleaved", "uneven", "contiguous"])
@pytest.mark.parametrize("op", ["ring", "lv", "causal"])
def test_ring_has_one_link_out_of_each_node_and_one_into_it(op: str, nodes: Sequence[int]) -> None:
    between = check_on(nodes, op=op, mask="all" if op == "lv" else None)
    once = dict.fromkeys(nodes, 1)
    assert links_per_node(between, nodes) == (once, once)


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (0, 0, 1, 1)], ids=["interleaved", "contiguous"])
@pytest.mark.parametrize(
    ("frames", "inside"),
    [(40, {"k", "v", "dk", "dv"}), (4, {"q", "o", "lse", "do", "delta", "dq"})],
    ids=["keys", "queries"],
)
def test_mesh_keeps_the_axis_that_sends_more_inside_nodes(frames: int, inside: set[str], nodes: Sequence[int]) -> None:
    between = check_on(nodes, op="mesh", tile=(2, 2), frames=frames, rows=24)
    assert between and not inside & {label for *_, label in between}


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (0, 0, 1, 1)], ids=["interleaved", "contiguous"])
@pytest.mark.parametrize(
    "options", [{}, {"mask": "random"}, {"mask": "holes", "batch": 2, "shared_keys": True}], ids=str
)
def test_hybrid_shards_heads_inside_nodes(options: dict[str, Any], nodes: Sequence[int]) -> None:
    """With the tile (2, 1), only Q and its results are sent between the groups that shard heads."""
    between = check_on(nodes, op="ulysses", tile=(2, 1), **options)
    assert between and not {"k", "v", "dk", "dv"} & {label for *_, label in between}
    with_keys = check_on(nodes, op="ulysses", tile=(1, 2), **options)
    assert with_keys and not {"q", "o", "lse", "do", "delta", "dq"} & {label for *_, label in with_keys}


@pytest.mark.parametrize(("frames_by", "nodes"), [("lv-xattn", UNEVEN), ("ulysses", INTERLEAVED)])
def test_text_and_masked_frames_stay_exact_on_interleaved_nodes(frames_by: str, nodes: Sequence[int]) -> None:
    """With hybrids for both sets of keys, only for one, and with rows that are sent point to point."""
    common: dict[str, Any] = {"op": "joint", "tile": (3, 1), "frames_by": frames_by, "mask": "far frame", "rows": 21}
    check_on(nodes, by="ulysses", text="window", **common)
    check_on(nodes, by="ring", text="padded left", batch=2, shared_keys=True, **common)


def ring_on(nodes: Sequence[int]) -> tuple[int, ...]:
    comm = LoopbackCommunicator(LoopbackWorld(len(nodes)), 0)
    comm.kept.nodes = tuple(nodes)
    return comm.ring


def test_ring_goes_node_by_node() -> None:
    assert ring_on((0, 0, 1, 1)) == (0, 1, 2, 3)
    assert ring_on((0, 1, 0, 1)) == (0, 2, 1, 3)
    assert ring_on(UNEVEN) == (0, 3, 1, 2, 5, 4)
    assert mesh_ranks((0, 1, 2, 3), (0, 0, 1, 1), (2, 2), 5.0, 1.0) == (0, 1, 2, 3)
    assert mesh_ranks((0, 1, 2, 3), (0, 0, 1, 1), (2, 2), 1.0, 5.0) == (0, 2, 1, 3)


@pytest.mark.parametrize("shape", [(2, 6), (3, 4), (4, 3), (6, 2)])
@pytest.mark.parametrize("q_bytes", [0.1, 1.0, 10.0])
def test_no_numbering_of_the_launcher_sends_less_between_nodes(shape: tuple[int, int], q_bytes: float) -> None:
    by_rank, across = tuple(rank // 4 for rank in range(12)), tuple(rank % 3 for rank in range(12))

    def worst(order: Sequence[int], nodes: Sequence[int]) -> float:
        return max(sent_by_node(order, nodes, shape, q_bytes, 1.0).values())

    best = {worst(mesh_ranks(ring_on(x), x, shape, q_bytes, 1.0), x) for x in (by_rank, across)}
    assert len(best) == 1
    assert best.pop() <= min(worst(range(12), nodes) for nodes in (by_rank, across))


def test_nodes_are_gathered_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter("babacb")
    monkeypatch.setattr("mllm_seqpar.comm.base.host_identity", lambda: next(hosts))

    class Ordered(LoopbackCommunicator):
        def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
            return [list(values), *([_fingerprint(host)] for host in hosts)]

    from mllm_seqpar.digests import fingerprint as _fingerprint

    assert Ordered(LoopbackWorld(6), 0).nodes == (0, 1, 0, 1, 2, 0)
    monkeypatch.undo()
    monkeypatch.setenv("NCCL_HOSTID", "one")
    assert run_loopback(3, lambda comm: comm.nodes) == [(0, 0, 0)] * 3


@pytest.mark.parametrize("head_degree", [1, 2])
def test_spec_that_two_groups_share_sends_to_the_ranks_of_each(head_degree: int) -> None:
    """Rank 0 is the first of both groups; what it derived for one would send to the wrong rank in the other."""
    spec = CallSpec(
        (2 // head_degree, 1), BlockMasks.full(1, 2, (3, 3)), (3, 3), torch.float32, head_degree=head_degree
    )

    def run(comm: LoopbackCommunicator) -> list[Tensor]:
        q, k, v = (torch.full((1, 2, rows, 4), float(comm.rank)) for rows in (2, 3, 3))
        groups = [Subgroup(comm, members) for members in ((0, 1), (0, 2)) if comm.rank in members]
        keys = [[GivenKeys(spec, k, v)]]
        return [attend(q, keys, rows="sharded", comm=group, scale=0.0)[0][0] for group in groups]

    (first, second), (one,), (two,) = run_loopback(3, run, timeout=10)
    for o, mean in ((first, 0.5), (one, 0.5), (second, 1.0), (two, 1.0)):
        torch.testing.assert_close(o, torch.full_like(o, mean))
