"""Layer: pure Python. Schedules of all ranks, simulated step by step without tensors.

A case is named after its schedule: "q ring" (LV-XAttn), "kv ring" (Ring Attention), "direct" (Q shards point to point),
or "axb", the mesh of that shape.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from mllm_seqpar.schedules import AttentionBlock, OverlapRatios, Schedule, Transfer, schedule_for
from mllm_seqpar.schedules.mesh import mesh_order
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

Shard = tuple[str, int]  # axis, owner
Part = tuple[int, int, Fraction, Fraction]  # Q shard, KV shard, and the range of the rows of the block

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12)
MESHES = {size: [f"{a}x{b}" for a, b in mesh_shapes_of(size) if 1 not in (a, b)] for size in SIZES}
CASES = [(size, name) for size in SIZES for name in ("q ring", "direct", "kv ring", *MESHES[size])]
RATIOS = [
    OverlapRatios(q=0.2, kv=0.2, o=0.2, dkv=0.2),  # long computation
    OverlapRatios(q=0.1, kv=4, o=0.2, dkv=8),  # expensive KV transfers
    OverlapRatios(q=3, kv=1, o=6, dkv=2),  # expensive Q transfers
    OverlapRatios(q=0.5, kv=0.7, o=0.9, dkv=1, one_link=False),
]


@dataclass
class Rank:
    """State of one rank during the simulation."""

    rank: int
    schedule: Schedule
    held: set[Shard] = field(default_factory=set)
    received: Counter[Shard] = field(default_factory=Counter)
    results: dict[Shard, list[Part]] = field(default_factory=dict)
    max_held: int = 0  # shards of other ranks, held or being received

    def uses_later(self, shard: Shard, step: int) -> bool:
        later = self.schedule[step + 1 :]
        sent = {(t.axis, t.send_shard) for s in later for t in s.transfers if t.kind == "input"}
        return shard in sent | {pair for s in later for b in s.blocks for pair in shards_of(b)}


def shards_of(block: AttentionBlock) -> list[Shard]:
    return [("q", block.q_shard), ("kv", block.kv_shard)]


def part_of(block: AttentionBlock) -> Part:
    start, stop = Fraction(block.part, block.parts), Fraction(block.part + 1, block.parts)
    return block.q_shard, block.kv_shard, start, stop


def shape_of(name: str, size: int) -> tuple[int, int]:
    if "x" in name:
        a, b = name.split("x")
        return int(a), int(b)
    return (1, size) if name == "kv ring" else (size, 1)


def group_of(axis: str, shape: tuple[int, int], rank: int) -> list[int]:
    """The ranks that exchange shards of `axis` with `rank`, in the order of their ring."""
    a, b = shape
    return [a * (rank // a) + x for x in range(a)] if axis == "q" else [rank % a + a * x for x in range(b)]


def check_route(name: str, size: int, rank: int, t: Transfer) -> None:
    if name == "direct":
        own, other = (t.send_shard, t.recv_shard) if t.kind == "input" else (t.recv_shard, t.send_shard)
        assert own == rank != other and {t.dst, t.src} <= set(range(size)) - {rank}
        assert other == (t.src if t.kind == "input" else t.dst), "between the owner and the other rank"
    else:
        ring = group_of(t.axis, shape_of(name, size), rank)
        place = ring.index(rank)
        assert (t.dst, t.src) == (ring[(place + 1) % len(ring)], ring[place - 1]), "one hop of the group's ring"


def simulate(name: str, size: int, backward: bool, ratios: OverlapRatios | None = None) -> list[Rank]:
    """Run all ranks' schedules; assert that ranks send what they have and that sends match receives."""
    ranks = []
    for r in range(size):
        options = {"backward": backward, "direct": name == "direct", "overlap_ratios": ratios}
        ranks.append(Rank(r, schedule_for(shape_of(name, size), r, **options), {("q", r), ("kv", r)}))
    assert len({len(rank.schedule) for rank in ranks}) == 1, "all ranks take the same number of steps"
    for step in range(len(ranks[0].schedule)):
        wire: defaultdict[tuple[int, int], list[tuple[Transfer, list[Part]]]] = defaultdict(list)
        for rank in ranks:
            for t in rank.schedule[step].transfers:
                check_route(name, size, rank.rank, t)
                shard = (t.axis, t.send_shard)
                assert t.kind == "result" or shard in rank.held, f"rank {rank.rank} sends {shard} without holding it"
                wire[rank.rank, t.dst].append((t, rank.results.pop(shard) if t.kind == "result" else []))
        for rank in ranks:
            for block in rank.schedule[step].blocks:
                for shard in shards_of(block):
                    assert shard in rank.held, (rank.rank, step, block)
                    rank.results.setdefault(shard, []).append(part_of(block))
        for rank in ranks:
            transfers = rank.schedule[step].transfers
            coming = {(t.axis, t.recv_shard) for t in transfers if t.kind == "input"}
            rank.max_held = max(rank.max_held, len({shard for shard in rank.held | coming if shard[1] != rank.rank}))
            for t in transfers:
                sent, parts = wire[t.src, rank.rank].pop(0)
                shard = (t.axis, t.recv_shard)
                assert (sent.kind, sent.axis, sent.send_shard) == (t.kind, *shard), "messages match in order"
                if t.kind == "input":
                    assert shard not in rank.held, f"rank {rank.rank} receives {shard} twice"
                    rank.held.add(shard)
                    rank.received[shard] += 1
                else:
                    rank.results[shard] += parts  # a received result is added to this rank's own
            rank.held -= {shard for shard in rank.held if shard[1] != rank.rank and not rank.uses_later(shard, step)}
        assert not any(wire.values()), "every send has a receive at the same step"
    return ranks


@pytest.mark.parametrize("size,name", CASES)
def test_schedule_computes_every_block_once_and_returns_every_result(size: int, name: str) -> None:
    for backward in (False, True):
        check_schedule(size, name, simulate(name, size, backward), backward)


def check_schedule(size: int, name: str, ranks: list[Rank], backward: bool) -> None:
    parts = defaultdict(list)
    for rank in ranks:
        for step in rank.schedule:
            assert step.blocks or not step.transfers, "every transfer overlaps with a block"
            for block in step.blocks:
                parts[block.q_shard, block.kv_shard].append(part_of(block)[2:])
    assert set(parts) == {(i, j) for i in range(size) for j in range(size)}
    for ranges in parts.values():
        ends = [Fraction(0), *(stop for _, stop in sorted(ranges))]
        assert [start for start, _ in sorted(ranges)] == ends[:-1] and ends[-1] == 1, "the parts make up the block"
    for rank in ranks:
        for axis, other in (("q", 1), ("kv", 0)) if backward else (("q", 1),):
            result = rank.results[axis, rank.rank]
            assert {part[other] for part in result} == set(range(size)) and sum(b - a for *_, a, b in result) == size
    if name in MESHES[size]:
        return
    if name == "direct":
        for rank, kind in itertools.product(ranks, ("input", "result")):
            transfers = [t for step in rank.schedule for t in step.transfers if t.kind == kind]
            others = [other for other in range(size) if other != rank.rank]
            assert sorted(t.dst for t in transfers) == sorted(t.src for t in transfers) == others
    axis = "kv" if name == "kv ring" else "q"
    for rank in ranks:
        hops = Counter((t.kind, t.axis) for step in rank.schedule for t in step.transfers)
        kinds = [("input", axis), ("result", axis)][: 1 if name == "kv ring" and not backward else 2]
        assert hops == ({kind: size - 1 for kind in kinds} if size > 1 else {})
        assert set(rank.received.values()) <= {1} and len(rank.received) == size - 1
        assert rank.max_held <= 2, "two receive buffers: one in use and one being filled"


@pytest.mark.parametrize("name,size", [(name, size) for size in SIZES for name in MESHES[size]])
def test_mesh_receives_each_shard_once_and_holds_one_mesh_shape(name: str, size: int) -> None:
    for backward, ratios in itertools.product((False, True), (OverlapRatios(), *RATIOS)):
        check_mesh(shape_of(name, size), simulate(name, size, backward, ratios), backward, ratios)


def check_mesh(shape: tuple[int, int], ranks: list[Rank], backward: bool, ratios: OverlapRatios) -> None:
    a, b = shape
    for rank in ranks:
        hops = Counter((t.kind, t.axis) for step in rank.schedule for t in step.transfers)
        expected = {("input", "q"): a - 1, ("input", "kv"): b - 1, ("result", "q"): a - 1}
        assert hops == expected | ({("result", "kv"): b - 1} if backward else {})
        q_group, kv_group = (group_of(axis, (a, b), rank.rank) for axis in ("q", "kv"))
        assert rank.received == Counter(({("q", r) for r in q_group} | {("kv", r) for r in kv_group}) - rank.held)
        computed = {(block.q_shard, block.kv_shard) for step in rank.schedule for block in step.blocks}
        assert computed == {(i, j) for i in q_group for j in kv_group}
        assert rank.max_held <= a + b - 2
        if max(ratios.q, ratios.kv, ratios.o, ratios.dkv) <= 1:
            assert all(step.blocks for step in rank.schedule)


ORDERS = [
    # With two Q shards held, a KV shard unlocks two blocks: at a cost of 1.9 it is worth more than a Q shard at 1.
    ("3x3", False, {"q": 0.1, "kv": 4}, "iq1 00 | iq2 10 | ik1 20 | ik2 11 21 01 | 12 | rq1 22 | rq2 02"),
    ("3x3", False, {"q": 4, "kv": 0.1}, "ik1 00 | ik2 01 | iq1 | iq2 10 11 12 | rq1 20 21 22 | rq2 02"),
    ("3x3", False, {}, "iq1 00 | ik1 10 | iq2 11 | ik2 20 | 12 | rq1 21 22 | rq2 01 02"),
    ("3x3", False, {"kv": 1.9}, "iq1 00 | ik1 10 | iq2 11 | ik2 20 21 | 12 | rq1 22 | rq2 01 02"),
    ("3x3", False, {"kv": 2.1}, "iq1 00 | iq2 10 | ik1 20 | ik2 11 21 01 | 12 | rq1 22 | rq2 02"),
    # Just enough blocks to hide each transfer. No result waits for blocks 0x: all but the first of them come last.
    (
        *("4x4", False, {"q": 0.3, "kv": 2, "o": 1}),
        "iq1 00 | iq2 10 | iq3 20 | ik1 30 | ik2 11 21 | ik3 12 22 | 13 | rq1 23 | rq2 31 32 33 | rq3 01 02 03",
    ),
    # Results of both axes alternate in the backward pass.
    (
        *("4x4", True, {}),
        "iq1 00 | ik1 10 | iq2 11 | ik2 21 | iq3 12 | ik3 22 | 13 | rq1 31 01 | rk1 23 20 | rq2 32 02 | rk2 33 30 | "
        "rq3 03 | rk3 00",
    ),
    ("3x2", True, {"dkv": 3}, "iq1 00 | ik1 10 | iq2 11 | rq1 21 01 | rk1 20 | rq2 00"),
    ("2x3", False, {"q": 0.5, "kv": 1.5, "o": 2, "one_link": False}, "iq1 ik1 00 | ik2 10 11 | 12 | rq1 01 02"),
    (
        *("3x3", True, {"q": 0.5, "kv": 0.7, "o": 0.9, "dkv": 2, "one_link": False}),
        "iq1 ik1 00 | iq2 ik2 11 | 12 10 | rq1 21 01 | rk1 22 20 | rq2 02 | rk2 00",
    ),
]


@pytest.mark.parametrize("name,backward,ratios,expected", ORDERS)
def test_order_of_transfers_and_blocks(name: str, backward: bool, ratios: dict[str, Any], expected: str) -> None:
    """Each step as its transfers (input or result, axis, hop) and its blocks (hops of the Q and of the KV shard)."""

    def named(t: Transfer) -> str:
        return f"{t.kind[0]}{t.axis[0]}{t.send_shard + (t.kind == 'input')}"

    steps = [
        [*map(named, step.transfers), *(f"{b.q_shard}{b.kv_shard}" for b in step.blocks)]
        for step in mesh_order(shape_of(name, 0), backward, OverlapRatios(**ratios))
    ]
    assert " | ".join(map(" ".join, steps)) == expected


def test_mesh_shape_1_1_computes_only_the_local_block() -> None:
    for rank in (0, 3):
        (step,) = schedule_for((1, 1), rank, backward=True)
        assert not step.transfers and step.blocks == (AttentionBlock(rank, rank),)
