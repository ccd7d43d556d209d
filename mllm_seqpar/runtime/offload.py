"""Visual features in host memory (`visual_offload="cpu"`): layers bring them to the device chunk by chunk.

The features of a rank are one tensor in host memory: pinned, or a view of a mapped file, which is then never read as a
whole. A layer brings a chunk of frames, projects its K and V, computes the attention of all ranks' queries to them, and
drops them (`attention.streamed`), while the next chunk is copied. Nothing on the device grows with the number of
frames.

Backward brings the chunks again. The gradients of the features are summed over layers in host memory, chunk by chunk.
They do not go through autograd layer by layer, which would need two such sums at a time: the layers depend on an
`anchor`, a scalar that autograd differentiates after all of them, and whose backward function returns the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar._compat import graph_task
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import InputGrads, Keys
from mllm_seqpar.attention.streamed import KeyChunk, StreamedKeys
from mllm_seqpar.fsdp_units import call_within, fsdp_units_among
from mllm_seqpar.recomputation import GradientSums

from .host_copies import HostCopies
from .projections import Projection
from .visual_features import RecomputedKeys, VisualFeatures, project_chunks, unit_chunks


class HostGradient:
    """The sum over layers of the gradients of features (frames, tokens, width), in host memory."""

    def __init__(self, features: Tensor, copies: HostCopies) -> None:
        self._shape, self._dtype, self._copies = features.shape, features.dtype, copies
        self._sum: Tensor | None = None
        self._task = -1

    def begin(self) -> tuple[Tensor, bool]:
        """Return the sum, and whether this is the first layer of this backward pass, which writes every frame.

        A sum that another backward pass left behind is dropped: it failed, or asked for no gradient of the features.
        """
        task = graph_task()  # by which torch's activation checkpointing distinguishes passes too
        first = self._sum is None or self._task != task
        if self._sum is None or first:
            self._task, self._sum = task, self._copies.host_empty(self._shape, self._dtype)
        return self._sum, first

    def take(self) -> Tensor:
        """Return the sum of this backward pass, and drop it, and the buffers of the copies: no layer follows."""
        total, self._sum = self._sum, None
        if total is None or self._task != graph_task():
            return torch.zeros(self._shape, dtype=self._dtype)
        self._copies.wait()
        self._copies.release()
        return total


class _Anchor(torch.autograd.Function):
    """Forward: features (frames, tokens, width) -> 0. Backward: the gradient of the features that layers summed."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, gradient: HostGradient) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.take(), None


@dataclass(frozen=True)
class HostFeatures(VisualFeatures):
    """This rank's visual features in host memory; `index` is on the device that computes.

    Attributes:
        dtype: the dtype of the features on the device.
        anchor: (), on which the layers depend instead of the features.
        gradient: the gradients of the features so far.
        copies: the copies to and from the device.
    """

    dtype: torch.dtype = field(kw_only=True)
    anchor: Tensor = field(kw_only=True)
    gradient: HostGradient = field(kw_only=True)
    copies: HostCopies = field(kw_only=True)

    @classmethod
    def of(
        cls, features: Tensor, index: Tensor, units: int, dtype: torch.dtype, layout: str = "contiguous"
    ) -> HostFeatures:
        """Make the features of a pass from a host tensor, which autograd may differentiate."""
        copies = HostCopies(index.device)
        gradient = HostGradient(features, copies)
        anchor = _Anchor.apply(features, gradient)
        host = {"dtype": dtype, "anchor": anchor, "gradient": gradient, "copies": copies}
        return cls(features.detach(), index, units, layout=layout, **host)

    @property
    def empty_features(self) -> VisualFeatures:
        empty = torch.empty((0, *self.features.shape[1:]), dtype=self.dtype, device=self.index.device)
        return VisualFeatures(empty, self.index[:0], self.units)

    def keys(self, layer: Hashable, spec: CallSpec, project: Projection, dtype: torch.dtype) -> Keys:
        """Return the keys of a layer, which are projected chunk by chunk."""
        return OffloadedKeys(spec, self, RecomputedKeys(spec, self.empty_features, project, dtype))

    def keys_values(self, project: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, frames * tokens, D) of all frames, views of host memory; without gradients.

        They are stored as (keys, G, D), so that a chunk of frames is contiguous.
        """
        frames, tokens, _ = self.features.shape
        chunks, stored = unit_chunks(self.features), list[Tensor]()

        def store() -> list[Tensor]:
            features = self.copies.to_device("features", self.features, chunks)
            for part, chunk in zip(features, chunks, strict=True):
                for number, x in enumerate(project_chunks(project, part.to(self.dtype), self.index[chunk], dtype)):
                    if len(stored) <= number:
                        stored.append(self.copies.host_empty((frames * tokens, x.shape[1], x.shape[3]), dtype))
                    target = stored[number][chunk.start * tokens : chunk.stop * tokens]
                    self.copies.to_host(x[0].transpose(0, 1).contiguous(), target)
            return stored

        k, v = call_within(fsdp_units_among(project.modules), store)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


@dataclass(frozen=True)
class OffloadedKeys(StreamedKeys):
    """Keys and values that are projected from features in host memory, one chunk of frames at a time.

    Attributes:
        visual: the features; without them in backward, for which autograd saves them.
        projection: the projection, as keys of no frames.
    """

    spec: CallSpec
    visual: HostFeatures
    projection: RecomputedKeys

    @property
    def modules(self) -> Sequence[nn.Module]:  # type: ignore[override]
        return self.projection.modules

    def inputs(self) -> Sequence[Tensor]:
        """Return the anchor of the features, the features, and the parameters that require gradients."""
        return self.visual.anchor, self.visual.features, *self.projection.inputs()[1:]

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[OffloadedKeys, Sequence[Tensor]]:
        projection, _ = self.projection.for_backward(self.projection.inputs())
        return replace(self, visual=self.visual.without_features, projection=projection), inputs[:2]

    def chunks(self, inputs: Sequence[Tensor]) -> Iterator[KeyChunk]:
        return self.chunk_vjps(inputs, [False] * len(inputs))[0]

    def chunk_vjps(
        self, saved: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[Iterator[KeyChunk], Callable[[], Sequence[Tensor | None]]]:
        self.projection.require_unchanged_parameters()
        features, (needs_features, _, *needs) = saved[1], needed
        _, *parameters = self.projection.inputs()
        visual, chunks, sums = self.visual, unit_chunks(features), GradientSums(len(parameters))
        total, first = visual.gradient.begin() if needs_features else (None, True)
        copied = visual.copies.to_device("features", features, chunks)
        earlier = None if total is None or first else visual.copies.to_device("gradient", total, chunks)

        def add(chunk: slice, of_inputs: InputGrads, dk: Tensor, dv: Tensor) -> None:
            d_features, *grads = of_inputs(dk, dv)
            if total is not None:
                assert d_features is not None
                d_features = d_features.to(total.dtype)
                if earlier is not None:
                    d_features = next(earlier) + d_features
                visual.copies.to_host(d_features, total[chunk])
            sums.add(grads)

        def each_chunk() -> Iterator[KeyChunk]:
            for number, chunk in enumerate(chunks):
                part = next(copied).to(visual.dtype)
                own = self.projection.of_chunk(VisualFeatures(part, visual.index[chunk], visual.units), number)
                k, v, of_inputs = own.vjp([part], [needs_features, *needs])
                yield KeyChunk(k, v, functools.partial(add, chunk, of_inputs))
            for copies in (copied, earlier):
                if copies is not None:
                    assert next(copies, None) is None  # which marks the last buffer as free

        def input_grads() -> Sequence[Tensor | None]:
            """Return zero for the anchor, whose gradient is in `HostGradient`, and the gradients of the parameters."""
            totals = zip(parameters, sums.totals, strict=True)
            return (
                torch.zeros(()) if needs_features else None,
                None,
                *(None if x is None else x.to(p.dtype) for p, x in totals),
            )

        return each_chunk(), input_grads


class _StoredRun(torch.autograd.Function):
    """Forward: features (f, tokens, width) on the device -> 0, stored in host memory. Backward: their gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, store: _HostStore, frames: slice) -> Tensor:
        ctx.store, ctx.frames, ctx.device = store, frames, features.device
        store.whole[frames].copy_(features)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        part = ctx.store.gradient[ctx.frames].to(ctx.device)
        ctx.store.runs -= 1
        if not ctx.store.runs:
            ctx.store.gradient = torch.empty(0)
        return part, None, None


class _StoredFeatures(torch.autograd.Function):
    """Forward: the whole of the stored runs. Backward: keeps its gradient for the backward functions of the runs."""

    @staticmethod
    def forward(ctx: Any, store: _HostStore, *runs: Tensor) -> Tensor:
        ctx.store, ctx.runs = store, len(runs)
        whole, store.whole = store.whole, torch.empty(0)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.store.gradient, ctx.store.runs = gradient, ctx.runs
        return None, *(torch.zeros(()) for _ in range(ctx.runs))


class _HostStore:
    """The features of all runs in host memory, until the last has written them; and in backward their gradient, until
    the last of `runs` runs has taken its part. It is alive as long as the graph."""

    def __init__(self) -> None:
        self.whole, self.gradient, self.runs = torch.empty(0), torch.empty(0), 0


def stored_in_host_memory(runs: Iterator[Tensor], frames: int, device: torch.device) -> Tensor:
    """Return the concatenation of features in host memory, differentiably.

    `runs` are features (f, tokens, width) on `device`, of `frames` frames in all; each is freed before the next is
    asked for.
    """
    store, start = _HostStore(), 0
    stored: list[Tensor] = []
    for part in runs:
        if not stored:
            store.whole = HostCopies(device).host_empty((frames, *part.shape[1:]), part.dtype)
        stored.append(_StoredRun.apply(part, store, slice(start, start + part.shape[0])))
        start += part.shape[0]
        del part
    return _StoredFeatures.apply(store, *stored)


def in_host_memory(features: Tensor, device: torch.device) -> Tensor:
    """Return features (frames, tokens, width) in host memory, differentiably. Features in host memory are not copied.

    A view of a mapped file remains one. Features on the device are copied to pinned memory.
    """
    if features.device.type == "cpu":
        return features
    return stored_in_host_memory(iter([features]), features.shape[0], device)
