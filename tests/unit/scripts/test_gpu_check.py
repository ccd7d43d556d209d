"""Layer: one process, and real launches. The GPU check on a machine without a GPU, and its rehearsals on the CPU."""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from launch import ROOT
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.loopback import run_loopback
from mllm_seqpar.kernels import kernel_names
from ranks import ranks


def test_missing_gpu_is_said_and_is_no_failure(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert script("gpu_check").main() == 0
    assert capsys.readouterr().out == "gpu_check: no CUDA GPU here, nothing was checked\n"


@pytest.mark.slow
def test_rehearsal_passes_every_check(script) -> None:
    gpu_check = script("gpu_check")
    parts = ("kernels:torch_cpu", "one_gpu", "ring", "memory", "training")
    rows = [row for part in parts for row in gpu_check.run_part(part, "cpu")]
    checks = "kernel exact, kernel speed, auto kernel, host synchronisations, ring exact, memory, training"
    assert {row.check for row in rows} == set(checks.split(", "))
    assert sum(row.ok is True for row in rows) >= 15 and all(row.ok is not False for row in rows)


@pytest.mark.launch
@pytest.mark.slow
def test_failed_part_is_a_row_and_the_others_run(script, monkeypatch) -> None:
    gpu_check, common = script("gpu_check"), script("gpu_checks.common")
    run_child = gpu_check.run_child

    def kernels_only(part: str, *args: object) -> list:
        return run_child(part, *args) if "kernels" in part else [common.Row(part, "", "", "", True)]

    monkeypatch.setattr(gpu_check, "KERNELS", {"cpu": ["no_such_kernel"]})
    limits = {"kernels": 60.0, "one_gpu": 60.0, "ring": 60.0, "memory": 11.0, "training": 0.0}
    parts = {name: gpu_check.Part("kernels.check_kernel", limit) for name, limit in limits.items()}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "run_child", kernels_only)
    found = gpu_check.run_all("cpu")
    assert [row.check for row in found] == ["kernels:no_such_kernel", "one_gpu", "ring", "memory", "training"]
    assert found[0].ok is False and "does not exist" in found[0].found
    assert found[4].found == "not run: out of time"


@pytest.mark.slow
def test_ranks_notice_a_lost_rank(script, monkeypatch, capsys) -> None:
    """One of the processes of the part is killed."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--ranks", "2", "--device", "cpu", "--parts", "ranks_lost"])
    status, output = script("gpu_check").main(), capsys.readouterr().out
    assert status == 0 and "FAILED" not in output, output
    assert sum(line.startswith("lost rank") for line in output.splitlines()) == 1, output
    assert "another rank ended or does not answer" in output


def rows_of(rank: int, world: int, part: str) -> list[tuple[str, bool | None, str]]:
    """Return the rows of a part of --ranks on this rank."""
    with mock.patch.object(sys, "path", [*sys.path, str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]):
        sys.modules.pop("kernels", None)  # libraries that probe for a package of this name import tests/unit/kernels
        gpu_check = importlib.import_module("gpu_check")
        check = gpu_check.check_of(gpu_check.RANKS_PARTS[part])
        return [(row.check, row.ok, row.found) for row in check(as_communicator(), torch.device("cpu"))]


GROUPS = ["own group", "many messages", "receive buffers", "subgroup alone", "auto"]
TRAINING = ["FSDP2 steps"] * 4 + ["allocated memory", "reserved memory", "streams", "host synchronisations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "size", "checks"),
    [("ranks_groups", 2, GROUPS), ("ranks_training", 2, TRAINING), ("ranks_fsdp", 2, ["FSDP2 steps"] * 4)],
)
def test_checks_of_several_ranks_pass_over_gloo(part: str, size: int, checks: list[str]) -> None:
    rows = ranks(size).run(rows_of, part)[0]
    assert [check for check, _, _ in rows] == checks
    for check, ok, found in rows:
        assert ok or "not measurable without CUDA" in found, (check, found)


@pytest.mark.slow
def test_all_algorithms_of_the_rank_checks_run_on_four_ranks(script) -> None:
    attention = script("gpu_checks.attention")
    rows = run_loopback(4, lambda comm: list(attention.check_ranks(comm, torch.device("cpu"))))[0]
    exact = [row for row in rows if row.check == "ranks exact"]
    assert len(exact) == 22 and all(row.ok for row in exact), exact


@pytest.mark.parametrize(("ranks", "missing"), [(2, ["mesh", "hybrid"]), (3, ["mesh", "ulysses", "hybrid"]), (8, [])])
def test_algorithms_that_need_other_ranks_say_so(script, ranks: int, missing: list[str]) -> None:
    impossible = [case for case in script("gpu_checks.attention").cases(ranks, 32) if case.impossible]
    assert list(dict.fromkeys(case.name.split()[0] for case in impossible)) == missing
    assert all("needs" in case.impossible for case in impossible)


def test_error_of_any_rank_fails_the_check(script) -> None:
    attention = script("gpu_checks.attention")

    def check(comm) -> bool:
        ref = attention.Reference.make("cross", torch.float32, comm.size, torch.device("cpu"))

        def wrong(*given):
            found = attention.decoded(*given)
            if comm.rank == 1:
                found["o"][0].add_(1e-3)
            return found

        return attention.exact_row("", "", ref, wrong, comm).ok

    assert run_loopback(2, check) == [False, False]


def test_ranks_without_a_gpu_each_are_refused(script, monkeypatch, capsys) -> None:
    gpu_check = script("gpu_check")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for number, expected in ((1, "expected 2 or more"), (4, "this node has 2 GPUs")):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--ranks", str(number)])
        with pytest.raises(SystemExit, match="2"):
            gpu_check.main()
        assert expected in capsys.readouterr().err


PRINTED = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NCCL_HOSTID NCCL_P2P_DISABLE NCCL_SHM_DISABLE".split()


def test_ranks_on_one_gpu_are_nodes_of_their_own_for_nccl(script, monkeypatch, capsys) -> None:
    """The ranks print their variables; the GPU is imagined."""
    gpu_check, processes = script("gpu_check"), script("gpu_checks.processes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_check, "print_environment", lambda device: None)
    found = []

    def started(commands, **options):
        code = f"import os; print([os.environ.get(name) for name in {PRINTED}])"
        ended = processes.run_ranks([[sys.executable, "-c", code] for _ in commands], **options)
        found.extend(rank.message for rank in ended)
        return ended

    monkeypatch.setattr(gpu_check, "run_ranks", started)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--ranks", "2", "--parts", "ranks_groups"])
    assert gpu_check.main() == 0
    assert "2 ranks share one GPU: results are checked, but times and overlap mean nothing" in capsys.readouterr().out
    assert found == [str([str(rank), "2", "0", "1", f"rank-{rank}", "1", "1"]) for rank in range(2)]
    plain = processes._places(1, 2, one_gpu=False)
    assert plain == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_times_of_ranks_that_share_a_gpu_are_not_reported(script, monkeypatch) -> None:
    attention = script("gpu_checks.attention")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    row = attention.overlap("ring", SimpleNamespace(size=2), torch.device("cuda"))
    assert row.ok is None and "share one GPU" in row.found and "mean nothing" in row.found


def test_kernels_that_are_not_installed_start_no_process(script, monkeypatch) -> None:
    gpu_check = script("gpu_check")
    monkeypatch.setitem(gpu_check.KERNELS, "cpu", ["torch_cpu", "flash_attn_3", "cuda_flash@FA3", "cuda_flash@FA4"])
    started: list[str] = []
    monkeypatch.setattr(gpu_check, "run_child", lambda part, *_: started.append(part) or [])
    rows = gpu_check.run_all("cpu", ["kernels"])
    assert started == ["kernels:torch_cpu"]
    assert [row.subject for row in rows] == ["flash_attn_3", "cuda_flash@FA3", "cuda_flash@FA4"]
    assert all(row.ok is None and row.found for row in rows) and "is not installed" in rows[2].found


@pytest.mark.slow
def test_parts_without_a_model_do_not_import_transformers() -> None:
    """Each part runs in processes of its own, which would all wait for it."""
    code = "import gpu_check, gpu_checks.kernels, gpu_checks.attention, sys; print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_processes_that_hang_are_killed_after_another_one_failed(script) -> None:
    run_ranks = script("gpu_checks.processes").run_ranks
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('found it'); time.sleep(60)"
    first, second = run_ranks([[sys.executable, "-c", code]] * 2, limit_s=30.0, grace_s=0.5)
    assert (first.status, second.status) == (None, 1) and first.seconds < 25
    assert first.problem.startswith("rank 0 was stopped") and "ended with status 1" in second.problem
    assert second.message == "found it"


def test_lost_rank_needs_a_message_in_time_from_every_other_rank(script) -> None:
    Ended, rows_of = script("gpu_checks.processes").Ended, script("gpu_check").lost_rank_rows
    killed = Ended(4, -9, 5.0, "")
    outcomes = [
        Ended(0, 1, 20.0, "stopped: another rank ended or does not answer"),
        Ended(1, -6, 40.0, "Watchdog caught collective operation timeout"),
        Ended(2, 1, 5.0, "KeyError: 0"),
        Ended(3, None, 120.0, ""),
    ]
    assert [row.ok for row in rows_of([*outcomes, killed], "cuda")] == [True, True, False, False]


def test_hidden_share_counts_transfers_under_any_kernel(script) -> None:
    common = script("gpu_checks.common")
    kernels = [
        common.Kernel("flash_fwd", 7, 0, 100),
        common.Kernel("flash_fwd", 7, 50, 120),  # overlaps the one before: time counts once
        common.Kernel("ncclDevKernel_SendRecv", 20, 80, 160),
        common.Kernel("ncclDevKernel_AllGather", 21, 200, 240),
        common.Kernel("merge", 7, 230, 250),
    ]
    assert common.hidden_share(kernels) == pytest.approx((40 + 10) / 120)
    assert common.hidden_share(kernels[:2]) == 0.0
    assert common.streams(kernels, "SendRecv") == {20} and common.streams(kernels, "flash") == set()


def test_flash_attention_2_fails_on_hopper_if_3_is_installed(script, monkeypatch) -> None:
    kernels = script("gpu_checks.kernels")
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
    for kernel, capability, installed, ok in [
        ("flash_attn", (8, 0), True, None),
        ("flash_attn", (9, 0), True, False),
        ("cuda_flash", (9, 0), True, False),
        ("cuda_efficient", (9, 0), True, True),
        ("flash_attn", (9, 0), False, True),
    ]:
        chosen = SimpleNamespace(name=kernel), ""
        monkeypatch.setattr(kernels, "choose_kernel", lambda *args, found=chosen, **options: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        monkeypatch.setattr(kernels, "is_installed", lambda name, found=installed: found)
        assert kernels.auto_kernel("cuda", "plain").ok is ok, (kernel, capability, installed)


def test_module_of_a_missing_package_is_not_installed(script) -> None:
    is_installed = script("gpu_checks.kernels").is_installed
    assert is_installed("torch") and not is_installed("no_such_package.module") and not is_installed("no_such_package")


def test_gpu_environment_sets_what_is_not_set() -> None:
    code = f"source {ROOT}/scripts/lib/gpu_environment.sh && env"
    given = {"PATH": os.environ["PATH"], "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, env=given, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and found["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_every_gpu_config_names_the_environment() -> None:
    files = [file for file in (ROOT / "configs").glob("fsdp2_*gpu*.yaml")]
    assert files and all("scripts/lib/gpu_environment.sh" in file.read_text() for file in files)


def test_checks_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "guides" / "running_on_gpus.md").read_text()
    rows = re.findall(r"^\| (?:\d+ .*\| (.+)|(`[a-z0-9 ]+`) \| [^|]+) \|$", page, re.MULTILINE | re.IGNORECASE)
    named = {
        name for row in rows for name in re.findall("`([^`]+)`", " ".join(row)) if "_" not in name and "-" not in name
    }
    files = [ROOT / "scripts" / "gpu_check.py", *(ROOT / "scripts" / "gpu_checks").glob("*.py")]
    code = "".join(file.read_text() for file in files)
    assert len(named) >= 10
    named -= {*kernel_names()}
    assert not [name for name in named if not re.search(rf'(Row|exact_rows|compare)\(\s*"{name}"', code)]
