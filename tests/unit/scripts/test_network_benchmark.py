"""Layer: one process. The network benchmark: its settings, its modes on two loopback ranks, and its checks."""

import os
from dataclasses import replace

import pytest

import namespaces
from launch import ROOT
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.loopback import run_loopback

SMALL = {"ranks": 2, "rows": 16, "keys": 64, "heads": 4, "kv_heads": 2, "dim": 32, "block_s": 0.005}
ROWS = ROOT / "docs" / "benchmarks"


def test_settings_keep_proportions_of_paper(script) -> None:
    for setting in script("network_calls").SUITES["paper"]():
        row = setting.paper
        assert setting.keys == setting.rows * row.keys // row.rows
        bits = 8 * 2 * setting.keys * setting.heads * setting.dim * 2
        transfer_s = bits / (setting.cap_mbit(setting.block_s) * 1e6)
        blocks = transfer_s / setting.block_s
        # Ring Attention: n - 1 transfers in forward, twice that in backward; LV-XAttn: n blocks of 3.5, all overlapped.
        gpus = {"table3": 16, "table4": 8}[row.table]
        ratio = 3 * (gpus - 1) * blocks / (3.5 * gpus)
        assert ratio == pytest.approx(row.seconds["ring"] / row.seconds["lv-xattn"])


def test_missing_root_or_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in namespaces.obstacle() or "iproute2" in namespaces.obstacle()
    monkeypatch.setenv("PATH", "")
    assert "install iproute2" in namespaces.obstacle()


def test_all_modes_agree_on_two_ranks_and_give_rows(script) -> None:
    network, calls = map(script, ("network", "network_calls"))
    paper = calls.SUITES["real"]()[0].paper
    setting = calls.Setting(name="small", **SMALL | {"block_s": None}, dtype="float32", paper=paper)
    rows, others = run_loopback(2, lambda comm: calls.CallBenchmark(setting, comm).run(1, None))
    assert {row["mode"] for row in rows} == {
        *("none", "lv-xattn", "lv-xattn, waiting", "ring", "ring, waiting", "ring, expanded", "ulysses")
    }
    assert [row["seconds"] for row in rows] == [row["seconds"] for row in others]
    committed = script("harness").read(ROWS / "network-real.jsonl")[1]
    assert set(rows[1]) | {"cap_mbit", "torch", "commit", "hardware", "threads"} == committed.keys()
    assert all(rows[1][name] == value for name, value in committed.items() if name.startswith("paper_"))
    assert rows[0]["sent_bytes"] == 0 < rows[1]["sent_bytes"] < rows[3]["sent_bytes"]
    summary = script("report").network_tables(rows)
    assert "| ring, waiting |" in summary and "ring / LV-XAttn" in summary


def one_rank(script, **changes):
    """The benchmark of a small setting on one rank, the class of its modes, its modes "none" and "lv-xattn"."""
    calls = script("network_calls")
    setting = calls.Setting(name="small", **SMALL | {"ranks": 1} | changes)
    bench = calls.CallBenchmark(setting, as_communicator(None))
    return bench, calls.Mode, *calls.modes(setting)[:2]


def test_wrong_bytes_or_number_of_blocks_stop_the_run(script, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, mode, none, lv = one_rank(script)
    with bench.kernel.registered():
        assert min(bench.once(none)[1], bench.once(lv)[1]) >= 3.5 * bench.setting.block_s
        monkeypatch.setattr(mode, "bytes_sent", lambda *_: {"q": 1})
        with pytest.raises(SystemExit, match="sent {}; expected by the formulas: {'q': 1}"):
            bench.once(lv)
        monkeypatch.undo()
        bench.kernel.rate *= 2
        with pytest.raises(SystemExit, match="s of blocks; expected"):
            bench.once(lv)


def test_wrong_results_of_real_blocks_stop_the_run(script, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, mode, _, lv = one_rank(script, block_s=None, dtype="float32")
    bench.once(lv)
    run = mode.run
    monkeypatch.setattr(mode, "run", lambda *args: 2 * run(*args))
    with pytest.raises(SystemExit, match="o differs"):
        bench.once(replace(lv, name="wrong"))
