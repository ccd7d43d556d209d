"""Layer: one process, loopback ranks. What each strategy sends; what "auto" and cluster files select, log and agree on.

That results equal the unpatched model's with every strategy is in `test_exactness`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from family_harness import check, inputs_of, model_of, on_ranks, outcome, reference
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patches.mplug_owl3.testing import Case
from mllm_seqpar.planner import Cluster, write_cluster

CASE = Case(frames=(6, 5), length=24)
VISUAL_LABELS: dict[str, set[str]] = {  # what cross-attention sends in forward and backward, beside replicated text
    "lv-xattn": {"q", "o", "lse", "do", "dq"},
    "ring": {"k", "v", "dk", "dv"},
    "mesh": {"q", "o", "lse", "do", "dq", "k", "v", "dk", "dv"},
    "ulysses": {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"},
    "replicate": set(),
}


def cluster(name: str, *, latency: float, matmul: float, attention: float = 1e12) -> Cluster:
    """Return a cluster whose links have a latency and unlimited bandwidth."""
    links = {"node_link": 1e15, "network_link": 1e15, "node_latency_s": latency, "network_latency_s": latency}
    rates = {"attention_forward": attention, "attention_backward": attention, "matmul": matmul, "memory_bytes": 1e9}
    return Cluster(name=name, gpus_per_node=4, **links, **rates)


SLOW_MATMUL = cluster("slow matmuls", latency=1e-6, matmul=1e6)
"""Projecting all frames on every rank dominates; the other strategies are alike, so LV-XAttn is selected."""
SLOW_BLOCKS = cluster("slow blocks", latency=1e-6, matmul=1e12, attention=1e6)
"""Attention blocks hide every transfer: no strategy is 2% faster than the default."""
BUSY_LINKS = cluster("busy links", latency=0.1, matmul=1e12)
"""Every transfer costs 0.1 s, whatever its size: one gather for all layers is the fastest."""


def sent_by(ranks: int, **options: Any) -> list[dict[str, int]]:
    """Return the bytes that each rank sends in a training step, by label."""

    def step(model: Any, inputs: dict[str, Any], comm: Any) -> dict[str, int]:
        model(**inputs).loss.backward()
        return dict(comm.bytes.sent)

    return on_ranks(ranks, "mplug_owl3", CASE.with_options(self_attention="local", **options), step)


@functools.cache
def sent_without_layers() -> list[dict[str, int]]:
    """Return what is sent where cross-attention layers send nothing."""
    return sent_by(4, strategy="replicate")


def labels_of_layers(sent: dict[str, int], rank: int) -> set[str]:
    """Return the labels of what the cross-attention layers send."""
    base = sent_without_layers()[rank]
    return {name for name, count in sent.items() if count > base.get(name, 0)} - {"agreement", "gather", "hidden"}


@contextmanager
def selection_log() -> Iterator[list[str]]:
    """Collect what all loopback ranks log of selections."""
    lines: list[str] = []
    logger, handler = logging.getLogger("mllm_seqpar.planner.auto"), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("strategy", VISUAL_LABELS)
def test_each_strategy_sends_its_own_tensors(strategy: str) -> None:
    tile = {"tile": (2, 2)} if strategy == "mesh" else {}
    for rank, sent in enumerate(sent_by(4, strategy=strategy, **tile)):
        assert labels_of_layers(sent, rank) == VISUAL_LABELS[strategy]


@pytest.mark.parametrize(("rates", "strategy"), [(SLOW_MATMUL, "lv-xattn"), (BUSY_LINKS, "replicate")])
def test_auto_selects_the_cheapest_strategy_and_logs_why(rates: Cluster, strategy: str, tmp_path: Path) -> None:
    write_cluster(rates, tmp_path / "cluster.yaml")
    with selection_log() as lines:
        sent = sent_by(4, strategy="auto", cluster=str(tmp_path / "cluster.yaml"))
    for rank, each in enumerate(sent):
        assert labels_of_layers(each, rank) == VISUAL_LABELS[strategy]
    (line,) = set(lines)
    assert line.startswith(f'strategy="auto" on {rates.name}: {strategy}: '), line
    assert "a call" in line and "rows" in line and "keys" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "options", "selected"),
    [
        (SLOW_BLOCKS, {"self_attention": "auto"}, {'self_attention="auto" on slow blocks: ring'}),
        (BUSY_LINKS, {"self_attention": "auto"}, {'self_attention="auto" on busy links: ulysses'}),
        (SLOW_BLOCKS, {"strategy": "mesh"}, {'strategy="mesh" on slow blocks: ring'}),
        (
            SLOW_MATMUL,
            {"strategy": "mesh", "self_attention": "mesh", "tile": (2, 2)},
            {'self_attention="mesh" on slow matmuls: mesh 2x2', 'strategy="mesh" on slow matmuls: mesh 2x2'},
        ),
    ],
)
def test_cluster_file_decides_strategy_and_mesh(
    rates: Cluster, options: dict[str, Any], selected: set[str], tmp_path: Path
) -> None:
    write_cluster(rates, tmp_path / "cluster.yaml")
    case = CASE.with_options(cluster=str(tmp_path / "cluster.yaml"), **options)
    expected = reference("mplug_owl3", case)
    with selection_log() as lines:
        found = run_loopback(4, lambda comm: outcome("mplug_owl3", case, comm))
    check(found, expected, case)
    assert {line[: line.index(": ", line.index(": ") + 1)] for line in lines} == selected


def test_auto_measures_the_group_without_a_cluster_file() -> None:
    with selection_log() as lines:
        first, second = sent_by(2, strategy="auto")
    assert first.keys() == second.keys()
    assert len(set(lines)) == 1 and "measured" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "mesh", "tile": (2, 2)}, "tile: (2, 2) is for 4 ranks, but the group has 3; choose (3, 1)"),
        (
            {"strategy": "ulysses"},
            "ulysses: 4 query heads cannot be sharded over 3 ranks; the largest group that divides them is 2",
        ),
        ({"self_attention": "ulysses"}, "ulysses: 4 query heads cannot be sharded over 3 ranks"),
        ({"strategy": "auto", "cluster": "no/such.yaml"}, "no/such.yaml"),
        (
            {"cluster": "any.yaml"},
            "cluster: 'any.yaml' was given, but neither strategy='lv-xattn' nor self_attention='ring'",
        ),
    ],
)
def test_impossible_options_are_refused_on_every_rank(options: dict[str, Any], message: str) -> None:
    def run(comm: Any) -> str:
        model = model_of("mplug_owl3", CASE)
        inputs = inputs_of("mplug_owl3", CASE, model)
        with pytest.raises(ConfigError) as caught:
            patch_model(model, group=comm, **options)(**inputs)
        return str(caught.value)

    for text in run_loopback(3, run):
        assert message in text


def test_auto_works_on_one_rank() -> None:
    model = patch_model(model_of("mplug_owl3", CASE), strategy="auto")
    assert torch.isfinite(model(**inputs_of("mplug_owl3", CASE, model)).loss)
