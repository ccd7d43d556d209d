"""Layer: pure Python. Command lines, devices, and how errors are reported."""

import os
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from transformers import HfArgumentParser

from mllm_seqpar.cli.launch import collective_timeout, launched_ranks, require_rendezvous, use_cuda
from mllm_seqpar.cli.options import CommandOptions, Parser, canonical_arguments, option, parse_options
from mllm_seqpar.cli.program_exit import describe
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.training import finetune


def test_known_errors_take_one_line_and_others_have_a_traceback() -> None:
    assert describe(ConfigError("no")) == ("error: no", 2)
    text, status = describe(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"))
    assert text.startswith("stopped: another rank ended") and status == 1
    text, status = describe(KeyError("x"))
    assert "KeyError: 'x'" in text and status == 1


def test_several_processes_without_a_rendezvous_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_rendezvous()
    for name, value in (("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS=4: 4 processes were started.*with torchrun"):
        require_rendezvous()
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    require_rendezvous()  # torchrun inside srun


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    name: str = option("a name")
    rate: float | None = option("50% of it", None)
    loud: bool = option("or not", True)
    word: tuple[str, ...] = option("one or more", ())
    count: int = option("how many", 3)
    kv_heads: int = option("a name of two words", 1)

    def __post_init__(self) -> None:
        self._require("count", self.count > 0, "more than 0")


def parse(*argv: str) -> Options:
    return parse_options(Options, argv, prog="options.py", description="For the test.", example="p --name a")


def test_fields_become_options() -> None:
    assert parse("--name", "a") == Options(name="a")
    given = parse("--name", "a", "--rate", "0.5", "--no-loud", "--word", "x", "--word", "y z", "--count", "2")
    assert given == Options(name="a", rate=0.5, loud=False, word=("x", "y z"), count=2)


def test_hyphens_in_names_are_accepted_and_values_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("--kv-heads", "--kv_heads"):
        assert parse("--name=a-b", name, "2", "--word=--not-a-name", "--no_loud").kv_heads == 2
        assert parse("--name", "a-b", f"{name}=2", "--word", "x-y").name == "a-b"
    parser = Parser(prog="p")
    parser.add_argument("--kv_heads", nargs="+")
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args(["--kv-heads", "a", "--", "--kv-heads", "--kv-heads"])
    assert (given.kv_heads, given.rest) == (["a"], ["--kv-heads"] * 2)
    with pytest.raises(ConfigError, match="--kv_heads is given twice; give all values after one --kv_heads"):
        parser.parse_args(["--kv_heads", "a", "--kv-heads", "b"])
    theirs = HfArgumentParser(Options)  # has hyphens as second names
    assert canonical_arguments(theirs, ["--kv-heads", "2", "--no-loud", "b-c"]) == [
        "--kv_heads",
        "2",
        "--no_loud",
        "b-c",
    ]
    with pytest.raises(SystemExit):
        parse("--nam", "a", "--help")
    shown = capsys.readouterr().out
    assert "--kv_heads KV_HEADS" in shown and "--loud, --no_loud" in shown
    assert "--name NAME" in shown and "[--name NAME]" not in shown  # required
    assert shown.endswith("example:\n  p --name a\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required: --name; --help lists"),
        (("--name", "a", "--rate", "fast"), "argument --rate: invalid float value: 'fast'"),
        (("--name", "a", "--count", "0"), "--count: 0 is not allowed; give more than 0"),
        (("--name", "a", "--coun", "1"), r"unrecognized arguments: --coun 1 \(did you mean --count\?\)"),
        (("--nam", "a"), r"unrecognized arguments: --nam a \(did you mean --name\?\)"),
        (("--name", "a", "--help_all"), "unrecognized arguments: --help_all"),  # an option of finetune only
        (("--name", "a", "--name", "a"), "--name is given twice; give it once"),
        (("--name=a", "--loud", "--no-loud"), "--no_loud is given twice"),
        (("--name=a", "--word", "What", "is", "it?"), r"unrecognized arguments: is it\?"),  # without quotes
    ],
)
def test_invalid_options_are_config_errors(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("device", "gpus", "cpu", "expected"),
    [("auto", 2, "", True), ("auto", 1, "", False), ("auto", 2, "true", False), ("cpu", 2, "", False)]
    + [("cuda", 2, "", True), ("cuda", 1, "", "1 GPUs for 2 processes; start fewer, or use --device cpu")],
)
def test_two_processes_use_cuda_if_each_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    gpus: int,
    cpu: str,
    expected: bool | str,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", cpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if isinstance(expected, bool):
        assert use_cuda(device) is expected
        too_few = ["computing on the CPU: this node has 1 GPUs for 2 processes; start fewer"]
        assert caplog.messages == (too_few if (device, gpus) == ("auto", 1) else [])
    else:
        with pytest.raises(ConfigError, match=expected):
            use_cuda(device)


def test_timeout_defaults_to_the_device() -> None:
    limits = [collective_timeout(None, True), collective_timeout(None, False), collective_timeout(7, True)]
    assert limits == [timedelta(seconds=seconds) for seconds in (600, 300, 7)]


class _ProcessGroup(Exception):
    """Raised in the place of the creation of a process group."""


@pytest.mark.parametrize("given", [None, "0"])
@pytest.mark.parametrize("program", ["finetune", "others"])
def test_programs_order_launches_before_they_create_a_process_group(
    program: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has not set the variable, or the user has."""
    found = []

    def create(*args: object, **kwargs: object) -> None:
        found.append(os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT"))
        raise _ProcessGroup

    monkeypatch.setattr("accelerate.PartialState", create)
    monkeypatch.setattr("torch.distributed.init_process_group", create)
    rendezvous = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in rendezvous.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "restored after the test")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    if given is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given)
    with pytest.raises(_ProcessGroup):
        if program == "finetune":
            finetune.prepare({}, None)
        else:
            with launched_ranks("cpu"):
                pass
    assert found == [given or "1"]
