"""Training steps of a patched mPLUG-Owl3 under FSDP2 on the GPUs of this node, against the unpatched model on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu_checks.kernels import relative
from gpu_checks.memory import mib
from gpu_checks.model import DTYPE, build, inputs
from gpu_checks.one_gpu import synchronisations
from gpu_checks.rows import Row
from gpu_checks.trace import kernels_of, streams
from gpu_checks.training import ALLOWED, SIZES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator
from mllm_seqpar.models.loading import layer_classes
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import USABLE, peak_memory
from mllm_seqpar.planner.workload import Workload

LATER = 4
"""Further steps, over which reserved memory may not grow."""


def check(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield two steps of each strategy against one device; streams, synchronisations and memory of LV-XAttn."""
    frames, length = SIZES[device.type]
    unpatched = build(device.type)
    given = inputs(unpatched, frames, length)
    exact = train(unpatched, [given])
    for strategy in ("replicate", "lv-xattn"):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = sharded(patch_model(build(device.type), strategy=strategy), device)
        found = train(model, [given])
        yield from compare(f"{strategy}, {comm.size} ranks", found, exact, DTYPE[device.type])
    yield from measure(model, given, comm, device)


def sharded(model: Any, device: torch.device) -> Any:
    """Shard the layers of a model and the rest by FSDP2, over all ranks."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    units = set(layer_classes(model))
    for module in reversed(list(model.modules())):  # inner modules first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    # The large epsilon keeps a parameter whose true gradient is 0 from moving by the sign of a rounding error.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)


def train(
    model: Any, batches: Sequence[dict[str, Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Take two steps of AdamW on the mean loss of the batches.

    Returns:
        The losses of the batches in each step, and the gradients of the first step, whole and on the CPU.
    """
    optimizer, losses, first = optimizer or optimizer_of(model), [], {}
    for _ in range(2):
        found = torch.stack([model(**batch, use_cache=False).loss for batch in batches])
        found.mean().backward()
        losses.append(found.tolist())
        for name, p in model.named_parameters():
            if len(losses) == 1 and p.grad is not None:
                whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                first[name] = whole.to("cpu", copy=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def compare(subject: str, found: Any, exact: Any, dtype: torch.dtype) -> Iterator[Row]:
    """Yield the errors of the first batch's losses, and of the gradients."""
    loss_limit, gradient_limit = ALLOWED[dtype]
    ours, theirs = ([batches[0] for batches in losses] for losses, _ in (found, exact))
    errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    losses = f"losses {ours[0]:.5f}, {ours[1]:.5f}, errors {errors[0]:.1e}, {errors[1]:.1e}"
    # The second loss follows an update whose rounding is that of the gradients.
    ok = errors[0] <= loss_limit and errors[1] <= 10 * loss_limit
    yield Row("FSDP2 steps", subject, losses, f"{loss_limit:g}, {10 * loss_limit:g}", ok)
    # As in `training.check_gate`: a bias of keys has no gradient but rounding error in the vision tower.
    names = [name for name in exact[1] if not (name.startswith("vision_model") and name.endswith("k_proj.bias"))]
    worst, name = max((relative(found[1][name], exact[1][name].double()), name) for name in names)
    found = f"largest error of a gradient {worst:.1e} ({name})"
    yield Row("FSDP2 steps", subject, found, f"{gradient_limit:g}", worst <= gradient_limit)


def measure(model: Any, given: dict[str, Tensor], comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield the memory, the streams and the host synchronisations of a model that has taken two steps."""
    frames, length = SIZES[device.type]
    size = DTYPE[device.type].itemsize
    sizes = model_sizes(model.config.to_dict(), "check")
    options: dict[str, Any] = {"element": size, "parameter": size, "optimizer": 2 * size, "trained": "all"}
    workload = Workload(model=sizes, frames=frames, text=length, gpus=comm.size, **options)
    planned = sum(peak_memory(workload, ParallelSpec("lv-xattn", (comm.size, 1))).values())
    subject = f"lv-xattn, {comm.size} ranks, {frames} frames"
    if device.type == "cpu":
        yield Row(
            "reserved memory", subject, f"planned {mib(planned)}; not measurable without CUDA: the reserved memory"
        )
        yield Row("streams", subject, "not measurable without CUDA")
        yield synchronisations(None, device.type, subject)
        return
    optimizer = optimizer_of(model)

    def step() -> None:
        model(**given, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak, before = torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
    limit = planned / USABLE
    found = f"peak {mib(peak)}, planned {mib(planned)}"
    yield Row("reserved memory", subject, found, f"{mib(limit)} (planned / {USABLE})", peak <= limit)
    for _ in range(LATER):
        step()
    torch.cuda.synchronize()
    growth = torch.cuda.memory_reserved() - before
    yield Row("reserved memory", f"{subject}, {LATER} more steps", f"grows by {mib(growth)}", mib(0), growth == 0)
    kernels = kernels_of(step)
    exchanges, fsdp = streams(kernels, "SendRecv"), streams(kernels, "ReduceScatter")
    found = f"exchanges on {sorted(exchanges)}, FSDP2's reduce-scatter on {sorted(fsdp)}"
    yield Row("streams", subject, found, "different streams", bool(exchanges and fsdp) and not exchanges & fsdp)
    yield synchronisations(lambda: model(**given, use_cache=False), device.type, subject)
