"""The changes of a plan by `visual_offload="cpu"`: two chunks of features on the device, and copies from the host.

A layer brings all features of the rank once per pass, under the computation of the chunk before, so a pass of a layer
takes at least features / `HOST_LINK` seconds. Q, O and the log-sum-exp are exchanged before and after the computation,
so none of these transfers overlaps with it. All Q shards and their results are on the device during a call.
"""

from dataclasses import replace

from mllm_seqpar.schedules import TransferKind

from .call_cost import shard_bytes
from .candidates import ParallelSpec
from .costs import Cost, Passes
from .workload import Workload

CHUNK_BYTES = 64 << 20
"""As `runtime.visual_features.CHUNK_BYTES`, the size of a chunk of features in host memory."""

HOST_LINK = 20e9
"""Bytes per second from pinned memory to a GPU: about four fifths of PCIe 4.0 with 16 lanes, 25 GB/s in practice."""


def chunk_keys(workload: Workload) -> int:
    """Return the visual tokens of one chunk of frames."""
    keys = workload.model.vision.keys
    frame = keys * workload.model.cross.visual_dim * workload.element
    return min(workload.local_frames, max(1, CHUNK_BYTES // frame)) * keys


def host_bytes(workload: Workload) -> int:
    """Return the bytes of a rank's features in host memory, without their gradient."""
    return workload.local_frames * workload.model.vision.keys * workload.model.cross.visual_dim * workload.element


def features_memory(workload: Workload) -> int:
    """Return the bytes of the two chunks of features; of the two chunks of their gradient, and one more to add."""
    chunk = chunk_keys(workload) * workload.model.cross.visual_dim * workload.element
    return chunk * (5 if workload.training and workload.trains_features else 2)


def rows_memory(workload: Workload, *, backward: bool) -> int:
    """Return the bytes of all ranks' rows and of their results, as they are sent and as they are computed with."""
    problem = workload.cross_problem
    spec = ParallelSpec("lv-xattn", (problem.ranks, 1))
    kinds: tuple[TransferKind, ...] = ("input", "result")
    rows = sum(shard_bytes(problem, spec, kind, "q", backward=backward) for kind in kinds)
    return (2 * workload.gpus - 1) * rows


def with_copies(workload: Workload, call: Passes) -> Passes:
    """Return the cost of an attention call with features in host memory, where no transfer is hidden."""
    seconds = host_bytes(workload) / HOST_LINK
    copied = seconds * (2 if workload.trains_features else 1)  # copies in the two directions overlap
    passes = 1 + workload.checkpointing  # backward repeats the forward pass with checkpointing
    hidden = call.both.hidden / (2 if workload.training else 1)

    def exposing(cost: Cost, copies: float) -> Cost:
        waits = cost.exposed + cost.hidden
        return replace(cost, seconds=max(cost.seconds + hidden, copies), exposed=waits, hidden=0.0)

    backward = exposing(call.backward, copied + seconds * (passes - 1)) if workload.training else Cost()
    return Passes(exposing(call.forward, seconds), backward)
