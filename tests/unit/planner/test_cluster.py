"""Layer: pure Python. Cluster files: a round trip, and an error for each kind of invalid file."""

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import ROUND, with_

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import Cluster, read_cluster, write_cluster

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))


def read_changed(folder: Path, old: str, new: str) -> Cluster:
    """Write ROUND, replace `old` by `new` in the file, and read it."""
    write_cluster(ROUND, folder / "c.yaml")
    text = (folder / "c.yaml").read_text()
    assert old in text
    (folder / "c.yaml").write_text(text.replace(old, new))
    return read_cluster(folder / "c.yaml")


def test_write_and_read_give_an_equal_cluster(tmp_path: Path) -> None:
    for cluster in (ROUND, with_(network_link_per_gpu=1e7, peak_flops=1e15, overlap=0.5, source="measured: here")):
        write_cluster(cluster, tmp_path / "c.yaml")
        assert read_cluster(tmp_path / "c.yaml") == cluster
    # YAML reads 1e9 as text
    assert read_changed(tmp_path, "node_link: 1000000000.0", "node_link: 1e9") == ROUND


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("matmul: 1000000000000.0\n", "", r"c\.yaml: matmul \(FLOP/s\) missing"),
        ("matmul:", "matmull:", r"unknown field matmull; allowed fields: attention_backward"),
        ("matmul: 1", "matmul: -1", r"matmul is -1000000000000.0; expected FLOP/s, above 0"),
        ("network_latency_s: 0.0", "network_latency_s: -1", r"network_latency_s is -1; expected seconds, 0 or more"),
        ("gpus_per_node: 4", "gpus_per_node: 4.5", r"gpus_per_node is 4.5; expected a whole number of GPUs"),
        ("matmul: 1000000000000.0", "matmul: fast", r"matmul is 'fast'; expected FLOP/s"),
        ("matmul: 1000000000000.0", "matmul: .nan", r"matmul is nan"),
        ("overlap: 1.0", "overlap: 2", r"overlap is 2; expected a fraction from 0 to 1"),
        ("links: all", "links: some", r"links is 'some'; expected all, node or none"),
        ("name: round", "name: [round]", r"name is \['round'\]; expected a string"),
    ],
)
def test_invalid_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_changed(tmp_path, old, new)


def test_file_that_holds_no_cluster_is_rejected(tmp_path: Path) -> None:
    cases = {
        None: "there is no file .*c.yaml; see configs/clusters",
        "- 1\n": "holds a list",
        "a: [": r"is not YAML: .*\Z",
    }
    for text, message in [*cases.items(), ("a: [", r"is not YAML: .*\Z")]:
        if text:
            (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_cluster(tmp_path / "c.yaml")


def test_links_that_were_not_measured_are_not_used() -> None:
    with pytest.raises(ConfigError, match="2 ranks need gpus_per_node, node_link and network_link"):
        with_(links="none").check_ranks(2)
    with pytest.raises(ConfigError, match="5 ranks need network_link"):
        with_(links="node").check_ranks(5)
    for links, count in (("none", 1), ("node", 4), ("all", 99)):
        with_(links=links).check_ranks(count)


def test_cluster_files_of_the_package_are_valid() -> None:
    assert FILES and [read_cluster(path).name for path in FILES] == [path.stem for path in FILES]


def test_cost_model_imports_neither_torch_nor_yaml() -> None:
    modules = "mllm_seqpar.planner, mllm_seqpar.planner.plan, mllm_seqpar.patches.mllama.planner"
    code = f"import sys, {modules}; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
