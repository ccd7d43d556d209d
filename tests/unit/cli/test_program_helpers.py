"""Layer: pure Python. Reading ahead, command lines, devices, and how errors are told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch

from mllm_seqpar.cli.devices import on_cuda, require_rendezvous, time_limit
from mllm_seqpar.cli.failure import describe
from mllm_seqpar.cli.options import CommandOptions, option, parse_options
from mllm_seqpar.data.prefetch import read_ahead
from mllm_seqpar.errors import ConfigError


def test_reading_ahead_keeps_the_order_and_raises_in_place() -> None:
    assert list(read_ahead(range(5), lambda x: x * x)) == [0, 1, 4, 9, 16]
    assert list(read_ahead([], str)) == []
    got = []
    with pytest.raises(ZeroDivisionError):
        for value in read_ahead([1, 2, 0, 3], lambda x: 2 / x):
            got.append(value)
    assert got == [2.0, 1.0]


def test_an_error_of_ours_is_one_line_and_others_keep_their_traceback() -> None:
    assert describe(ConfigError("no")) == ("error: no", 2)
    text, status = describe(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"))
    assert text.startswith("stopped: another rank ended")
    assert status == 1
    text, status = describe(KeyError("x"))
    assert "KeyError: 'x'" in text


def test_processes_that_srun_started_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_rendezvous()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS=4: 4 processes were started.*with torchrun"):
        require_rendezvous()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    require_rendezvous()  # torchrun within srun


@dataclass(frozen=True, kw_only=True)
class Both(CommandOptions):
    name: str = option("whose")
    rate: float | None = option("50% of it", None)
    loud: bool = option("or not", True)
    word: tuple[str, ...] = option("one or more", ())
    count: int = option("how many", 3)

    def __post_init__(self) -> None:
        self._require("count", self.count > 0, "more than 0")


def parse(*argv: str) -> Both:
    return parse_options(Both, argv, prog="both.py", description="For the test.")


def test_fields_become_options() -> None:
    assert parse("--name", "a") == Both(name="a")
    given = parse("--name", "a", "--rate", "0.5", "--no-loud", "--word", "x", "--word", "y z", "--count", "2")
    assert given == Both(name="a", rate=0.5, loud=False, word=("x", "y z"), count=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required: --name; --help lists"),
        (("--name", "a", "--rate", "fast"), "argument --rate: invalid float value: 'fast'"),
        (("--name", "a", "--count", "0"), "--count: 0 is not allowed; give more than 0"),
        (("--name", "a", "--cuont", "1"), "unrecognized arguments: --cuont"),
    ],
)
def test_bad_options_are_config_errors(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_help_names_defaults_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--count COUNT how many (default: 3)" in text and "--rate RATE 50% of it --loud" in text
    assert text.count("(default: True)") == 1 and text.count("(default:") == 2


@pytest.mark.parametrize(
    ("device", "gpus", "for_cpu", "expected"),
    [
        ("auto", 2, "", True),
        ("auto", 1, "", False),
        ("auto", 2, "true", False),
        ("cpu", 2, "", False),
        ("cuda", 2, "", True),
    ],
)
def test_a_gpu_for_each_process(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, for_cpu: str, expected: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", for_cpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert on_cuda(device) is expected


def test_cuda_without_enough_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="this node has 1 GPUs for 2 processes; start fewer, or use --device cpu"):
        on_cuda("cuda")


def test_the_time_limit_is_what_was_asked_for_or_the_devices_own() -> None:
    assert [time_limit(None, True), time_limit(None, False), time_limit(7, True)] == [
        timedelta(seconds=seconds) for seconds in (600, 300, 7)
    ]
