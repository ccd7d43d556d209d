"""Layer: pure Python. `mllm-seqpar configs` lists and copies the configurations that a package contains."""

from pathlib import Path

import pytest

from mllm_seqpar.__main__ import main
from mllm_seqpar.planner.cluster import read_cluster
from mllm_seqpar.planner.descriptions import CONFIGS


def test_configurations_are_listed_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(paths) > 20 and all(path.is_file() and path.suffix == ".yaml" for path in paths)
    target = tmp_path / "configs"
    assert main(["configs", "--output", str(target)]) == 0
    for path in paths:
        assert (target / path.relative_to(CONFIGS)).read_bytes() == path.read_bytes()
    assert read_cluster(str(target / "clusters" / "a100-80g-4x4.yaml")).gpus_per_node == 4
    assert (target / "fsdp2_cpu_2.yaml").is_file()
    assert main(["configs", "--output", str(target)]) == 2
    assert "it exists and is not an empty directory" in capsys.readouterr().err
