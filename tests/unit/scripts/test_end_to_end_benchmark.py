"""Layer: one process. The benchmark of whole training steps, small, on loopback ranks: modes, checks and rows."""

import threading

import pytest
import torch

from mllm_seqpar.comm import Send, as_communicator
from mllm_seqpar.comm.base import Recv
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.runtime.forward_state import ForwardState

LOCK = threading.Lock()


@pytest.fixture
def run(script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ForwardState, "frame_keys", ForwardState.frame_keys)  # the benchmark wraps it
    return script("network_steps")


@pytest.fixture
def small_step(script, run, monkeypatch: pytest.MonkeyPatch):
    """mPLUG-Owl3 with blocks of 4 rows and 1,458 keys; the ranks of a process build it one by one."""
    made, model = script("network_steps"), script("models").ScaledModel
    build = model.build

    def one_by_one(scaled):
        with LOCK:
            return build(scaled)

    monkeypatch.setattr(model, "build", one_by_one)

    def setting(**options):
        row = script("paper_tables").paper_row("table3", "mPLUG-Owl3-1b", 2)
        return made.scaled_step("a100-owl3", row, "mplug_owl3", 16, rows=4, **options)

    return setting


def test_settings_of_steps_keep_proportions_of_paper(script) -> None:
    settings = script("network_steps").STEP_SUITES["steps"]()
    for setting in settings:
        row = setting.paper
        if row is None:  # the paper's tables of Llama are not in `paper/`
            assert setting.name in ("llama", "short-video")
        else:
            assert setting.keys == setting.rows * row.keys // row.rows
            assert (1 + setting.rest) * row.seconds["lv-xattn"] == pytest.approx(row.step_seconds["lv-xattn"])
    headline = settings[0].paper
    assert headline.step_seconds["ring"] / headline.step_seconds["lv-xattn"] == pytest.approx(5.58, abs=0.005)


@pytest.mark.slow
def test_all_modes_take_the_same_step_and_give_rows(run, script, small_step) -> None:
    setting = small_step(ranks=2)
    rows, others = run_loopback(2, lambda comm: run.StepBenchmark(setting, comm).run(2, None))
    assert [row["seconds"] for row in rows] == [row["seconds"] for row in others]
    by_mode = {row["mode"]: row for row in rows}
    assert list(by_mode) == ["none", "lv-xattn", "ring", "ring, expanded", "ulysses", "auto"]
    sent = {mode: row["sent_bytes"] for mode, row in by_mode.items()}
    assert sent["none"] < sent["lv-xattn"] < sent["ring"] < sent["ring, expanded"] and sent["none"] < sent["ulysses"]
    keys = 2 * 14 * setting.keys * setting.dim * 4  # bytes of expanded K and V
    assert sent["ring, expanded"] - sent["none"] == 3 * keys  # K, V in forward; K, V, dK, dV in backward
    assert sent["ring"] - sent["none"] == 3 * keys // 7
    for row in rows:
        assert row["predicted_s"] > 0 and row["auto_over_best"] > 0 and row["best"] not in ("none", "auto")
        assert row["paper_ring_s"] / row["paper_lv_xattn_s"] == pytest.approx(5.58, abs=0.005)
    summary = script("report").network_tables(rows)
    assert "| ring, expanded |" in summary and "auto / best" in summary and "| 5.58 |" in summary


def test_different_loss_stops_the_benchmark(run, script, small_step, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01])
    monkeypatch.setattr(run.Step, "once", lambda *_: (1.0, next(losses), 1.0, 0))
    with pytest.raises(SystemExit, match="loss 1.01; other modes have 1.0"):
        run.StepBenchmark(small_step(ranks=1), as_communicator(None)).run(1, None)


def test_step_sleeps_for_the_rest_of_the_papers_step(run, script, small_step, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def once(step, rest_s: float):
        slept.append(rest_s)
        return 0.001, 1.0, 1.0, 0

    monkeypatch.setattr(run.Step, "once", once)
    monkeypatch.setattr(run.Step, "spec", property(lambda step: step.mode.spec))
    setting = small_step(block_s=0.004, ranks=1)
    row = run.StepBenchmark(setting, as_communicator(None)).run(1, None)[0]
    cross_s = row["cross_share"] * (0.001 + row["rest_s"])
    assert row["rest_s"] == pytest.approx((1 + setting.rest) * cross_s - 0.001) and slept[-1] == row["rest_s"]
    assert setting.rest == pytest.approx(5.24 / 1.52 - 1)


def test_without_transfers_a_rank_receives_what_it_would_send(run) -> None:
    def on_rank(comm):
        silent, peer = run.without_transfers(comm), 1 - comm.rank
        out, into, other, keys = torch.full((3,), float(comm.rank)), torch.empty(3), torch.ones(2), torch.empty(3)
        silent.exchange([Send(peer, out, "q"), Send(peer, out, "o")], [Recv(peer, into), Recv(peer, other)]).wait()
        silent.exchange([Send(peer, out, "k")], [Recv(peer, keys)]).wait()
        return into.tolist(), other.tolist(), keys.tolist(), dict(comm.bytes.sent), silent.gather_ints([comm.rank])

    for rank, (into, other, keys, sent, gathered) in enumerate(run_loopback(2, on_rank)):
        assert into == [rank] * 3 and other == [0, 0]
        assert keys == [1 - rank] * 3 and gathered == [[0], [1]]  # self-attention and collectives do send
        assert sent["k"] == 12 and "q" not in sent and "o" not in sent
