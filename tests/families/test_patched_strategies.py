"""Layer: one process, loopback ranks. What each strategy sends; what "auto" and cluster files select, log and agree on.

That results equal the unpatched model's with every strategy is in `test_exactness`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from family_harness import check_exact, inputs_of, model_of, on_ranks, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import Cluster, write_cluster
from tiny_models.mplug_owl3 import Case

CASE = Case(frames=(6, 5), length=24)
LOGGER = "mllm_seqpar.planner.auto"
VISUAL_LABELS: dict[str, set[str]] = {  # what cross-attention sends in forward and backward, beside replicated text
    "lv-xattn": {"q", "o", "lse", "do", "delta", "dq"},
    "ring": {"k", "v", "dk", "dv"},
    "mesh": {"q", "o", "lse", "do", "delta", "dq", "k", "v", "dk", "dv"},
    "ulysses": {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"},
    "replicate": set(),
}


def cluster(name: str, *, latency: float, matmul: float, attention: float = 1e12) -> Cluster:
    """Return a cluster whose links have a latency and unlimited bandwidth."""
    links = {"node_link": 1e15, "network_link": 1e15, "node_latency_s": latency, "network_latency_s": latency}
    rates = {"attention_forward": attention, "attention_backward": attention, "matmul": matmul, "memory_bytes": 1e9}
    return Cluster(name=name, gpus_per_node=4, **links, **rates)


# Projecting all frames on every rank dominates; the other strategies are alike, so LV-XAttn is selected.
SLOW_MATMUL = cluster("slow matmuls", latency=1e-6, matmul=1e6)
# Attention blocks hide every transfer: no strategy is 2% faster than the default.
SLOW_BLOCKS = cluster("slow blocks", latency=1e-6, matmul=1e12, attention=1e6)
# Every transfer costs 0.1 s, whatever its size: one gather for all layers is the fastest.
BUSY_LINKS = cluster("busy links", latency=0.1, matmul=1e12)


def sent_by(ranks: int, **options: Any) -> list[dict[str, int]]:

    def step(model: Any, inputs: dict[str, Any], comm: Any) -> dict[str, int]:
        model(**inputs).loss.backward()
        return dict(comm.bytes.sent)

    return on_ranks(ranks, "mplug_owl3", CASE.with_options(self_attention="local", **options), step)


def check_layers(sent: list[dict[str, int]], strategy: str) -> None:
    """Compare the labels of what the cross-attention layers send."""
    for found, base in zip(sent, sent_by(4, strategy="replicate"), strict=True):
        labels = {name for name, count in found.items() if count > base.get(name, 0)}
        assert labels - {"agreement", "gather", "hidden"} == VISUAL_LABELS[strategy]


def selections(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the selections that were logged."""
    return {line for line in caplog.messages if " a call, " in line}


@pytest.mark.parametrize("strategy", slow_unless(lambda name: name in ("lv-xattn", "mesh"), VISUAL_LABELS))
def test_each_strategy_sends_its_own_tensors(strategy: str) -> None:
    check_layers(sent_by(4, strategy=strategy, tile=(2, 2) if strategy == "mesh" else None), strategy)


@pytest.mark.parametrize(
    ("rates", "strategy"),
    [pytest.param(SLOW_MATMUL, "lv-xattn", marks=pytest.mark.slow), (BUSY_LINKS, "replicate")],
)
def test_auto_selects_the_cheapest_strategy_and_logs_why(
    rates: Cluster, strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_cluster(rates, tmp_path / "cluster.yaml")
    with caplog.at_level(logging.INFO, logger=LOGGER):
        check_layers(sent_by(4, strategy="auto", cluster=str(tmp_path / "cluster.yaml")), strategy)
    (line,) = selections(caplog)
    assert line.startswith(f'strategy="auto" on {rates.name}: {strategy}: '), line
    assert "a call" in line and "rows" in line and "keys" in line


def test_auto_counts_the_gradient_of_features_that_require_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replication gathers features in forward and sums their gradients in backward. Rank 2 of 3 has no frames."""
    write_cluster(BUSY_LINKS, tmp_path / "cluster.yaml")
    case = Case(frames=(2,), length=12, features="features", local_frames=True)
    case = case.with_options(strategy="auto", cluster=str(tmp_path / "cluster.yaml"), self_attention="local")

    def milliseconds(requires_grad: bool) -> float:
        def step(model: Any, inputs: dict[str, Any], comm: Any) -> None:
            features = inputs["image_embeds"].detach().requires_grad_(requires_grad and comm.rank < 2)
            model(**inputs | {"image_embeds": features}).loss.backward()

        caplog.clear()
        with caplog.at_level(logging.INFO, logger=LOGGER):
            on_ranks(3, "mplug_owl3", case, step)
        (line,) = selections(caplog)
        found = re.search(r": replicate: ([\d.]+) ms a call", line)
        assert found, line
        return float(found[1])

    assert milliseconds(True) == pytest.approx(2 * milliseconds(False), rel=0.05)


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
    rates: Cluster, options: dict[str, Any], selected: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_cluster(rates, tmp_path / "cluster.yaml")
    with caplog.at_level(logging.INFO, logger=LOGGER):
        check_exact("mplug_owl3", 4, CASE.with_options(cluster=str(tmp_path / "cluster.yaml"), **options))
    assert {line[: line.index(": ", line.index(": ") + 1)] for line in selections(caplog)} == selected


def test_auto_measures_the_group_without_a_cluster_file(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        first, second = sent_by(2, strategy="auto")
    assert first.keys() == second.keys()
    (line,) = selections(caplog)
    assert "measured" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "mesh", "tile": (2, 2)}, r"tile: \(2, 2\) is for 4 ranks, but the group has 3; choose \(3, 1\)"),
        ({"strategy": "ulysses"}, "4 query heads cannot .* over 3 ranks; the largest group that divides them is 2"),
        ({"self_attention": "ulysses"}, "ulysses: 4 query heads cannot be sharded over 3 ranks"),
        ({"strategy": "auto", "cluster": "no/such.yaml"}, "no/such.yaml"),
        ({"cluster": "any.yaml", "kernel": "torch_cpu"}, "'any.yaml' was given, but neither strategy='lv-xattn' nor"),
        ({"cluster": "a100-80g-8xN"}, "'a100-80g-8xN' has no rates of kernels .* by `mllm-seqpar calibrate`"),
    ],
)
def test_impossible_options_are_refused_on_every_rank(options: dict[str, Any], message: str) -> None:

    def run(comm: Any) -> None:
        model = model_of("mplug_owl3", CASE)
        with pytest.raises(ConfigError, match=message):
            patch_model(model, group=comm, **options)(**inputs_of("mplug_owl3", CASE, model))

    run_loopback(3, run)


def test_auto_works_on_one_rank() -> None:
    check_exact("mplug_owl3", 1, CASE.with_options(strategy="auto"))
