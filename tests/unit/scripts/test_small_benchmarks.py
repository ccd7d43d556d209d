"""Layer: one process. The benchmarks that print a table, with tiny sizes. Each compares its results as it runs."""

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
    script("mlp_chunks").main(
        ["--device", "cpu", "--shape", "64,1024,2,1", "--tokens", "256", "--chunks", "32", "--repeats", "1"]
    )
    *_, whole, chunked = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert int(chunked[2]) < int(whole[2])


def test_scale_and_traffic_print_their_tables(script, capsys: pytest.CaptureFixture[str]) -> None:
    script("scale").main(
        ["--model", "mplug-owl3-7b", "--text", "8192", "--cluster", "a100-80g-8xN", "--gpus", "8", "--minutes", "10"]
    )
    printed = capsys.readouterr().out
    assert "| 10 min | 8 | **568 ms (0%)** | 568 ms (0%) | 568 ms (0%) 2x4 | 570 ms (1%) 2 x 2x2 |" in printed
    assert "| 8 | 6 h | 4 h | 3 h | 4 h | 21 min |" in printed
    script("traffic").main(["--ranks", "2"])
    assert "| 2 | forward | " in capsys.readouterr().out
