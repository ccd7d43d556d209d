"""Layer: one process. The demonstration's own steps, small: what scripts/demo.sh runs but for the launches."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """(demo_task, demo_check)."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("demo_task"), importlib.import_module("demo_check")


def test_what_the_demo_makes_can_be_scored_and_counted(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, check = scripts
    small = task.DemoTask(short=2, short_frames=(2, 4), longer=1, longer_frames=(6, 8), unseen=3, long_frames=9)
    long = task.make(tmp_path, small)
    assert long.frames == 9 and len((tmp_path / "train.jsonl").read_text().splitlines()) == 3
    model = ("--model", str(tmp_path / "model"))
    assert task.main(["score", *model, "--data", str(tmp_path / "eval.jsonl")]) == 0
    assert "of 3 right" in capsys.readouterr().out
    assert check.main(["bytes", *model, "--data", str(tmp_path / "long.jsonl"), "--ranks", "2"]) == 0
    assert "LV-XAttn sends" in capsys.readouterr().out


def test_answers_are_compared_by_tokens(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    check = scripts[1]
    for name, tokens in (("one", [5, 2]), ("same", [5, 2]), ("other", [5, 3])):
        report = {"ranks": 4, "frames": 9, "answers": [{"text": " red", "tokens": tokens}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    for many, expected, status in (("same", "red", 0), ("other", "red", 1), ("same", "green", 1)):
        given = ["--one", str(tmp_path / "one.json"), "--many", str(tmp_path / f"{many}.json"), "--expected", expected]
        assert check.main(["answers", *given]) == status
