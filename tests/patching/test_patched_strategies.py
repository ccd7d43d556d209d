"""Layer: gloo ranks. What each strategy of a patched model really sends, and what "auto" takes, logs and agrees on.

That results are the unpatched model's, whatever the strategy: `test_patched_exact` and tests/families/test_strategies.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from patched import PATIENCE, Case, check, inputs_of, model_of, patched_rank, reference

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.planner import Cluster, write_cluster
from outcomes import Outcome
from ranks import ranks

CASE = Case(frames=(6, 5), length=24)
VISUAL = {  # labels that cross-attention alone sends, beside local text: forward and backward
    "lv-xattn": {"q", "o", "lse", "do", "dq"},
    "ring": {"k", "v", "dk", "dv"},
    "mesh": {"q", "o", "lse", "do", "dq", "k", "v", "dk", "dv"},
    "ulysses": {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"},
    "replicate": set(),
}


def cluster(name: str, *, latency: float, matmul: float, attention: float = 1e12) -> Cluster:
    """Links without an end but for their latency."""
    links = {"node_link": 1e15, "network_link": 1e15, "node_latency_s": latency, "network_latency_s": latency}
    rates = {"attention_forward": attention, "attention_backward": attention, "matmul": matmul, "memory_bytes": 1e9}
    return Cluster(name=name, gpus_per_node=4, **links, **rates)


SLOW = cluster("slow matmuls", latency=1e-6, matmul=1e6)
"""Projecting all frames on every rank is what costs; the others are alike: LV-XAttn."""
BLOCKS = cluster("slow blocks", latency=1e-6, matmul=1e12, attention=1e6)
"""Blocks hide every transfer: no way is 2% faster than the usual one."""
BUSY = cluster("busy links", latency=0.1, matmul=1e12)
"""Every transfer costs a tenth of a second, whatever its size: gathering once for all layers beats all others."""


def sent_by(rank: int, world: int, options: dict[str, Any]) -> dict[str, int]:
    """What a rank sends in a training step, by label."""
    model = model_of("per_head", CASE)
    patch_model(model, self_attention="local", **options)
    try:
        model(**inputs_of("per_head", CASE, model)).loss.backward()
        return dict(patch_of(model).context.comm.bytes.sent)
    finally:
        unpatch_model(model)
        model.zero_grad()


@pytest.mark.parametrize("strategy", VISUAL)
def test_each_strategy_sends_its_own(strategy: str) -> None:
    tile = {"tile": (2, 2)} if strategy == "mesh" else {}
    for rank, sent in enumerate(ranks(4).run(sent_by, {"strategy": strategy, **tile}, timeout=PATIENCE)):
        assert visual(sent, rank) == VISUAL[strategy]


@functools.cache
def text_alone() -> list[dict[str, int]]:
    """What is sent where frames need nothing by layer."""
    return ranks(4).run(sent_by, {"strategy": "replicate"}, timeout=PATIENCE)


def visual(sent: dict[str, int], rank: int) -> set[str]:
    """What is sent for the frames, layer by layer: what is beyond the text's own."""
    text = text_alone()[rank]
    return {name for name, count in sent.items() if count > text.get(name, 0)} - {"agreement", "gather", "hidden"}


class Told(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def told_of_choices() -> Iterator[list[str]]:
    """The lines that are logged of choices inside the block."""
    told, log = Told(), logging.getLogger("mllm_seqpar.planner.auto")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield told.lines
    finally:
        log.removeHandler(told)


def auto_by(rank: int, world: int, cluster: str | None, passes: int = 1) -> tuple[list[str], dict[str, int]]:
    with told_of_choices() as lines:
        for _ in range(passes):
            sent = sent_by(rank, world, {"strategy": "auto", "cluster": cluster})
    return lines, sent


def test_auto_takes_what_the_rates_make_cheapest_and_says_why(tmp_path: Path) -> None:
    for rates, strategy in ((SLOW, "lv-xattn"), (BUSY, "replicate")):
        path = tmp_path / f"{strategy}.yaml"
        write_cluster(rates, path)
        found = ranks(4).run(auto_by, str(path), timeout=PATIENCE)
        for rank, (_, sent) in enumerate(found):
            assert visual(sent, rank) == VISUAL[strategy]
        (line,) = found[0][0]
        assert line.startswith(f'strategy="auto" on {rates.name}: {strategy}: '), line
        assert "a call" in line and "rows" in line and "keys" in line


def chosen_rank(rank: int, world: int, gate: str | None, case: Case) -> tuple[Outcome, list[str]]:
    """What the patched model gives, and what was logged of choices."""
    with told_of_choices() as lines:
        return patched_rank(rank, world, gate, case), lines


@pytest.mark.parametrize(
    "rates,options,told",
    [
        (BLOCKS, {"self_attention": "auto"}, {'self_attention="auto" on slow blocks: ring'}),
        (BUSY, {"self_attention": "auto"}, {'self_attention="auto" on busy links: ulysses'}),
        (BLOCKS, {"strategy": "mesh"}, {'strategy="mesh" on slow blocks: ring'}),
        (
            SLOW,
            {"strategy": "mesh", "self_attention": "mesh", "tile": (2, 2)},
            {'self_attention="mesh" on slow matmuls: mesh 2x2', 'strategy="mesh" on slow matmuls: mesh 2x2'},
        ),
    ],
)
def test_what_a_cluster_file_decides(rates: Cluster, options: dict[str, Any], told: set[str], tmp_path: Path) -> None:
    """Self-attention by auto, a mesh's tile and the order of its steps; results stay the unpatched model's."""
    write_cluster(rates, tmp_path / "cluster.yaml")
    case = CASE.with_options(cluster=str(tmp_path / "cluster.yaml"), **options)
    found = ranks(4).run(chosen_rank, "per_head", case, timeout=PATIENCE)
    check([outcome for outcome, _ in found], reference("per_head", case), case)
    assert {line[: line.index(": ", line.index(": ") + 1)] for line in found[0][1]} == told


def test_auto_measures_where_no_file_is_given() -> None:
    found = ranks(2).run(auto_by, None, timeout=PATIENCE)
    assert set(found[0][1]) == set(found[1][1]) and len(found[0][0]) == 1 and "measured" in found[0][0][0]


def other_file(rank: int, world: int, folder: str) -> str:
    """Nodes have disks of their own, and files of one name."""
    own, before = Path(folder) / str(rank), os.getcwd()
    own.mkdir()
    write_cluster(SLOW if rank else BUSY, own / "rates.yaml")
    os.chdir(own)
    try:
        with pytest.raises(AgreementError) as error:
            patch_model(model_of("per_head", CASE), strategy="auto", cluster="rates.yaml")
    finally:
        os.chdir(before)
    return str(error.value)


def test_ranks_must_decide_by_the_same_rates(tmp_path: Path) -> None:
    assert all("busy links" in text and "slow matmuls" in text for text in ranks(2).run(other_file, str(tmp_path)))


def refused(rank: int, world: int, options: dict[str, Any]) -> str:
    model = model_of("per_head", CASE)
    try:
        patch_model(model, **options)
        model(**inputs_of("per_head", CASE, model))
    except ConfigError as error:
        return str(error)
    finally:
        if patch_of(model) is not None:
            unpatch_model(model)
    return "nothing was raised"


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"strategy": "mesh", "tile": (2, 2)},
            "tile: (2, 2) is for 4 ranks, but the group has 3; choose (3, 1)",
        ),
        ({"strategy": "ulysses"}, "ulysses: 4 query heads cannot be sharded over 3 ranks; the largest group that divides them is 2"),
        ({"self_attention": "ulysses"}, "ulysses: 4 query heads cannot be sharded over 3 ranks"),
        ({"strategy": "auto", "cluster": "no/such.yaml"}, "no/such.yaml"),
        (
            {"cluster": "any.yaml"},
            "cluster: 'any.yaml' was given, but neither strategy='lv-xattn' nor self_attention='ring'",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(options: dict[str, Any], message: str) -> None:
    for text in ranks(3).run(refused, options, timeout=PATIENCE):
        assert message in text


def test_auto_on_one_process_is_lv_xattn() -> None:
    model = patch_model(model_of("per_head", CASE), strategy="auto")
    try:
        assert torch.isfinite(model(**inputs_of("per_head", CASE, model)).loss)
    finally:
        unpatch_model(model)
