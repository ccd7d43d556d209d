"""Layer: real launch. scripts/finetune.py under a checked-in configuration: a failing rank, and a resumed run.

The uninterrupted run on the worker pool is the reference, with the same options as in test_fine_tune.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch import launch, launch_environment
from mllm_seqpar.training import loop
from mllm_seqpar.training.metrics import read_metrics
from ranks import ranks

pytestmark = [pytest.mark.launch, pytest.mark.slow]

CONFIG = "configs/fsdp2_cpu_2.yaml"


def fine_tune(rank: int, world: int, argv: list[str]) -> None:
    loop.fine_tune(argv)


def rows_of(output: Path) -> list[dict[str, Any]]:
    varying = ("seconds", "peak_memory_mib")
    return [{k: v for k, v in row.items() if k not in varying} for row in read_metrics(output / "metrics.jsonl")]


def test_a_rank_that_fails_ends_all_and_the_run_resumes_bit_for_bit(training_files: Path, tmp_path: Path) -> None:
    common = ["--model", training_files / "model", "--data", training_files / "train.jsonl", "--no-progress"]
    common += ["--steps", 4, "--save-every", 2, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4]
    output = tmp_path / "launched"
    failed = launch(2, "tests/launch/fine_tune_with_failing_rank.py", *common, "--output", output, config=CONFIG)
    assert failed.returncode != 0
    assert "[rank 1] error: clip.mp4: cannot be decoded" in failed.output, failed.output
    assert "[rank 0] stopped: another rank ended" in failed.output, failed.output

    resumed = launch(2, "scripts/finetune.py", *common, "--output", output, "--resume", "auto", config=CONFIG)
    assert resumed.returncode == 0, resumed.output
    assert "1 data parallel x 2 sequence parallel ranks" in resumed.output
    assert f"continuing from {output}/checkpoint-00000002" in resumed.output

    reference = tmp_path / "reference"
    ranks(2, launch_environment(CONFIG)).run(fine_tune, [*map(str, common), "--output", str(reference)])
    assert rows_of(output) == rows_of(reference)
    weights = load_file(output / "model" / "model.safetensors")
    for name, expected in load_file(reference / "model" / "model.safetensors").items():
        assert torch.equal(weights[name], expected), name
