"""Layer: one process, and gloo ranks. The example of README.md and of docs/get_started.md runs, also on GPUs."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT
from mllm_seqpar.cli.example import ExampleOptions, write_example
from ranks import ranks

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, str]:
    """Return all Python blocks of the documentation, by page and number."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "patches").glob("*/README.md")]
    return {
        f"{page.relative_to(ROOT)} {i}": code
        for page in pages
        for i, code in enumerate(PYTHON.findall(page.read_text()))
    }


def example() -> str:
    """Return the example, which is the same on both pages."""
    pages = ("README.md", "docs/get_started.md")
    found = {code for name, code in blocks().items() if name.startswith(pages) and "init_process_group" in code}
    (code,) = found
    return code


def run(rank: int, world: int, code: str) -> tuple[float, float]:
    """Run the example as `rank` of a group that exists; return its loss and the norm of its gradient."""
    found: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group") as init, mock.patch.object(dist, "destroy_process_group") as end:
        exec(compile(code, "README.md", "exec"), found)
    assert init.call_args == mock.call("gloo", device_id=None) and end.call_args == mock.call()
    grads = [p.grad for p in found["model"].parameters() if p.grad is not None]
    return found["loss"].item(), torch.stack([g.float().norm() for g in grads]).norm().item()


@pytest.mark.slow
def test_example_runs_and_gives_the_loss_of_one_process(training_files: Path) -> None:
    code = example().replace("sys.argv[1]", repr(str(training_files / "model"))).replace("16, 384, 384", "5, 28, 28")
    assert "sys.argv" not in code
    (one,), two = ranks(1).run(run, code), ranks(2).run(run, code)
    assert two[0] == two[1]
    assert torch.tensor(two[0]).allclose(torch.tensor(one), rtol=0.02)  # bf16


def run_guide(rank: int, world: int, folder: Path, code: str) -> list[float]:
    """Run an example of the Trainer's guide in a folder that has the model and the data; return the losses."""
    found: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        exec(compile(code, "docs/guides/trainer.md", "exec"), found)
    return [row["loss"] for row in found["trainer"].state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SeqParTrainer(", "SeqParDPOTrainer("])
def test_examples_of_the_trainer_guide_run_and_give_the_losses_of_one_process(tmp_path: Path, name: str) -> None:
    if "DPO" in name:
        pytest.importorskip("trl", reason="needs trl: pip install 'mllm-seqpar[trl]'")
    page = (ROOT / "docs/guides/trainer.md").read_text()
    (code,) = [code for code in PYTHON.findall(page) if f"trainer = {name}" in code]
    write_example(ExampleOptions(output=str(tmp_path / "hour"), short=24, unseen=4, long_frames=20))
    (one,), two = (ranks(world, {"CI": "1"}).run(run_guide, tmp_path, code) for world in (1, 2))
    assert one and all(losses == pytest.approx(one, rel=1e-4) for losses in two)


def test_example_takes_the_gpu_of_its_local_rank_before_it_creates_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mock.Mock()
    calls.init.side_effect = KeyboardInterrupt  # the rest of the example needs the GPU
    monkeypatch.setattr(sys, "argv", ["train.py", "DIR"])
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setitem(os.environ, variable, "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(dist, "init_process_group", calls.init)
    with pytest.raises(KeyboardInterrupt):
        exec(compile(example(), "README.md", "exec"), {})
    device = torch.device("cuda", 3)
    assert calls.mock_calls == [mock.call.set_device(device), mock.call.init("nccl", device_id=device)]


def test_every_example_that_names_nccl_chooses_a_device() -> None:
    wrong = [
        name
        for name, code in blocks().items()
        if ("nccl" in code or "init_process_group" in code) and not ("set_device(" in code and "device_id=" in code)
    ]
    assert not wrong, wrong


def test_examples_are_valid_python() -> None:
    for name, code in blocks().items():
        compile(code, name, "exec")


@pytest.mark.slow
def test_example_is_a_group_of_one_without_a_launcher(training_files: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example().replace("16, 384, 384", "5, 28, 28"))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "train.py", str(training_files / "model")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(r"loss \d+\.\d{4}\n", done.stdout), done.stderr
