"""The vision tower in a sequence-parallel pass: each rank encodes its own frames, in chunks; FSDP stays in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mllm_seqpar.sharding import frame_bounds

from .inputs import ForwardInputs

if TYPE_CHECKING:
    from .family import Family


def runs_anywhere(model: nn.Module, own: int) -> int:
    """How often the vision tower runs in this pass on each of the ranks that FSDP2 keeps in step with this one.

    FSDP2 gathers a module's parameters when it runs, and reduces gradients of the same parameters on all ranks: a rank
    that skips a module stalls the others. Groups of one job may have other batches, so they ask each other: one number,
    largest of all, over the mesh that the parameters are sharded on.

    Args:
        model: sharded by FSDP2, or not: then only `own` counts.
        own: how often it runs for this rank's own group.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return own
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is None:  # one unit for all, gathered already, and nobody to ask: as if somebody had some frame
        return max(own, 1)
    found = torch.tensor(own, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return int(found)


def local_features(family: Family, inputs: ForwardInputs) -> Tensor | None:
    """(units, tokens, width): the features of this rank's frames; the vision tower runs on those only.

    It runs on `vision_chunk_size` frames at a time, as often as on the rank with most. A rank with nothing left runs it
    on one frame and keeps nothing of that, so that its parameters get zero gradients rather than none and FSDP's
    gathers stay in step. For the same reason a batch without any frame has one when other ranks under the same FSDP
    have some, which no token sees: encoded when the caller passes pixels or nothing, all zeros when the caller passes
    an empty tensor of features, which says that the others run no tower either. Without frames anywhere it gives None,
    and the parameters get no gradient, as unpatched.
    """
    frames, total, units = inputs.frames, inputs.total_frames, family.units_per_frame(inputs)
    rank, size = family.context.comm.rank, family.context.comm.size
    weight = family.embedding_weight()
    bounds = frame_bounds(total, size)
    most = max(stop - start for start, stop in bounds)
    chunk = most if inputs.frames_are_features else family.context.config.vision_chunk_size or most
    runs = runs_anywhere(family.model, -(-most // max(chunk, 1)))
    if total == 0:
        if not runs:
            return None
        if frames is not None and inputs.frames_are_features:
            blank = frames.new_zeros((units, *frames.shape[1:]), dtype=weight.dtype, device=weight.device)
        else:
            picture = family.blank()
            blank = _encoded(family, picture, picture, runs)
        return blank if rank == 0 else blank[:0]
    assert frames is not None
    given = (frames, *inputs.extras)
    if inputs.visual_shard is None:
        start, stop = bounds[rank]
        if inputs.frames_are_features:
            start, stop = start * units, stop * units
        given = tuple(x[start:stop] for x in given)
    mine = given[0]
    if inputs.frames_are_features:
        mine = mine.flatten(0, mine.dim() - 3)  # by units, where they came by frames
        dtype = mine.dtype if torch.is_autocast_enabled(weight.device.type) else weight.dtype
        return mine.to(device=weight.device, dtype=dtype)
    # Of the caller's size: what fails does so everywhere. Another rank's frame, so that the caller's tensor gets zeros
    # as its gradient here, rather than none.
    whole = (frames, *inputs.extras)
    spare = given if mine.shape[0] else tuple(x if x.shape[0] else x.new_zeros((1, *x.shape[1:])) for x in whole)
    return _encoded(family, given, spare, runs)


def _encoded(family: Family, given: Sequence[Tensor], spare: Sequence[Tensor], runs: int) -> Tensor:
    """The features of `given`, in so many runs of the tower; one with nothing left to do encodes a frame of `spare`."""
    count = given[0].shape[0]
    each = max(1, -(-count // runs))
    parts = []
    for start in range(0, runs * each, each):
        if start < count:
            parts.append(family.encode(*(x[start : start + each] for x in given)))
        else:  # nothing is kept of it, but its place in the backward pass
            parts.append(family.encode(*(x[:1] for x in spare))[:0])
    return parts[0] if runs == 1 else torch.cat(parts)
