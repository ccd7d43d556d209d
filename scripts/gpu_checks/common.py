"""What the checks share: rows of the table, the model and its inputs, and what a profiler saw on the device."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mllm_seqpar.comm import Communicator
from tiny_models import Sizes, tiny_model

SIZES = {
    "cuda": Sizes(
        width=3584,
        mlp=18944,
        layers=2,
        heads=28,
        kv_heads=4,
        cross_layers=(0,),
        vocabulary=8192,
        image=378,
        tower_width=1152,
        tower_mlp=4304,
        tower_layers=2,
        tower_heads=16,
    ),
    "cpu": Sizes(
        width=64, mlp=96, layers=2, heads=4, kv_heads=2, cross_layers=(0,), vocabulary=8192, image=56, tower_layers=2
    ),
}
"""An mPLUG-Owl3 with the width of the 7B model, few layers and random weights."""
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
FEW = 4, 48
"""Frames and text tokens of a small batch."""


@dataclass(frozen=True)
class Row:
    """One check; `ok` is None if there is no limit."""

    check: str
    subject: str
    found: str
    allowed: str = ""
    ok: bool | None = None


def write(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a file, none if it does not exist. A line cut short by a crash is skipped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return rows


def table(rows: list[Row]) -> str:
    verdict = {True: "ok", False: "FAILED", None: "-"}
    lines = [("check", "on", "found", "allowed", "")]
    lines += [(row.check, row.subject, row.found, row.allowed, verdict[row.ok]) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[4]]) for line in lines)


def mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def build(device: str, gate: str | None = None) -> Any:
    """Return a model of two layers, the first of them a hyper layer, and a vision tower of two layers."""
    with torch.device(device):
        return tiny_model("mplug_owl3", SIZES[device], gate=gate).to(DTYPE[device]).train()


def inputs(model: Any, frames: int, length: int, *, encoded: bool = False) -> dict[str, Tensor]:
    """Return tokens (1, length) with placeholders of the frames, labels, and pixels or, if `encoded`, features.

    They are drawn on the model's device, because a CPU takes a minute for the features of a long video. GPUs of one
    kind draw the same.
    """
    from tiny_models.mplug_owl3 import Case, tiny_text  # transformers takes seconds, and most parts need no model

    like, config = next(model.parameters()), model.config
    size, ids = config.vision_config.image_size, tiny_text(frames, length=length)
    tokens = (size // config.vision_config.patch_size) ** 2
    name, shape = ("image_embeds", (tokens, config.hidden_size)) if encoded else ("pixel_values", (3, size, size))
    where: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    drawn = torch.randn(frames, *shape, generator=torch.Generator(like.device).manual_seed(3), **where)
    text = {"input_ids": ids} | Case(frames=(frames,), length=length).targets(ids)
    return {key: x.to(like.device) for key, x in text.items()} | {name: drawn}


def share_one_gpu(comm: Communicator) -> bool:
    """Return whether the ranks, which are all on this node, have one GPU: their times then mean nothing."""
    return comm.size > torch.cuda.device_count() == 1


class Kernel(NamedTuple):
    """A kernel on the device, with its stream and its times in nanoseconds."""

    name: str
    stream: int
    start: int
    stop: int


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """Return the CUDA kernels of one call of `run`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Kernel(event.name(), event.device_resource_id(), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
        and not event.is_user_annotation()
        and not event.name().lower().startswith(("memcpy", "memset"))
    ]


def is_transfer(kernel: Kernel) -> bool:
    return "nccl" in kernel.name.lower()


def hidden_share(kernels: Iterable[Kernel]) -> float:
    """Return the fraction of the time of NCCL kernels in which another kernel runs; 0 without NCCL kernels."""
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    busy: list[list[int]] = []  # disjoint intervals in which a kernel computes
    for kernel in kernels:
        if is_transfer(kernel):
            continue
        if busy and kernel.start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], kernel.stop)
        else:
            busy.append([kernel.start, kernel.stop])
    transfers = [kernel for kernel in kernels if is_transfer(kernel)]
    total = sum(kernel.stop - kernel.start for kernel in transfers)
    hidden = sum(
        max(0, min(kernel.stop, stop) - max(kernel.start, start)) for kernel in transfers for start, stop in busy
    )
    return hidden / total if total else 0.0


def streams(kernels: Iterable[Kernel], collective: str) -> set[int]:
    """Return the streams of the NCCL kernels whose name contains `collective`."""
    return {kernel.stream for kernel in kernels if is_transfer(kernel) and collective in kernel.name}


def host_synchronisations(run: Callable[[], object]) -> Counter[str]:
    """Return how often each line of Python makes the host wait for the device in one call of `run`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(x.filename).name}:{x.lineno}" for x in caught if "synchronizing CUDA" in str(x.message))
