"""Layer: one process. `scripts/check_checkpoint.py` on complete and broken tiny model directories."""

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from family_directories import MAKERS
from launch import ROOT
from mllm_seqpar.attention.executor import PartialResult
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from model_copies import tiny_model
from tiny_models.mplug_owl3 import tiny_tokenizer

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the script's `main` and returns exit status and output."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_checkpoint

    def run(*argv: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_checkpoint.py", *map(str, argv)])
        return check_checkpoint.main(), capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def native(folder: Path) -> None:
    """Write a tiny mPLUG-Owl3 of the first generation, whose processor cuts still images."""
    tiny_model("per_head").save_pretrained(folder / "native")
    images = MPlugOwl3ImageProcessor(image_size=28)
    MPlugOwl3Processor(images, tiny_tokenizer(placeholder=False)).save_pretrained(folder / "native")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in MAKERS)])
def test_complete_checkpoint_passes(check, folder: Path, name: str, tmp_path: Path) -> None:
    status, printed = check(folder / name, "--max-new-tokens", 3, "--frames", 3, "--report", tmp_path / "report.md")
    assert status == 0, printed
    text = (tmp_path / "report.md").read_text()
    rows = ("files", "names and shapes", "processor", "model", "image", "video")
    assert all(f"**{row}: passed.**" in text for row in rows) and "for 3 frames" in text


def test_unexpected_tensor_name_fails_before_weights_are_loaded(check, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder / "mllama", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    renamed = {name.replace("1.cross_attn.k_norm", "1.cross_attn.key_norm"): x for name, x in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, broken / "model.safetensors", {"format": "pt"})
    status, printed = check(broken)
    assert status == 1 and "names and shapes: FAILED" in printed and "k_norm" in printed
    assert "model: passed" not in printed


@pytest.mark.slow
def test_patched_model_that_differs_fails(check, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = PartialResult.add
    monkeypatch.setattr(PartialResult, "add", lambda self, o, *args, **more: add(self, 1.01 * o, *args, **more))
    status, printed = check(folder / "mllama", "--max-new-tokens", 2)
    assert status == 1 and "the patched model differs by more than 0.0001" in printed


def test_model_larger_than_memory_is_not_loaded(check, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import check_checkpoint

    monkeypatch.setattr(check_checkpoint, "host_memory", lambda: 1000)
    status, printed = check(folder / "idefics")
    assert status == 0 and "**model: not run.**" in printed and "are free on cpu" in printed
