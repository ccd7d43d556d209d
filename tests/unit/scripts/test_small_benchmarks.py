"""Layer: one process. The benchmarks that print a table, and the steps of scripts/demo.sh, with tiny sizes."""

import json
from pathlib import Path

import pytest
import torch


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


def test_mlp_chunks_save_less_and_give_same_gradients(script, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--device cpu --shape 64,1024,2,1 --tokens 256 --chunks 32 --repeats 1"
    script("mlp_chunks").main(sizes.split())
    *_, whole, chunked = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert int(chunked[2]) < int(whole[2])


def test_scale_and_traffic_print_their_tables(script, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--model mplug-owl3-7b --text 8192 --cluster a100-80g-8xN --gpus 8 --minutes 10"
    script("scale").main(sizes.split())
    printed = capsys.readouterr().out
    assert "| 10 min | 8 | **568 ms (0%)** | 568 ms (0%) | 568 ms (0%) 2x4 | 570 ms (1%) 2 x 2x2 |" in printed
    assert "| 8 | 6 h | 4 h | 3 h | 4 h | 21 min |" in printed
    script("traffic").main(["--ranks", "2"])
    assert "| 2 | forward | " in capsys.readouterr().out


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
