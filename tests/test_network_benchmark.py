"""Layer: real launch, in network namespaces (root, iproute2). The network benchmark, small: its checks, cap, cleaning.

What needs no namespaces comes first: settings, modes and their formulas.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
MODULES = ("emulated", "link", "measure", "namespaces", "network", "network_measure", "network_modes")
MODULES += ("network_predict", "network_settings", "rows")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def namespaces(bench):
    module = bench("namespaces")
    reason = module.obstacle()
    if reason:
        pytest.skip(reason)
    return module


def test_settings_keep_the_papers_proportions(bench) -> None:
    settings = bench("network_settings")
    for setting in settings.suite("paper", None):
        row = setting.paper
        assert setting.keys == setting.rows * row.keys // row.rows
        bits = 8 * 2 * setting.keys * setting.heads * setting.dim * 2
        transfer_s = bits / (setting.cap_mbit(setting.block_s) * 1e6)
        blocks = transfer_s / setting.block_s
        # n - 1 transfers forward and two each backward, nothing hidden; n blocks of 3.5, all hidden
        ratio = 3 * (row.gpus - 1) * blocks / (3.5 * row.gpus)
        assert ratio == pytest.approx(row.ring_s / row.lv_xattn_s)


def test_refuses_politely(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("namespaces")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in module.obstacle() or "iproute2" in module.obstacle()
    monkeypatch.setenv("PATH", "")
    assert "install iproute2" in module.obstacle()


def test_another_strategys_bytes_are_no_result(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mllm_seqpar.comm import as_communicator

    measure, modes, settings = map(bench, ("network_measure", "network_modes", "network_settings"))
    setting = settings.suite("smallest", 1)[0]
    run = measure.Bench(setting, as_communicator(None), torch.device("cpu"))
    with measure.registered(run.kernel):
        none, lv = modes.modes(setting)[:2]
        assert run.once(none)[1] >= 3.5 * setting.block_s
        assert run.once(lv)[1] >= 3.5 * setting.block_s
        monkeypatch.setattr(modes.Mode, "sent", lambda *_: {"q": 1})
        with pytest.raises(SystemExit, match="sent {}; by the formulas it is {'q': 1}"):
            run.once(lv)
        monkeypatch.undo()
        run.kernel.rate *= 2
        with pytest.raises(SystemExit, match="of blocks, not"):
            run.once(lv)


def test_real_blocks_must_agree(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import torch

    from mllm_seqpar.comm import as_communicator

    measure, modes, settings = map(bench, ("network_measure", "network_modes", "network_settings"))
    setting = replace(settings.suite("smallest", 1)[0], block_s=None, dtype="float32")
    run = measure.Bench(setting, as_communicator(None), torch.device("cpu"))
    found = run.run(1, 0, measure.Link())
    assert set(found.times) == set(modes.modes(setting)) and found.block_s > 0

    class Wrong(modes.Mode):
        def run(self, *given):
            return 2 * super().run(*given)

    wrong = Wrong(name="wrong", way=modes.modes(setting)[1].way)
    with pytest.raises(SystemExit, match="o lies"):
        run.once(wrong)


def test_cap_is_felt_and_everything_cleaned_up(bench, namespaces, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    command = [sys.executable, str(BENCH / "network.py"), "--suite", "smallest", "--repeats", "1", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert not [name for name in namespaces.existing() if f"-{process.pid}-" in name]
    rows = {row["mode"]: row for row in bench("rows").read(out)}
    assert {"none", "lv-xattn", "lv-xattn, waiting", "ring", "ring, waiting", "ring, expanded", "ulysses"} == set(rows)
    assert 10 < float(rows["ring"]["link_mbit"]) < 44  # the cap is 40; without it, thousands
    ring = rows["ring, waiting"]
    transfers_s = int(ring["sent_bytes"]) * 8 / 44e6
    assert float(ring["seconds"]) > float(rows["none"]["seconds"]) + 0.5 * transfers_s
    assert int(rows["ring, expanded"]["sent_bytes"]) == int(ring["sent_bytes"]) * 3 // 2  # twice the heads, bf16 sums
    assert "ring / lv-xattn" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_was_ended(namespaces, number: signal.Signals) -> None:
    code = "import sys, namespaces; sys.exit(namespaces.launch(2, ['sleep', '300']))"
    # A shell starts a command in the background with SIGINT ignored, and children inherit that.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=BENCH,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    mine = f"{namespaces.PREFIX}-{process.pid}-"
    try:
        ranks: list[int] = []
        deadline = time.monotonic() + 20
        while len(ranks) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            ranks = [pid for name in namespaces.existing() if name.startswith(mine) for pid in inside(name)]
        assert len(ranks) == 2
        process.send_signal(number)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGKILL:
        assert [name for name in namespaces.existing() if name.startswith(mine)]
        namespaces.remove_leftovers()
    assert not [name for name in namespaces.existing() if name.startswith(mine)]
    assert not [pid for pid in ranks if running(pid)]


def running(pid: int) -> bool:
    """Not when its end has not been noticed yet by whoever became its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def inside(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


def test_a_rank_that_fails_ends_the_others(namespaces) -> None:
    start = time.monotonic()
    assert namespaces.launch(2, ["sh", "-c", '[ "$RANK" = 0 ] && exit 7; sleep 300']) == 7
    assert time.monotonic() - start < 30
    assert not [name for name in namespaces.existing() if f"-{os.getpid()}-" in name]
