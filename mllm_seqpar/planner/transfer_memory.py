"""The memory that transfers take on each rank: receive buffers, which stay allocated over calls, and NCCL's own.

A communicator keeps its receive buffers (`comm.receive_buffers`). Tensors take turns in a buffer if they belong to the
same axis, are both inputs or both results, and have the same dtype and number of dimensions. Of each such kind there
are as many buffers as the call that uses most of them at one time, each as long as that call needs, so that the size
is found from the sizes of each call, longest first.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from functools import lru_cache
from itertools import zip_longest

from mllm_seqpar.schedules import Axis, MeshShape, OverlapRatios, TransferKind, schedule_for
from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem
from mllm_seqpar.schedules.mesh_shapes import least_bytes_mesh_shape, resolve_tile
from mllm_seqpar.schedules.steps import last_uses

from .candidates import ParallelSpec, problem_between_groups
from .workload import Workload

COMMUNICATORS = 2
"""NCCL communicators of a rank: that of FSDP2, and that of the exchanges."""

COMMUNICATOR_BYTES = 2**30
"""Assumed device memory of one NCCL communicator; not measured by this project.

NCCL allocates a buffer of NCCL_BUFFSIZE, 4 MiB by default, per channel and connection: 256 MiB for 32 channels and the
two connections of a ring, without the buffers of its other protocols. Users report up to about 1.6 GB (NVIDIA/nccl
issue 864). Fewer channels (NCCL_MAX_NCHANNELS) or smaller buffers take less.
"""

Sizes = dict[Hashable, list[int]]
"""Bytes of the buffers of each kind, longest first."""


def communicator_memory(workload: Workload) -> int:
    """Return the bytes of NCCL's communicators."""
    return COMMUNICATORS * COMMUNICATOR_BYTES if workload.gpus > 1 else 0


def receive_buffer_memory(workload: Workload, spec: ParallelSpec) -> int:
    """Return the bytes of the receive buffers that stay allocated in a step with this spec for cross-attention."""
    text, problem = workload.self_attention, workload.text_problem
    calls = [(workload.cross_problem, spec)]
    if text != "local":
        shape, degree = resolve_tile("ring" if text == "auto" else text, None, problem.ranks)
        calls.append((problem, ParallelSpec(text, shape or least_bytes_mesh_shape(problem), degree)))
    directions = (False, True) if workload.training else (False,)
    return buffer_bytes(receive_buffers(*call, backward=backward) for call in calls for backward in directions)


def buffer_bytes(calls: Iterable[Sizes]) -> int:
    """Return the bytes of the buffers that serve all of these calls."""
    merged: defaultdict[Hashable, list[int]] = defaultdict(list)
    for sizes in calls:
        for kind, own in sizes.items():
            merged[kind] = [max(pair) for pair in zip_longest(merged[kind], own, fillvalue=0)]
    return sum(map(sum, merged.values()))


def receive_buffers(problem: Problem, spec: ParallelSpec, *, backward: bool) -> Sizes:
    """Return the receive buffers that one direction of one call uses at one time."""
    if spec.strategy == "replicate" or spec.mesh_shape == (1, 1):
        return {}
    inner = problem_between_groups(problem, spec.head_degree)
    row, key = inner.batch * inner.heads * inner.rows, inner.key_batch * inner.kv_heads * max(inner.keys)
    o, wide = (row * inner.dim * size for size in (inner.element, inner.accumulated))
    kv, wide_kv = (key * inner.dim * size for size in (inner.element, inner.accumulated))
    rows, element, accumulated = (row * LSE_BYTES, "lse"), inner.element, inner.accumulated
    tensors: dict[tuple[TransferKind, Axis], list[tuple[int, Hashable]]] = {
        ("input", "q"): [(o, element)] * 3 + [rows] if backward else [(o, element)],
        ("input", "kv"): [(kv, element)] * 2,
        ("result", "q"): [(wide, accumulated)] if backward else [(wide, accumulated), rows],
        ("result", "kv"): [(wide_kv, accumulated)] * 2,
    }
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for kind, count in _shards_at_one_time(spec.mesh_shape, backward).items():
        for size, group in tensors[kind]:
            found[kind, group] += [size] * count
    return dict(found)


@lru_cache(maxsize=256)
def _shards_at_one_time(mesh_shape: MeshShape, backward: bool) -> Counter[tuple[TransferKind, Axis]]:
    """Return the number of shards of each kind that are in receive buffers at one time, as the executor uses them."""
    schedule = schedule_for(mesh_shape, 0, backward=backward, overlap_ratios=OverlapRatios())
    uses, held, most = last_uses(schedule), Counter[tuple[TransferKind, Axis]](), Counter[tuple[TransferKind, Axis]]()
    for index, step in enumerate(schedule):
        held.update((t.kind, t.axis) for t in step.transfers)
        most |= held
        held.subtract(("result", t.axis) for t in step.transfers if t.kind == "result")
        held.subtract(("input", axis) for (axis, owner), last in uses.items() if last == index and owner != 0)
    return most
