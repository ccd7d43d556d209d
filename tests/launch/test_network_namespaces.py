"""Layer: real launch, in network namespaces (root, iproute2). The cap of links, and the removal of namespaces."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import namespaces
from launch import PYTHON

pytestmark = [pytest.mark.launch, pytest.mark.slow]
BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def _root() -> None:
    reason = namespaces.obstacle()
    if reason:
        pytest.skip(reason)


def of_process(pid: int) -> list[str]:
    return [name for name in namespaces.existing() if name.startswith(f"{namespaces.PREFIX}-{pid}-")]


def test_capped_link_slows_ring_attention(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [*PYTHON, BENCH / "network.py", "--suite", "tiles", "--settings", "4-ranks-128x2048"]
    command += ["--repeats", "1", "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert not of_process(process.pid)
    rows = {row["mode"]: row for row in map(json.loads, out.read_text().splitlines())}
    ring = rows["tile 1x4"]
    assert ring["link_mbit"] < 110  # the cap is 100; an uncapped link has thousands
    # The cap bounds the time from below on any machine; it would depend on the load to compare with another run.
    assert ring["seconds"] > 0.5 * ring["sent_bytes"] * 8 / 110e6


RANKS = """
import argparse, os, sys, time, harness, namespaces

def function(args):
    if os.environ.get("FAILS") and harness.dist.get_rank() == 0:
        raise SystemExit("found it")
    time.sleep(300)

if __name__ == "__main__":
    with namespaces.network(2) as links:
        harness.run_on_ranks(2, argparse.Namespace(device="cpu", threads=1), function, links=links)
"""


def start_ranks(folder: Path, **variables: str) -> subprocess.Popen:
    (folder / "ranks.py").write_text(RANKS)
    paths = os.pathsep.join(map(str, (BENCH, BENCH.parent / "lib")))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.Popen([*PYTHON, folder / "ranks.py"], env=environment, stderr=subprocess.PIPE, text=True)


def test_killed_launcher_leaves_no_process_and_no_namespace(tmp_path: Path) -> None:
    process = start_ranks(tmp_path)
    try:
        ranks: list[int] = []
        deadline = time.monotonic() + 60
        while len(ranks) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            ranks = [pid for name in of_process(process.pid) for pid in namespaces.processes_in(name)]
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert of_process(process.pid)
    namespaces.remove_leftovers()
    assert not of_process(process.pid)
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if running(pid)]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_failed_rank_ends_the_others(tmp_path: Path) -> None:
    process = start_ranks(tmp_path, FAILS="1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "found it" in errors and "one of 2 ranks ended with status 1" in errors
    assert not of_process(process.pid)
