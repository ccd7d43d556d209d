"""Layer: pure Python. Cluster files: there and back, and each way to get one wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import ROUND, with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster, write_cluster

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))


def test_there_and_back(tmp_path: Path) -> None:
    for cluster in (ROUND, with_(network_link_per_gpu=1e7, peak_flops=1e15, overlap=0.5, source="measured: here")):
        write_cluster(cluster, tmp_path / "c.yaml")
        assert read_cluster(tmp_path / "c.yaml") == cluster


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    write_cluster(ROUND, tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    (tmp_path / "c.yaml").write_text(text.replace("node_link: 1000000000.0", "node_link: 1e9"))
    assert read_cluster(tmp_path / "c.yaml") == ROUND


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("matmul: 1000000000000.0\n", "", r"c\.yaml: matmul \(FLOP/s\) missing"),
        ("matmul:", "matmull:", r"unknown field matmull; there are"),
        ("matmul: 1", "matmul: -1", r"matmul is -1000000000000.0; give FLOP/s, above 0"),
        ("network_latency_s: 0.0", "network_latency_s: -1", r"network_latency_s is -1; give seconds, 0 or more"),
        ("gpus_per_node: 4", "gpus_per_node: 0", r"gpus_per_node is 0; give a whole number of GPUs"),
        ("gpus_per_node: 4", "gpus_per_node: 4.5", r"gpus_per_node is 4.5; give a whole number of GPUs"),
        ("matmul: 1000000000000.0", "matmul: fast", r"matmul is 'fast'; give FLOP/s"),
        ("matmul: 1000000000000.0", "matmul: .nan", r"matmul is nan"),
        ("overlap: 1.0", "overlap: 2", r"overlap is 2; it is a share"),
        ("links: all", "links: some", r"links is 'some'; give all, node or none"),
        ("name: round", "name: [round]", r"name is \['round'\]; give a text"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_cluster(ROUND, tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    assert old in text
    (tmp_path / "c.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_cluster(tmp_path / "c.yaml")


def test_links_that_were_not_measured_are_not_used() -> None:
    for links, ranks, message in (
        ("none", 2, "gpus_per_node, node_link and network_link"),
        ("node", 5, "need network_link"),
    ):
        with pytest.raises(ConfigError, match=f"{ranks} ranks need .*{message.removeprefix('need ')}"):
            with_(links=links).check_ranks(ranks)
    with_(links="none").check_ranks(1)
    with_(links="node").check_ranks(4)
    with_().check_ranks(99)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file .*absent.yaml; configs/clusters holds some"):
        read_cluster(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="list.yaml holds list; it must hold fields"):
        read_cluster(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"broken.yaml is not YAML: .*\Z"):
        read_cluster(tmp_path / "broken.yaml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_come_along_are_read(path: Path) -> None:
    assert read_cluster(path).name == path.stem


def test_simulating_needs_neither_torch_nor_yaml() -> None:
    code = "import sys, mllm_seqpar.planner; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
