"""The vision tower of a pass: each rank encodes its own frames, in as many calls as the other ranks make.

FSDP2 gathers the parameters of a module when it runs, and DDP reduces gradients once they exist on all ranks: a rank
that skips a module, or a parameter, stalls the others. The groups of one job have different batches, so before a pass
encodes frames, all ranks that reduce gradients together agree on whether any of them has frames, and of which kind.

FSDP2 is found by the classes of its modules. A model does not refer to the DDP that wraps it, but while DDP's forward
runs, torch does (it uses this to compile such models).

Shape legend: F frames of all samples and ranks, f frames of this rank, x visual tokens of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mllm_seqpar._compat import reducing_ddp
from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm.backends import backends_of
from mllm_seqpar.comm.transfer_group import control_group
from mllm_seqpar.errors import AgreementError, ShapeError
from mllm_seqpar.runtime.offload import HostFeatures, in_host_memory, stored_in_host_memory
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.sharding import APPENDED, Spans, part_of_spans, span_length, take_spans

from .facts import ModelFacts
from .inputs import ForwardInputs


class Tower:
    """The vision tower in one pass: encodes this rank's frames, in as many runs as the other ranks make.

    All ranks make one together (`agree_on_frames`).

    Args:
        family: what the pass reads of the model.
        inputs: the inputs of the pass, once all ranks have compared theirs.

    Attributes:
        layout: how the frames of this pass map to ranks: as the caller has sharded them, or as the family states.
        by_rank: the frames of every rank. Without frames, rank 0 has the empty one.
        own: those of this rank.
        runs: how often each rank runs the tower.
        shape: (tokens, width) if ranks pass features.
    """

    def __init__(self, family: ModelFacts[Any], inputs: ForwardInputs) -> None:
        self.family, self.inputs, self._weight = family, inputs, family.embedding_weight()
        comm, shard = family.context.comm, inputs.visual_shard
        self.layout = APPENDED if inputs.appends_frames else family.frame_layout
        if shard is not None:
            layout = inputs.shard_layout or shard.layout(comm.rank, comm.size, inputs.sizes)
            assert layout is not None, "checked before"
            self.layout = layout
        self.by_rank: Sequence[Spans] = inputs.sizes.spans(comm.size, self.layout)
        self.own = self.by_rank[comm.rank]
        frames, most = inputs.frames, max(map(span_length, self.by_rank)) if inputs.total_frames else 0
        is_features = frames is not None and inputs.frames_are_features
        chunk = most if is_features else family.context.config.vision_chunk_size or most
        shape = (frames.shape[-2], frames.shape[-1]) if frames is not None and is_features else None
        pixels = frames is not None and not is_features
        self.runs, self.shape = agree_on_frames(family.model, -(-most // max(chunk, 1)), pixels, shape)

    def features(self) -> Tensor | None:
        """Return the features (units, tokens, width) of this rank's frames; the vision tower encodes only those.

        The tower encodes `vision_chunk_size` frames at a time, and makes as many calls on every rank as the rank with
        the most frames needs. A rank with nothing left to encode runs it on one frame and discards the result, so that
        its parameters have zero gradients rather than none and the gathers of FSDP stay in step. For the same reason a
        batch without any frame gets an empty one, to which no token attends, if other ranks under the same FSDP2 or DDP
        have frames (`agree_on_frames`). The empty frame is encoded, or zeros if the other ranks pass features, because
        they do not run the tower then either. If no rank has frames, the result is None and the parameters have no
        gradient, as in the unpatched model.
        """
        family, inputs, own = self.family, self.inputs, self.own
        sizes, weight = inputs.sizes, self._weight
        if inputs.total_frames == 0:
            if not self.runs:  # no rank has frames
                return None
            if self.shape is not None:  # the others pass features
                empty = torch.zeros((sizes.count(), *self.shape), dtype=weight.dtype, device=weight.device)
            else:
                blank = family.blank_frame()
                empty = self._encoded(lambda _: blank, ((0, 1),), lambda: blank, sizes.count())
            return empty if family.context.comm.rank == 0 else empty[:0]
        assert inputs.frames is not None
        if inputs.frames_are_features:
            # by units, if they came by frames
            whole = inputs.visual_shard is None
            features = take_spans(inputs.frames, sizes.units(own)) if whole else inputs.frames
            features = features.flatten(0, features.dim() - 3)
            if family.context.config.visual_offload is not None:
                return in_host_memory(features, weight.device)
            return features.to(device=weight.device, dtype=self._dtype_of(features))
        count = sizes.count(own)
        if inputs.visual_shard is not None:
            own = ((0, span_length(own)),)
        # A run whose result is discarded uses one of the caller's frames, from any rank, so that a frame of a wrong
        # size fails on every rank, and the caller's tensor has a zero gradient here rather than none.
        has_frames = inputs.visual_shard is None or len(inputs.visual_shard) > 0
        spare = functools.partial(inputs.take, ((0, 1),)) if has_frames else inputs.blank_frames
        return self._encoded(inputs.take, own, spare, count)

    def visual_features(self, features: Tensor) -> VisualFeatures:
        """Return this rank's features with the index of each unit. Without frames, rank 0 has the empty one."""
        family, inputs, config = self.family, self.inputs, self.family.context.config
        units, index = inputs.sizes.count(), family.unit_index(inputs, self.own)
        if features.dim() != 3 or index.shape[:1] != features.shape[:1]:
            raise ShapeError(
                f"{type(family).__name__}: encode returned features of shape {tuple(features.shape)}, and unit_index "
                f"{tuple(index.shape)}; expected (units, tokens, width) and (units, ...)"
            )
        if config.visual_offload is None:
            index = copy_to_device(index, features.device)
            return VisualFeatures(features, index, units, config.recompute_visual, self.layout)
        dtype = self._dtype_of(features) if inputs.frames_are_features else features.dtype
        index = copy_to_device(index, self._weight.device)
        return HostFeatures.of(features, index, units, dtype, self.layout)

    def embeddings(self) -> Tensor | None:
        """Return the embeddings (x, width) of this rank's frames, for a decoder-only model."""
        family, inputs, weight = self.family, self.inputs, self._weight
        total, (start, stop) = inputs.total_frames, next(iter(self.own), (0, 0))
        if not self.runs:
            return None
        if total == 0 and self.shape is not None:
            return torch.zeros(0, self.shape[1], dtype=weight.dtype, device=weight.device)
        if inputs.frames is not None and inputs.frames_are_features:
            (rows,) = family.frames_between(inputs, start, stop)
            return rows.to(device=weight.device, dtype=weight.dtype)

        def take(frames: Spans) -> Sequence[Any]:
            ((first, last),) = frames
            return family.frames_between(inputs, first, last)

        def spare() -> Sequence[Any]:
            empty = family.blank_frame()
            if inputs.frames is None:
                return empty
            # The empty slices of the caller's tensors have zero gradients here rather than none.
            none = family.frames_between(inputs, start, start)
            return tuple(torch.cat([x.to(y), y]) for x, y in zip(none, empty, strict=True))

        return self._encoded(take, self.own if total else (), spare)

    def _dtype_of(self, features: Tensor) -> torch.dtype:
        """Return the dtype that layers take features of the caller in."""
        return features.dtype if torch.is_autocast_enabled(self._weight.device.type) else self._weight.dtype

    def _encoded(
        self, take: Callable[[Spans], Sequence[Any]], own: Spans, spare: Callable[[], Sequence[Any]], units: int = 0
    ) -> Tensor:
        """Encode the frames `own`, which `take` returns, in the runs of the tower.

        A run with nothing left encodes the frame that `spare` returns, and drops it. Frames in host memory move to the
        device run by run. With `visual_offload`, features of `units` units are stored in host memory.
        """
        runs, count, device = self.runs, span_length(own), self._weight.device
        chunk = max(1, -(-count // runs))

        def encoded() -> Iterator[Tensor]:
            for start in range(0, runs * chunk, chunk):
                if start < count:
                    frames = take(own if runs == 1 else part_of_spans(own, start, start + chunk))
                    yield self.family.encode(*[_moved(x, device) for x in frames])
                else:  # an empty slice, so that the run stays in the graph for backward
                    yield self.family.encode(*[_moved(x, device) for x in spare()])[:0]

        if self.family.context.config.visual_offload is not None:
            return stored_in_host_memory(encoded(), units, device)
        parts = list(encoded())
        return parts[0] if runs == 1 else torch.cat(parts)


def _moved(x: Any, device: torch.device) -> Any:
    """Return a tensor on the device, and any other value, which the host reads, unchanged."""
    if not isinstance(x, Tensor):
        return x
    return x.to(device) if x.requires_grad else copy_to_device(x, device)  # pinned copies have no gradients


def agree_on_frames(
    model: nn.Module, runs: int, pixels: bool, features: tuple[int, int] | None
) -> tuple[int, tuple[int, int] | None]:
    """Return how often the vision tower must run in this pass, and the shape of features; the same for all groups.

    Without FSDP2 and DDP, the arguments are returned. The ranks agree over gloo, so that no host waits for its device.

    Args:
        model: the patched model.
        runs: how often this rank's group would run the tower; with features, 1 if there are any.
        pixels, features: whether the caller passed pixels, and the (tokens, width) of features, perhaps of no frame.

    Raises:
        AgreementError: on all ranks, if one passes pixels and another one features.
    """
    groups: list[Any] = []
    device: str | torch.device = "cpu"
    at_least, ddp = 0, reducing_ddp()
    if dist.is_initialized() and any(isinstance(module, FSDPModule) for module in model.modules()):
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        if mesh is None:  # one unit that is gathered already has no mesh to ask: assume that some rank has a frame
            at_least = 1
        else:
            groups, device = mesh.get_all_groups(), mesh.device_type
    elif ddp is not None:
        at_least = 0 if ddp.find_unused_parameters and not ddp.static_graph else 1
        if not ddp._join_config.enable:
            groups, device = [ddp.process_group], next(ddp.parameters()).device
    if not groups:
        return max(runs, at_least), features
    numbers = torch.tensor([runs, pixels, features is not None, *(features or (0, 0))])
    for group in map(control_group, groups):
        numbers = numbers.to("cpu" if "cpu" in backends_of(group) else device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    runs, any_pixels, any_features, tokens, width = numbers.tolist()
    if any_pixels and any_features:
        raise AgreementError(
            "some ranks under the same FSDP2 or DDP pass pixels and others pass features, so that only some run the "
            "vision tower; pass one kind in all groups of a step"
        )
    return max(runs, at_least), (tokens, width) if any_features else None


class _TakePart(torch.autograd.Function):
    """Forward: x, parameters -> x. Backward: zero gradients for the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [p.shape for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(()).expand(shape) for shape in ctx.shapes)


def with_accumulated_gradients(x: Tensor, model: nn.Module) -> Tensor:
    """Return `x`, through which parameters that have a gradient on any rank of DDP take part in backward with zero.

    With gradient accumulation, DDP reduces the gradients of all micro-batches in the backward pass of the last one, but
    only if that reaches a parameter on every rank. If no rank has frames in it, and only the visual path is trained, it
    reaches none. All ranks of DDP call this function in a pass in which none of them has frames.
    """
    ddp = reducing_ddp()
    if ddp is None or ddp._join_config.enable:
        return x
    trained = [p for p in model.parameters() if p.requires_grad]
    accumulated = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=x.device)
    dist.all_reduce(accumulated, dist.ReduceOp.MAX, group=ddp.process_group)
    return _TakePart.apply(x, *(p for p, some in zip(trained, accumulated.tolist(), strict=True) if some))
