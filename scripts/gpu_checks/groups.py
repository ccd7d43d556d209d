"""The process group of transfers on the GPUs of this node: its options, subgroups, many messages, buffers, "auto"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks.common import FEW, Row, build, inputs, mib, share_one_gpu

from mllm_seqpar import patch_model
from mllm_seqpar.attention import ring_attention
from mllm_seqpar.comm import Communicator, Recv, Send
from mllm_seqpar.comm.group import transfer_communicator
from mllm_seqpar.comm.process_group import ProcessGroupCommunicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.memory import COMMUNICATOR_BYTES

MESSAGES = 300
"""More than NCCL accepts in one group of operations."""
STEPS = 3


def check(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield what the group is, then what it transfers."""
    subject = f"{comm.size} ranks"
    before = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    own = transfer_communicator(None)
    assert isinstance(own, ProcessGroupCommunicator)
    yield own_group(own, device, subject)
    yield many_messages(own, device, subject)
    if device.type == "cuda":
        used = before - torch.cuda.mem_get_info()[0]
        found = f"{mib(used)} of all ranks, which share one GPU" if share_one_gpu(comm) else mib(used)
        yield Row("communicator memory", subject, found, f"planned {mib(COMMUNICATOR_BYTES)} a rank")
    yield buffers(own, device, subject)
    yield subgroup(comm, device)
    yield automatic(own, device, subject)


def own_group(own: ProcessGroupCommunicator, device: torch.device, subject: str) -> Row:
    """Return whether transfers have a group of their own, with a stream of high priority, and integers the CPU."""
    separate = own.transfers is not dist.group.WORLD
    found = f"separate: {separate}; integers on {own.control_device.type}"
    ok = separate and own.control_device.type == "cpu"
    if device.type == "cuda":
        options = own.transfers._get_backend(torch.device("cuda")).options
        found += f"; stream of high priority: {options.is_high_priority_stream}"
        ok = ok and options.is_high_priority_stream
    return Row("own group", subject, found, "separate, cpu", ok)


def many_messages(own: ProcessGroupCommunicator, device: torch.device, subject: str) -> Row:
    """Return whether one exchange with more messages than NCCL takes at once arrives."""
    after, before = (own.rank + 1) % own.size, (own.rank - 1) % own.size
    sent = [torch.full((4,), float(own.rank * MESSAGES + i), device=device) for i in range(MESSAGES)]
    received = [torch.empty(4, device=device) for _ in sent]
    own.exchange([Send(after, x, "check") for x in sent], [Recv(before, x) for x in received]).wait()
    right = all(x.eq(before * MESSAGES + i).all() for i, x in enumerate(received))
    return Row("many messages", subject, f"{MESSAGES} messages, right: {right}", "", right)


def buffers(own: ProcessGroupCommunicator, device: torch.device, subject: str) -> Row:
    """Return whether later calls allocate no receive buffers, and give the same bits on another stream."""
    x = torch.randn(3, 1, 4, 64, 32, generator=torch.Generator().manual_seed(own.rank)).to(device)
    first = ring_attention(*x, group=own)
    allocations = own.kept.buffers.allocations
    same = all(torch.equal(first, ring_attention(*x, group=own)) for _ in range(STEPS - 1))
    new = own.kept.buffers.allocations - allocations
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            same = same and torch.equal(first, ring_attention(*x, group=own))
    return Row(
        "receive buffers", subject, f"{new} allocations after the first call, same bits: {same}", "0", same and not new
    )


def subgroup(comm: Communicator, device: torch.device) -> Row:
    """Return whether the first two ranks can attend alone, while the others do not take part."""
    pair = dist.new_group([0, 1])  # type: ignore[no-untyped-call]
    done = True
    if comm.rank < 2:
        x = torch.randn(3, 1, 4, 8, 32, generator=torch.Generator().manual_seed(comm.rank)).to(device)
        done = bool(ring_attention(*x, group=pair).isfinite().all())
    return Row("subgroup alone", f"2 of {comm.size} ranks", f"computed: {done}", "", done)


def automatic(own: ProcessGroupCommunicator, device: torch.device, subject: str) -> Row:
    """Return whether "auto" calibrates on the device of the run for a model that was patched on the CPU."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, log = Lines(), logging.getLogger("mllm_seqpar")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        model = build("cpu").float()
        patch_model(model, strategy="auto", group=own)
        refused = device.type == "cpu" or _refuses(model, device)
        model.to(device)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
            model(**inputs(model, *FEW, encoded=True), use_cache=False)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    found = [line for line in lines if "calibrated" in line and f"on {device.type}, bfloat16" in line]
    # Only rank 0 of a group logs.
    right = refused and (len(found) == 1 or own.rank > 0)
    return Row("auto", subject, f"{'; '.join(found)[:80]}; a model on the CPU is refused: {refused}", "once", right)


def _refuses(model: Any, device: torch.device) -> bool:
    try:
        model(**inputs(model, *FEW, encoded=True), use_cache=False)
    except ConfigError as error:
        return "is on cpu" in str(error)
    return False
