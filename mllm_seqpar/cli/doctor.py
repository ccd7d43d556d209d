"""The command `mllm-seqpar doctor`: reports what is installed and what the machine has, and checks that results are
exact on it.

Without a launcher it starts its own ranks: one for each GPU, or two on a CPU. On one GPU, two threads act as ranks.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from mllm_seqpar import __version__
from mllm_seqpar._compat import MINIMUM, release
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.nccl_settings import setting_problems
from mllm_seqpar.kernels import choose_kernel

from .launch import DEVICES, launched_ranks, own_ranks, started_by_launcher
from .options import CommandOptions, option, parse_options

TIMEOUT_S = 60.0
OPTIONAL = {
    "av": "video",
    "pillow": "video",
    "pyarrow": "data",
    "flash-attn": "flash",
    "torchvision": "",
    "matplotlib": "plot",
    "fastapi": "serve",
    "uvicorn": "serve",
    "trl": "trl",
    "peft": "peft",
    "bitsandbytes": "qlora",
}
"""Packages that some options or models of commands need, with the extra of this package that installs them.

No extra installs torchvision, which must fit torch; the processors of Qwen2.5-VL and Qwen3-VL need it.
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` is None for what is only stated."""

    name: str
    text: str
    ok: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "WRONG", None: "-"}[self.ok]
        return f"{verdict:<6}{self.name:<13}{self.text}"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(CommandOptions):
    """The options of `mllm-seqpar doctor`: where the exactness check runs."""

    num_processes: int | None = option(
        "ranks to start on this machine (default: one for each GPU, or 2 without any); leave it out under a launcher",
        None,
        least=1,
    )
    device: str = option("device of the exactness check", "auto", choices=DEVICES)


def doctor(argv: Sequence[str]) -> int:
    """Print the findings, on rank 0; return 1 if something is wrong. The ranks that it starts call this too."""
    args = parse_options(
        DoctorOptions,
        argv,
        prog="mllm-seqpar doctor",
        description="Print what is installed and what this machine has, and check that results are exact on it.\n"
        "The exit status is 1 if something is wrong.",
        example="mllm-seqpar doctor",
    )
    logging.getLogger("mllm_seqpar").setLevel(logging.WARNING)
    first, wrong = os.environ.get("RANK", "0") == "0", 0
    for findings in (versions(), machine()) if first else ():
        wrong += _print(findings)
    count = args.num_processes
    if count is None and not started_by_launcher():
        gpus = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
        count = max(1, torch.cuda.device_count()) if gpus else 2
    with own_ranks(count, f"{__name__}:doctor", argv), launched_ranks(args.device, TIMEOUT_S) as (comm, device):
        wrong += _print(exactness(comm, device), show=comm.rank == 0)
    return 1 if wrong and first else 0


def _print(findings: Iterator[Finding], show: bool = True) -> int:
    """Print each finding as soon as it is known; return the number of wrong ones."""
    wrong = 0
    for finding in findings:
        wrong += finding.ok is False
        if show:
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()
    return wrong


def versions() -> Iterator[Finding]:
    """Yield the version of each package, and which optional ones are missing."""
    yield Finding("mllm-seqpar", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package, minimum in MINIMUM.items():
        version = _version(package)
        fits = version is not None and release(version) >= release(minimum)
        remedy = "" if fits else f"; {minimum} or later is needed: pip install --upgrade '{package}>={minimum}'"
        yield Finding(package, (version or "not installed") + remedy, fits)
    optional = {package: _version(package) for package in OPTIONAL}
    yield Finding("optional", ", ".join(f"{name} {version}" for name, version in optional.items() if version) or "none")
    missing = [name + f" (extra {OPTIONAL[name]})" * bool(OPTIONAL[name]) for name in optional if not optional[name]]
    if missing:
        yield Finding("not there", ", ".join(missing) + "; needed for some commands only")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> Iterator[Finding]:
    """Yield devices, NCCL, the kernel that attention uses, links and free memory."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        name = f"{torch.cuda.get_device_name(index)}, capability {capability}"
        yield Finding(f"cuda:{index}", f"{name}, {_gib(free)} of {_gib(total)} free", True)
    smi = shutil.which("nvidia-smi")
    if smi and not gpus:
        text = f"nvidia-smi is installed, but torch (built for {torch.version.cuda or 'no CUDA'}) finds no GPU"
        yield Finding("gpu", f"{text}; install torch for this driver's CUDA", False)
    elif not gpus:
        yield Finding("gpu", "none; everything runs on the CPU")
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    yield Finding("cpu", f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)} for torch")
    memory = host_memory()
    yield Finding("host memory", "unknown" if memory is None else f"{_gib(memory)} available")
    if gpus:
        version, available = "not available in this build of torch", dist.is_nccl_available()
        if available:
            version = ".".join(map(str, torch.cuda.nccl.version()))
        problems = setting_problems(os.environ) if started_by_launcher() else []
        yield Finding("nccl", "; ".join([version, *problems]), available and not problems)
    q = torch.zeros(1, 4, 64, 128, dtype=torch.bfloat16, device="cuda" if gpus else "cpu")
    kernel, reason = choose_kernel("auto", q, q)
    yield Finding("kernel", f"for bfloat16, {reason if gpus else kernel.name}")
    links = "none between GPUs"
    if smi and gpus > 1:
        try:
            done = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=20)
            links = "nvidia-smi topo -m:\n" + (done.stdout or done.stderr).rstrip()
        except (OSError, subprocess.TimeoutExpired) as error:
            links = f"nvidia-smi topo -m failed: {error}"
    yield Finding("links", links)


def host_memory() -> int | None:
    """Return the bytes that this process can still allocate, limited by its control group; None if that is unknown."""
    group = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return None
    try:
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return free
    return min(free, limit)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def exactness(comm: Communicator, device: torch.device) -> Iterator[Finding]:
    """Yield the errors of attention and of patched models on these ranks; with a single rank, two ranks are simulated
    in threads."""
    from .exactness import LIMITS, attention_errors, model_errors

    torch.backends.cudnn.allow_tf32 = False  # for the convolutions of the tiny model's vision tower
    how = f"{comm.size} processes, {dist.get_backend()}" if comm.size > 1 else "2 threads of one process"
    where = comm.gather_texts(f"{platform.node()}/{device}")
    yield Finding("ranks", f"{how}: {', '.join(where)}")
    start = time.monotonic()

    def run_on(ranks: Communicator) -> list[Finding]:
        errors = []
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            for name, error in attention_errors(ranks, device, dtype):
                errors.append((f"attention {name}, {str(dtype).removeprefix('torch.')}", error, LIMITS[dtype]))
        for name, error in model_errors(ranks, device):
            errors.append((f"{name}, loss and gradients", error, LIMITS[torch.float32]))
        findings = []
        for what, error, limit in errors:
            text = f"{what}: relative error {error:.1e} against float64"
            text += "" if error <= limit else f"; at most {limit:g} is allowed"
            findings.append(Finding("exactness", text, error <= limit))
        return findings

    yield from run_on(comm) if comm.size > 1 else run_loopback(2, run_on)[0]
    yield Finding("time", f"{time.monotonic() - start:.1f} s for the exactness check")
