"""Layer: real launch. The user's script under the checked-in configs: one trajectory on any layout, failures that end.

AdamW's eps is 1e-4 here: with 1e-8 its first steps move a parameter whose true gradient is zero (the bias of keys
without rotary embedding) by the sign of its rounding error, and layouts drift apart by 1e-4 without any being wrong.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch import ROOT, Launched, launch
from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model, tiny_tokenizer
from mllm_seqpar.training.metrics import read_metrics

pytestmark = pytest.mark.launch

SCRIPT = "scripts/finetune.py"
STEPS = 12
UNSTEADY = {"seconds", "peak_memory_mib"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, 18 videos of 1 to 7 frames, and two chats without any among the 20 of the training data."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(None).save_pretrained(folder / "model")
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer()).save_pretrained(folder / "model")
    rows: list[Any] = [video.sample(folder) for video in make_needle_videos(folder / "videos", 18, frames=(1, 7))]
    text = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello, hello"}]}
    rows[3:3] = rows[8:8] = [text]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    return folder


def finetune(inputs: Path, output: Path, world: int, config: str, *more: object, script: str = SCRIPT) -> Launched:
    own = [part for part in more if part != "--"]
    before = own if "--" in more else []
    return launch(
        world,
        script,
        *([*before, "--"] if before else []),
        *("--model", inputs / "model", "--data", inputs / "train.jsonl", "--output", output, "--no-progress"),
        *("--steps", STEPS, "--global-batch", 4, "--lr", 1e-3, "--eps", 1e-4),
        *([] if before else own),
        config=config,
        timeout=300,
    )


def rows_of(output: Path, kind: str = "loss") -> list[dict[str, Any]]:
    return [row for row in read_metrics(output / "metrics.jsonl") if kind in row]


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """The run of one process, stopped after 5 steps and resumed."""
    output = inputs / "alone"
    more = ("--eval-data", inputs / "eval.jsonl", "--eval-every", 8)
    done = finetune(inputs, output, 1, "configs/fsdp2_cpu_2.yaml", *more, "--stop-after", 5)
    assert done.returncode == 0, done.output
    assert "stopped after step 5 of 12" in done.output
    assert not (output / "model").exists()
    done = finetune(inputs, output, 1, "configs/fsdp2_cpu_2.yaml", *more, "--resume", "auto")
    assert done.returncode == 0, done.output
    return output


def assert_same_course(output: Path, reference: Path) -> None:
    for kind in ("loss", "eval_loss"):
        found, expected = rows_of(output, kind), rows_of(reference, kind)
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for one, other in zip(found, expected, strict=True):
            for name in {"loss", "grad_norm", "eval_loss"} & one.keys():
                assert one[name] == pytest.approx(other[name], rel=1e-4), (name, one, other)
            for name in {"targets", "tokens", "frames", "lr"} & one.keys():
                assert one[name] == other[name]


def test_one_process_learns(alone: Path) -> None:
    losses = [row["loss"] for row in rows_of(alone)]
    assert len(losses) == STEPS
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_two_groups_of_two_and_resume_to_the_bit(inputs: Path, alone: Path) -> None:
    straight, resumed = inputs / "straight", inputs / "resumed"
    more = ("--sp", 2, "--eval-data", inputs / "eval.jsonl", "--eval-every", 8, "--save-every", 8)
    done = finetune(inputs, straight, 4, "configs/fsdp2_cpu_4.yaml", *more)
    assert done.returncode == 0, done.output
    assert "2 data parallel x 2 sequence parallel ranks" in done.output
    assert_same_course(straight, alone)

    # The trained model is an ordinary one, under the names of the one it began as.
    model = MPlugOwl3ForConditionalGeneration.from_pretrained(straight / "model")
    MPlugOwl3Processor.from_pretrained(straight / "model")
    weights = load_file(straight / "model" / "model.safetensors")
    assert weights.keys() == load_file(inputs / "model" / "model.safetensors").keys()
    reference = MPlugOwl3ForConditionalGeneration.from_pretrained(alone / "model").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-3, atol=1e-4)

    # A run that was cut off after its checkpoint of step 8, later metrics already written.
    resumed.mkdir()
    shutil.copytree(straight / "checkpoint-00000008", resumed / "checkpoint-00000008")
    shutil.copy(straight / "metrics.jsonl", resumed)
    done = finetune(inputs, resumed, 4, "configs/fsdp2_cpu_4.yaml", *more, "--resume", "auto")
    assert done.returncode == 0, done.output
    assert f"continuing from {resumed}/checkpoint-00000008" in done.output
    assert bare(resumed) == bare(straight)
    for name, weight in load_file(resumed / "model" / "model.safetensors").items():
        assert torch.equal(weight, weights[name]), name


def bare(output: Path) -> list[dict[str, Any]]:
    """All rows, without what no two runs have in common."""
    return [{k: v for k, v in row.items() if k not in UNSTEADY} for row in read_metrics(output / "metrics.jsonl")]


def test_one_group_of_four(inputs: Path, alone: Path) -> None:
    output = inputs / "four"
    more = ("--sp", 4, "--eval-data", inputs / "eval.jsonl", "--eval-every", 8)
    other = ("--micro-batch", 4, "--gradient-checkpointing")  # another way through the same numbers, and a faster one
    done = finetune(inputs, output, 4, "configs/fsdp2_cpu_4.yaml", *more, *other)
    assert done.returncode == 0, done.output
    assert_same_course(output, alone)


@pytest.mark.parametrize(
    ("odd", "messages"),
    [
        (
            ("add", "--strategy", "ring", "--data", "eval.jsonl"),
            ("strategy: rank 0: lv-xattn; rank 1: ring", "data: rank 0: {inputs}/train.jsonl; rank 1: eval.jsonl"),
        ),
        (("raise",), ("[rank 1] error: clip.mp4: cannot be decoded",)),
        (("kill",), ("[rank 0] stopped: another rank ended",)),
    ],
)
def test_an_odd_rank_ends_all(inputs: Path, tmp_path: Path, odd: tuple[str, ...], messages: tuple[str, ...]) -> None:
    config = "configs/fsdp2_cpu_2.yaml"
    done = finetune(inputs, tmp_path / "out", 2, config, *odd, "--", script="tests/training/odd_rank.py")
    assert done.returncode != 0
    for message in messages:
        assert message.format(inputs=inputs) in done.output, done.output
    assert done.seconds < 280  # nothing waits for the time limit of the process group, 300 s


def test_bad_arguments_are_one_line(inputs: Path, tmp_path: Path) -> None:
    given = ("--model", tmp_path, "--data", inputs / "train.jsonl", "--output", tmp_path / "out")
    done = launch(1, SCRIPT, *given, config="configs/fsdp2_cpu_2.yaml")
    assert done.returncode != 0
    ours = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert ours == [f"error: --model {tmp_path}: no config.json there; give a directory that save_pretrained wrote"]
    assert "failure.py" not in done.output


def test_every_config_is_fsdp2() -> None:
    import yaml

    for path in sorted((ROOT / "configs").glob("fsdp2_*.yaml")):
        config = yaml.safe_load(path.read_text())
        assert config["distributed_type"] == "FSDP", path
        assert config["fsdp_config"]["fsdp_version"] == 2, path
        assert config["use_cpu"] == ("cpu" in path.name), path
        assert config["num_processes"] % config["num_machines"] == 0, path
    assert os.path.isfile(ROOT / "configs" / "fsdp2_cpu_2.yaml")
