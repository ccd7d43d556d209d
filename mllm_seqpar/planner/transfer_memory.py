"""The memory that transfers take on each rank: receive buffers, which stay allocated over calls, and NCCL's own.

A communicator keeps its receive buffers (`comm.receive_buffers`). Tensors take turns in a buffer if they belong to the
same axis, are both inputs or both results, and have the same dtype and number of dimensions. Of each such kind there
are as many buffers as the call that uses most of them at one time, each as long as that call needs, so that the size
is found from the sizes of each call, longest first.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import zip_longest

from mllm_seqpar.schedules import Axis, MeshShape, TransferKind
from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem, mesh_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of, resolve_tile

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
    """Return the bytes of the receive buffers that stay allocated in a step with this spec.

    It is that of cross-attention, or of self-attention in a decoder-only model.
    """
    text, problem = workload.self_attention, workload.text_problem
    decoder_only = workload.model.decoder_only
    calls = [(problem if decoder_only else workload.cross_problem, spec)]
    directions = (False, True) if workload.training else (False,)
    if text != "local" and not decoder_only:
        shape, degree = resolve_tile("ring" if text == "auto" else text, None, problem.ranks)
        shape = shape or min(  # of even shards: all ranks send the same, so rank 0 decides
            mesh_shapes_of(problem.ranks),
            key=lambda shape: sum(sum(mesh_bytes(problem, shape, backward=b).values()) for b in directions),
        )
        calls.append((problem, ParallelSpec(text, shape, degree)))
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
    a, b = spec.mesh_shape
    element, q_result = inner.element, inner.result_element(a, direct=spec.all_pairs)
    kv_result = inner.result_element(b)
    o, kv, rows = row * inner.dim * element, key * inner.dim * element, (row * LSE_BYTES, "lse")
    result, kv_grad = (row * inner.dim * q_result, q_result), (key * inner.dim * kv_result, kv_result)
    tensors: dict[tuple[TransferKind, Axis], list[tuple[int, Hashable]]] = {
        ("input", "q"): [(o, element), rows] * 2 if backward else [(o, element)],
        ("input", "kv"): [(kv, element)] * 2,
        ("result", "q"): [result] if backward else [result, rows],
        ("result", "kv"): [kv_grad] * 2,
    }
    # A received result is added to the rank's own before the next one of its axis is received.
    held_q, held_kv = shards_at_one_time(spec.mesh_shape)
    counts: dict[tuple[TransferKind, Axis], int] = {("input", "q"): held_q, ("input", "kv"): held_kv}
    counts |= {("result", "q"): int(a > 1), ("result", "kv"): int(b > 1 and backward)}
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for kind, count in counts.items():
        for size, group in tensors[kind]:
            found[kind, group] += [size] * count
    return dict(found)


def shards_at_one_time(mesh_shape: MeshShape) -> tuple[int, int]:
    """Return the number of Q shards and of KV shards of other ranks that a rank holds at one time.

    A ring holds the shard that it computes with and the next one, a mesh at most all of its groups.
    """
    a, b = mesh_shape
    return (min(a - 1, 2) if b == 1 else a - 1), (min(b - 1, 2) if a == 1 else b - 1)
