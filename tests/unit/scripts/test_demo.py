"""Layer: one process. The steps of scripts/demo.sh, small, without the launches."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_demo_data_can_be_scored_and_its_bytes_counted(script, tmp_path: Path, capsys) -> None:
    task, check = script("demo_task"), script("demo_check")
    small = task.DemoTask(short=2, short_frames=(2, 4), longer=1, longer_frames=(6, 8), unseen=3, long_frames=9)
    long = task.make(tmp_path, small)
    assert long.frames == 9 and len((tmp_path / "train.jsonl").read_text().splitlines()) == 3
    model = ("--model", str(tmp_path / "model"))
    assert task.main(["score", *model, "--data", str(tmp_path / "eval.jsonl")]) == 0
    assert "of 3 right" in capsys.readouterr().out
    assert check.main(["bytes", *model, "--data", str(tmp_path / "long.jsonl"), "--ranks", "2"]) == 0
    assert "LV-XAttn sends" in capsys.readouterr().out


def test_answers_are_compared_by_tokens(script, tmp_path: Path) -> None:
    for name, tokens in (("one", [5, 2]), ("same", [5, 2]), ("other", [5, 3])):
        report = {"ranks": 4, "frames": 9, "answers": [{"text": " red", "tokens": tokens}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    for many, expected, status in (("same", "red", 0), ("other", "red", 1), ("same", "green", 1)):
        given = ["--one", str(tmp_path / "one.json"), "--many", str(tmp_path / f"{many}.json"), "--expected", expected]
        assert script("demo_check").main(["answers", *given]) == status
