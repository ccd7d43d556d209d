"""Layer: one process. Benchmarks that print a table, the demo's steps, and the page of benchmarks; tiny sizes."""

import json
import shutil
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from launch import ROOT
from mllm_seqpar.__main__ import main


def test_kernels_are_compared_and_timed(script, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = script("kernels")
    kernels.main(["--device", "cpu", "--shape", "1,4,2,8,16,8", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "sdpa" in printed and "torch_cpu" in printed and "wrong" not in printed


def test_wrong_kernel_is_reported_and_not_timed(script, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = script("kernels")
    monkeypatch.setattr(kernels, "CLOSE", {torch.float32: 0.0})
    row = kernels.measure_shape((1, 4, 2, 8, 16, 8), "float32", "cpu", ["blocked_matmul"], causal=False, repeats=1)[1]
    assert row["wrong"] and "differs" in row["problem"] and "forward_ms" not in row


def test_host_path_counts_the_calls_of_a_block(script, capsys: pytest.CaptureFixture[str]) -> None:
    host_path = script("host_path")
    host_path.main(["--ranks", "3", "--repeats", "1"])
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| lv_xattn")]
    assert [(row[2].strip(), row[3].strip()) for row in table] == [
        (what, direction) for what in ("call", "layer") for direction in ("forward", "backward")
    ]
    calls = [int(row[-1]) for row in table]
    assert calls[2] < calls[0] and calls[3] < calls[1], "a layer plans nothing"


@pytest.mark.slow
def test_example_and_the_checks_of_the_demo(script, tmp_path: Path, capsys) -> None:
    check = script("demo_check")
    sizes = {"short": 2, "short_frames": 4, "longer": 1, "unseen": 3, "long_frames": 9}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    assert main(["example", "--output", str(tmp_path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 9
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 3
    counted = ["bytes", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "long.jsonl"), "--ranks", "2"]
    assert check.main(counted) == 0
    assert "LV-XAttn sends" in capsys.readouterr().out
    (tmp_path / "answers.jsonl").write_text('{"correct": true}\n{"correct": false}\n')
    for least, status in (("0.5", 0), ("0.6", 1)):
        assert check.main(["accuracy", "--answers", str(tmp_path / "answers.jsonl"), "--at-least", least]) == status
    for place, status in ((1, 0), (4, 1)):
        moments = [{"first": 3 * n, "last": 3 * n + 1, "share": 0.1} for n in range(1, 5)]
        run = tmp_path / f"{place}.json"
        run.write_text(json.dumps({"answers": [{"evidence": moments}]}))
        (tmp_path / "marker.json").write_text(json.dumps({"marker": 3 * place + 1}))
        given = ["evidence", "--one", str(run), "--many", str(run), "--data", str(tmp_path / "marker.json")]
        assert check.main(given) == status


def test_answers_are_compared_by_tokens(script, tmp_path: Path) -> None:
    for name, tokens in (("one", [5, 2]), ("same", [5, 2]), ("other", [5, 3])):
        report = {"ranks": 4, "frames": 9, "answers": [{"text": " red", "tokens": tokens}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    for many, expected, status in (("same", "red", 0), ("other", "red", 1), ("same", "green", 1)):
        given = ["--one", str(tmp_path / "one.json"), "--many", str(tmp_path / f"{many}.json"), "--expected", expected]
        assert script("demo_check").main(["answers", *given]) == status


@pytest.mark.parametrize("table", ["table3", "table4"])
def test_rows_of_the_paper_that_were_not_fitted_are_predicted(script, table: str) -> None:
    paper_tables = script("paper_tables")
    rows = paper_tables.compare(table)
    errors = [abs(row["error"]) for row in rows if not row["fitted"]]
    assert len(errors) == 20  # two strategies in the 10 of 15 rows that were not fitted
    assert median(errors) < 0.10 and max(errors) < 0.25
    assert paper_tables.is_order_right(rows)


def test_figures_are_those_of_the_paper(script) -> None:
    """Sums of the columns of arXiv 2502.02406, tables 3 and 4."""
    for table, ring, lv_xattn in (("table3", 1302.08, 509.68), ("table4", 280.49, 34.64)):
        rows = script("paper_tables").read_table(table)
        assert len(rows) == 15
        assert sum(row.seconds["ring"] for row in rows) == pytest.approx(ring)
        assert sum(row.seconds["lv-xattn"] for row in rows) == pytest.approx(lv_xattn)
    assert script("paper_tables").read_table("table4")[0].seconds == {"ring": 42.41, "lv-xattn": 1.42}


DOCS = ROOT / "docs"


def test_page_has_the_tables_of_rows_or_says_that_there_are_none(script, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "benchmarks"
    shutil.copytree(DOCS / "benchmarks", folder)
    for module in ("matplotlib", "matplotlib.backends.backend_agg"):  # another test may have imported both
        monkeypatch.setitem(sys.modules, module, None)  # the figures are those of the repository
    page = (DOCS / "benchmarks.md").read_text()
    report, parts = script("report"), script("run_all").PARTS
    assert all(f"<!-- rows: {name} -->" in page for name in parts)
    assert report.update(page, folder, parts) == page
    page = "before\n<!-- rows: memory -->\nold\n<!-- end of rows -->\nafter\n"
    expected = "before\n<!-- rows: memory -->\n\nNo rows.\n\n<!-- end of rows -->\nafter\n"
    assert report.update(page, tmp_path, parts) == expected
