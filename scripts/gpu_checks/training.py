"""Training steps and memory of a patched mPLUG-Owl3 against the unpatched model: ranks in one process, or under FSDP2.

Under FSDP2, ranks also train as users run them: through accelerate's `prepare`, with float32 weights, computation in
bf16 and gradient checkpointing; and in two groups with a batch each, whose exchanges run beside the collectives of
FSDP2 over all ranks.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from accelerate import Accelerator
from gpu_checks.common import DTYPE, Row, build, inputs, kernels_of, mib, relative, streams
from gpu_checks.kernels import synchronisations
from harness import medians_ms
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memory_meters import peak_memory as memory_meter
from memory_meters import saved
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.integrations.accelerate import enable_fsdp2_on_cpu, require_sharded, set_fsdp_units
from mllm_seqpar.models.loading import layer_classes
from mllm_seqpar.models.mplug_owl3.configuration import GATES
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import COMMUNICATOR_BYTES, COMMUNICATORS, USABLE, peak_memory
from mllm_seqpar.planner.workload import Workload

LOOPBACK_RANKS = 2
SIZES = {"cuda": (16, 512), "cpu": (3, 40)}
"""Frames and text tokens."""
ALLOWED = {torch.bfloat16: (1e-2, 5e-2), torch.float32: (1e-5, 1e-5)}
"""Largest relative difference of the loss, and of any parameter's gradient.

The two computations round differently through two layers and a vision tower, to 8 or to 24 bits of mantissa.
"""
LATER = 4
"""Further steps, over which reserved memory may not grow."""
VIDEO = {"cuda": (64, 1024), "cpu": (4, 48)}
"""Of the memory with and without recomputation: frames of the shorter video, and text tokens."""
GROWTH = 0.02
"""Growth that recomputation may have, as a fraction of the growth without it. It should be zero."""
LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""What `accelerate launch` sets for a configuration with FSDP2."""


class Steps(NamedTuple):
    """Two steps: the losses of the batches in each, the gradients of the first, whole and on the CPU, and the seconds
    of the second."""

    losses: list[list[float]]
    gradients: dict[str, Tensor]
    seconds: float


def train(
    model: Any,
    batches: Sequence[dict[str, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    comm: Communicator | None = None,
) -> Steps:
    """Take two steps of AdamW on the mean loss of the batches; gradients are averaged over `comm`, if given."""
    optimizer, losses, first = optimizer or optimizer_of(model), [], {}
    for _ in range(2):
        start = time.perf_counter()
        found = torch.stack([model(**batch, use_cache=False).loss for batch in batches])
        found.mean().backward()
        losses.append(found.tolist())
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if comm is not None:
                p.grad.copy_(comm.all_reduce(p.grad) / comm.size)
            if len(losses) == 1:
                whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                first[name] = whole.to("cpu", copy=True)
        optimizer.step()
        optimizer.zero_grad()
        if found.is_cuda:
            torch.cuda.synchronize()
    return Steps(losses, first, time.perf_counter() - start)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    # The large epsilon keeps a parameter whose true gradient is 0 from moving by the sign of a rounding error.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)


def compare(check: str, subject: str, found: Steps, exact: Steps, dtype: torch.dtype, device: str) -> Iterator[Row]:
    """Yield the errors of the first batch's losses, and of the gradients."""
    loss_limit, gradient_limit = ALLOWED[dtype]
    ours, theirs = ([batches[0] for batches in steps.losses] for steps in (found, exact))
    errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    losses = f"losses {ours[0]:.5f}, {ours[1]:.5f}, errors {errors[0]:.1e}, {errors[1]:.1e}"
    # The second loss follows an update whose rounding is that of the gradients.
    ok = errors[0] <= loss_limit and errors[1] <= 10 * loss_limit
    yield Row(check, subject, losses, f"{loss_limit:g}, {10 * loss_limit:g}", ok)
    # A bias of keys adds one number to all scores of a row, and softmax is invariant to that: its gradient is rounding
    # error only. (In the language model, keys are rotated after the bias, so this does not hold there.)
    names = [name for name in exact.gradients if not (name.startswith("vision_model") and name.endswith("k_proj.bias"))]
    worst, name = max(
        (relative(found.gradients[name].to(device), exact.gradients[name].to(device).double()), name) for name in names
    )
    text = f"largest error of a gradient {worst:.1e} ({name})"
    yield Row(check, subject, text, f"{gradient_limit:g}", worst <= gradient_limit)


def check_in_one_process(device: str) -> Iterator[Row]:
    """Yield loss and gradients against the unpatched model, and time and memory of a step, for each kind of gate."""
    for gate in GATES:
        yield from check_gate(gate, device)


def check_gate(gate: str | None, device: str) -> Iterator[Row]:
    frames, length = SIZES[device]
    model = build(device, gate)
    given = inputs(model, frames, length)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    exact = train(copy.deepcopy(model), [given])
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    models = [model] + [copy.deepcopy(model) for _ in range(LOOPBACK_RANKS - 1)]

    def one_rank(comm: Communicator) -> Steps:
        return train(patch_model(models[comm.rank], group=comm), [given], comm=comm)

    steps = run_loopback(LOOPBACK_RANKS, one_rank)
    subject = f"gate {gate}, {LOOPBACK_RANKS} ranks, {count:.0f} M parameters"
    yield from compare("training", subject, steps[0], exact, DTYPE[device], device)
    same = all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    same = same and steps[0].losses == steps[1].losses
    found = f"losses and parameters {'equal' if same else 'differ'} on the ranks"
    yield Row("training", f"gate {gate}, after two AdamW steps", found, "", same)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB for all ranks" if device == "cuda" else ""
    tokens = frames * (given["pixel_values"].shape[-1] // 14) ** 2
    found = f"{max(each.seconds for each in steps) * 1e3:.0f} ms a step{peak}"
    yield Row("training", f"gate {gate}, {frames} frames, {tokens} visual tokens", found)


def check_memory(device: str) -> Iterator[Row]:
    """Yield the bytes saved for a video and for one twice as long, and the time of a step, with and without
    recomputation of K and V."""
    frames, length = VIDEO[device]
    model = build(device)
    model.vision_model.requires_grad_(False)
    saved: dict[str, list[int]] = {}
    times = {}
    shorter, longer = (inputs(model, count, length, encoded=True) for count in (frames, 2 * frames))
    for name, recompute in (("recomputed", True), ("stored", False)):
        patch_model(model, recompute_visual=recompute)
        saved[name] = []
        for given in (shorter, longer):
            excluded = [*model.parameters(), *given.values()]
            saved[name].append(saved_bytes(lambda given=given: model(**given, use_cache=False).loss, excluded))
        steps = {name: lambda: model(**shorter, use_cache=False).loss.backward()}
        times |= medians_ms(steps, device, repeats=5)
        unpatch_model(model)
    growth = {name: second - first for name, (first, second) in saved.items()}
    allowed = GROWTH * growth["stored"]
    limits = {"recomputed": (f"growth {mib(allowed)}", growth["recomputed"] <= allowed), "stored": ("", None)}
    for name, (first, second) in saved.items():
        found = f"{mib(first)} for {frames} frames, {mib(second)} for {2 * frames}"
        yield Row("memory", f"K and V {name}, 1 hyper layer", found, *limits[name])
    ratio = times["recomputed"] / times["stored"]
    found = f"{times['recomputed']:.1f} ms recomputed, {times['stored']:.1f} ms stored: {ratio:.3f} x"
    yield Row("memory", f"forward and backward, {frames} frames, 2 layers", found)


def saved_bytes(run: Callable[[], Tensor], excluded: list[Tensor]) -> int:
    """Return the bytes that a result's graph holds in addition to `excluded`, from the allocator (CUDA) or autograd
    (CPU).
    """
    if excluded[0].is_cuda:
        run()  # the first call allocates workspaces that are never freed
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run()
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated() - before
        del loss
        return size
    return saved(run, *excluded)


def check_ranks(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield two steps of each strategy against one device; streams, synchronisations and memory of LV-XAttn."""
    kind = device.type
    unpatched = build(kind)
    given = inputs(unpatched, *SIZES[kind])
    exact = train(unpatched, [given])
    del unpatched  # each model is alone on the device, so that its memory is that of a user
    for strategy in ("replicate", "lv-xattn"):
        model = sharded(patch_model(build(kind), strategy=strategy), device)
        found = train(model, [given])
        yield from compare("FSDP2 steps", f"{strategy}, {comm.size} ranks", found, exact, DTYPE[kind], kind)
        if strategy == "replicate":
            del model
            release(device)
    yield from measure(model, given, comm, device)


def release(device: torch.device) -> None:
    """Return the memory of deleted tensors to the device, so that what is reserved next is what runs next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def check_users(comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield two steps by accelerate's `prepare`, and of two groups with a batch each, against one device."""
    frames, length = SIZES[device.type]
    sizes = (frames, length), (frames - 1, length // 2)
    unpatched = build(device.type)
    batches = [inputs(unpatched, *size) for size in sizes]
    exact = train(unpatched, batches[:1])
    model, optimizer = prepared(build(device.type).float(), device)
    found = train(model, batches[:1], optimizer)
    subject = f"accelerate, bf16, checkpointing, {comm.size} ranks"
    yield from compare("FSDP2 steps", subject, found, exact, torch.bfloat16, device.type)
    subject = f"2 groups of {comm.size // 2} rank(s)"
    if comm.size % 2:
        yield Row("FSDP2 steps", subject, "not run: needs an even number of ranks")
        return
    exact = train(build(device.type), batches)
    mesh = init_device_mesh(device.type, (2, comm.size // 2), mesh_dim_names=("dp", "sp"))
    number = mesh["dp"].get_local_rank()
    model = sharded(patch_model(build(device.type), group=mesh["sp"]), device)
    exact = exact._replace(losses=[[each[number]] for each in exact.losses])
    yield from compare("FSDP2 steps", subject, train(model, [batches[number]]), exact, DTYPE[device.type], device.type)


def sharded(model: Any, device: torch.device) -> Any:
    """Shard the layers of a model and the rest by FSDP2, over all ranks."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    units = set(layer_classes(model))
    for module in reversed(list(model.modules())):  # inner modules first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepared(model: Any, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Patch a model for all ranks, and shard it by accelerate's `prepare`; return it and its optimizer."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    patch_model(model)
    with mock.patch.dict(os.environ, LAUNCHED):
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
        enable_fsdp2_on_cpu(accelerator)
        set_fsdp_units(accelerator, model)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    require_sharded(model)
    return model, optimizer.optimizer


def measure(model: Any, given: dict[str, Tensor], comm: Communicator, device: torch.device) -> Iterator[Row]:
    """Yield the memory, the streams and the host synchronisations of a model that has taken two steps.

    The planner's estimate is of the memory that is allocated. PyTorch reserves more, because it keeps freed memory for
    the stream that used it. NCCL's memory is in neither.
    """
    frames, length = SIZES[device.type]
    size = DTYPE[device.type].itemsize
    sizes = model_sizes(model.config.to_dict(), "check")
    options: dict[str, Any] = {"element": size, "parameter": size, "optimizer": 2 * size, "trained": "all"}
    workload = Workload(model=sizes, frames=frames, text=length, gpus=comm.size, **options)
    planned = sum(peak_memory(workload, ParallelSpec("lv-xattn", (comm.size, 1))).values())
    planned -= COMMUNICATORS * COMMUNICATOR_BYTES
    subject = f"lv-xattn, {comm.size} ranks, {frames} frames"
    optimizer = optimizer_of(model)

    def step() -> None:
        model(**given, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    release(device)
    step()  # creates the optimizer's state
    with memory_meter(device) as meter:
        step()
    allocated = held_bytes(model, optimizer) + meter.bytes
    found = f"peak {mib(allocated)}, without the inputs"
    yield Row("allocated memory", subject, found, f"{mib(planned)} (planned)", allocated <= planned)
    if device.type == "cpu":
        yield Row("reserved memory", subject, "not measurable without CUDA")
        yield Row("streams", subject, "not measurable without CUDA")
        yield synchronisations(None, device.type, subject)
        return
    reserved, limit = torch.cuda.memory_reserved(), planned / USABLE
    found = f"{mib(reserved)} for {mib(torch.cuda.max_memory_allocated())} allocated"
    yield Row("reserved memory", subject, found, f"{mib(limit)} (planned / {USABLE})", reserved <= limit)
    for _ in range(LATER):
        step()
    torch.cuda.synchronize()
    growth = torch.cuda.memory_reserved() - reserved
    yield Row("reserved memory", f"{subject}, {LATER} more steps", f"grows by {mib(growth)}", mib(0), growth == 0)
    kernels = kernels_of(step)
    exchanges, fsdp = streams(kernels, "SendRecv"), streams(kernels, "ReduceScatter")
    found = f"exchanges on {sorted(exchanges)}, FSDP2's reduce-scatter on {sorted(fsdp)}"
    yield Row("streams", subject, found, "different streams", bool(exchanges and fsdp) and not exchanges & fsdp)
    yield synchronisations(lambda: model(**given, use_cache=False), device.type, subject)


def held_bytes(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's parameters and of its optimizer's state."""
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
    local = (x.to_local() if isinstance(x, DTensor) else x for x in (*model.parameters(), *states))
    return sum(x.numel() * x.element_size() for x in local)
