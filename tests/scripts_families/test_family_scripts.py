"""Layer: real launch, then gloo ranks. Both scripts with a model directory of each family: as users start them.

AdamW's eps is 1e-4 here, as in tests/training/test_finetune.py, which says why.
"""

from pathlib import Path

import pytest
import torch
from infer_runs import answered, unpatched_tokens
from tiny_directories import MAKERS

from launch import launch
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.training.metrics import read_metrics

FAMILIES = [*MAKERS]
# Two groups of one: at times one of them has no picture, and FSDP must stay in step.
GROUPS = ("--sp", 1, "--gradient-checkpointing")
# Llama 3.2's rows that see nothing attend to all tiles, those of padding images too: a matter of who is in the batch.
MICRO_BATCH = {"mllama": 1}


@pytest.mark.launch
@pytest.mark.parametrize("name", FAMILIES)
def test_one_and_two_processes_learn_the_same(folder: Path, name: str) -> None:
    rows, models = [], []
    for number, (world, more) in enumerate([(1, ()), (2, ()), (2, GROUPS)][: 3 if name == "mllama" else 2]):
        output = folder / f"{name}-{number}"
        done = launch(
            world,
            "scripts/finetune.py",
            *("--model", folder / name, "--data", folder / "train.jsonl", "--output", output, "--no-progress"),
            *("--steps", 3, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4, "--freeze", "vision"),
            *("--micro-batch", MICRO_BATCH.get(name, 2), *more),
            config="configs/fsdp2_cpu_2.yaml",
        )
        assert done.returncode == 0, done.output
        rows.append(read_metrics(output / "metrics.jsonl"))
        load_processor(str(output / "model"))
        models.append(load_model(str(output / "model")).state_dict())
    assert len(rows[0]) == 3 and rows[0][0]["frames"] == 10
    for one, *others in zip(*rows, strict=True):
        for two in others:
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), (key, one, two)
            assert one["targets"] == two["targets"] and one["tokens"] == two["tokens"]
    assert rows[0][2]["loss"] < rows[0][0]["loss"]
    before = load_model(str(folder / name)).state_dict()
    assert before.keys() == models[0].keys() == models[1].keys()
    changed = {key for key, value in models[0].items() if not torch.equal(value, before[key])}
    assert changed and not any("vision" in key for key in changed), changed
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_the_unpatched_models(folder: Path, name: str, world: int) -> None:
    given = ["--model", folder / name, "--video", folder / "clip.mp4", "--num-frames", 5]
    assert answered(world, folder, *given) == unpatched_tokens(folder, name, 5)
