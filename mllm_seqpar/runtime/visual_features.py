"""The visual features that all layers share, and the K and V that are recomputed from them (`RecomputedKeys`).

The K and V of a cross-attention layer are a function of the features y and of the layer's own modules (norms,
projections, LoRA adapters, quantised weights). They are computed for the forward pass, dropped, and recomputed for the
backward pass, so a layer saves nothing that grows with the number of visual tokens (arXiv 2502.02406, section 3.2).

Recomputation runs in chunks of frames: the intermediate results of a projection (a normalised float32 copy of y, for
example) are at least as large as y, and only one chunk of them is alive at a time.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from mllm_seqpar._compat import dropout_class
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import AutocastState, GivenKeys, Keys
from mllm_seqpar.errors import ShapeError

from .fsdp_units import call_within, units_among
from .kv_projection import GradientSums, Grads, KVProjection, Projection, autograd_grads, parameters_of

CHUNK_BYTES = 64 << 20
"""The size of the features that are projected at once; it bounds the intermediate results of a projection."""

CUDA_CHUNK_BYTES = 512 << 20
"""The same on a GPU, whose matrix multiplications are efficient for more rows, and which has fewer launches then."""

_SAMPLED = 4096

_DROPOUT = dropout_class()


@dataclass(frozen=True)
class VisualFeatures:
    """This rank's visual features, one copy for all layers.

    Attributes:
        features: (frames, tokens, width), the frames of this rank; there may be none.
        index: (frames, ...), what projections may need of each frame: a number, or its rotation.
        total_frames: the number of frames on all ranks.
        recompute: whether K and V are projected again in backward, instead of saved.
        layout: how the frames map to ranks; see `sharding.frame_spans`.
    """

    features: Tensor
    index: Tensor
    total_frames: int
    recompute: bool = True
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        if self.features.dim() != 3 or self.index.shape[:1] != self.features.shape[:1]:
            raise ShapeError(
                f"VisualFeatures: features are {tuple(self.features.shape)} and index is {tuple(self.index.shape)}; "
                "expected (frames, tokens, width) and (frames, ...)"
            )

    @property
    def no_frames(self) -> VisualFeatures:
        """Features of no frames, on the device that computes."""
        return replace(self, features=self.features[:0], index=self.index[:0])

    @functools.cached_property
    def without_features(self) -> Self:
        """This object with features of no tokens, for the graph to hold."""
        return replace(self, features=self.features.new_empty(self.features.shape[0], 0, 0))

    def keys(
        self, layer: Hashable, spec: CallSpec, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> Keys:
        """Return the keys of a layer; see `RecomputedKeys`. K and V that backward does not need again are given."""
        if self.recompute:
            keys = RecomputedKeys(spec, self, project, modules, dtype)
            if torch.is_grad_enabled() or keys.is_random:  # the same random numbers with and without gradients
                return keys
        if not torch.is_grad_enabled():
            return GivenKeys(spec, *self.keys_values(project, modules, dtype))
        # At once, for autograd to save.
        project_whole = functools.partial(_projected, project, index=self.index, dtype=dtype)
        return GivenKeys(spec, *call_within(units_among(modules), project_whole, self.features))

    def keys_values(
        self, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, frames * tokens, D) of all frames, contiguous; differentiable in grad mode.

        Without grad mode, only one chunk of intermediate results is alive at a time, and k and v exist once. `modules`
        are those that `project` uses.
        """
        within = units_among(modules)
        return call_within(within, lambda x: project_chunks(project, x, self.index, dtype), self.features)


def frame_chunks(features: Tensor) -> list[slice]:
    """Return chunks of the frames of features (frames, tokens, width): at least one, each at most `CHUNK_BYTES` (on
    CUDA, `CUDA_CHUNK_BYTES`) or one frame."""
    frames = features.shape[0]
    limit = CUDA_CHUNK_BYTES if features.device.type == "cuda" else CHUNK_BYTES
    step = max(1, limit // max(1, features.shape[1] * features.shape[2] * features.element_size()))
    if frames <= step:
        return [slice(0, frames)]
    return [slice(start, min(start + step, frames)) for start in range(0, frames, step)]


def sampled_bits(frames: Tensor) -> Tensor:
    """Return the bits of evenly spread values of the frames, which distinguish two videos."""
    x, step = frames.detach(), max(1, frames.numel() // _SAMPLED)
    if x.is_contiguous():
        return x.view(-1)[::step].float().view(torch.int32)
    # Flattening frames of another memory format (channels last) would copy the whole video.
    places = torch.arange(0, x.numel(), step, device=x.device)
    return x[torch.unravel_index(places, x.shape)].float().view(torch.int32)


def checksum(*tensors: Tensor | None) -> int:
    """Return the CRC-32 of the bytes of tensors on the CPU, one after the other; 0 without any."""
    number = 0
    for x in tensors:
        if x is not None and x.numel():
            x = x.detach().contiguous()
            # Not `x.numpy()`, after which the storage cannot be resized: FSDP2 frees gathered parameters in this way.
            data = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
            number = zlib.crc32(data, number)
    return number


def fingerprint_of(frames: Tensor, sample: Tensor | None = None) -> tuple[int, ...]:
    """Return the shape of frames and a checksum of their `sampled_bits`, to recognise frames that were passed before.

    `sample` is a copy of the `sampled_bits` on the CPU, if there is one.
    """
    return (*frames.shape, checksum(sampled_bits(frames).cpu() if sample is None else sample))


def _projected(project: Projection, features: Tensor, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, v = project(features, index)
    return k.to(dtype).contiguous(), v.to(dtype).contiguous()


def project_chunks(project: Projection, features: Tensor, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chunks, tokens = frame_chunks(features), features.shape[1]
    if len(chunks) == 1:
        return _projected(project, features, index, dtype)
    whole: tuple[Tensor, ...] = ()
    for chunk in chunks:
        parts = [x.to(dtype) for x in project(features[chunk], index[chunk])]
        if not whole:
            whole = tuple(x.new_empty((*x.shape[:2], features.shape[0] * tokens, x.shape[3])) for x in parts)
        for target, part in zip(whole, parts, strict=True):
            target[:, :, chunk.start * tokens : chunk.stop * tokens] = part
    k, v = whole
    return k, v


class RestoredInputs(tuple[Tensor, ...]):
    """The inputs of a `RecomputedKeys` in one backward pass, which `keys_values` and `input_grads` both receive.

    Attributes:
        raw_keys: K before its norm, (f, tokens, G, D) for each chunk of frames; None if `keys_values` stored none.
    """

    raw_keys: list[Tensor] | None = None


@dataclass(frozen=True)
class RecomputedKeys(Keys):
    """Keys that are projected from the shared features, in forward and again in backward.

    Attributes:
        spec: how the group attends to these keys.
        visual: the shared features of this rank.
        project: (features (f, tokens, width), index (f, ...)) -> k, v of shape (1, G, f * tokens, D), frame-major. It
            must treat frames independently of each other, and give the same result when called again.
        modules: the modules whose parameters `project` uses.
        dtype: dtype of k and v, that of the queries.
    """

    spec: CallSpec
    visual: VisualFeatures
    project: Projection
    modules: Sequence[nn.Module]
    dtype: torch.dtype
    _autocast: AutocastState = field(init=False)
    _seed: int | None = field(init=False)

    def __post_init__(self) -> None:
        # The CPU generator gives the seed, because activation checkpointing replays that generator too.
        seed = int(torch.randint(2**62, ())) if self._uses_random_numbers() else None
        object.__setattr__(self, "_autocast", AutocastState.current(self.visual.features.device.type))
        object.__setattr__(self, "_seed", seed)

    def inputs(self) -> Sequence[Tensor]:
        """Return the features and the parameters that require gradients."""
        return self.visual.features, *self._parameters()

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the features alone: parameters belong to their modules, and FSDP gathers them again in backward."""
        return inputs[:1]

    def restored(self, saved: Sequence[Tensor]) -> RestoredInputs:
        return RestoredInputs((saved[0], *self._parameters()))

    def without_inputs(self) -> RecomputedKeys:
        """Return this source without the features, which only saved tensors hold while the graph is alive."""
        return self.of_chunk(self.visual.without_features, 0)

    def of_chunk(self, visual: VisualFeatures, number: int) -> RecomputedKeys:
        """Return the source of a chunk of the frames: with the same projection and autocast mode, and its own seed."""
        chunk = copy.copy(self)
        object.__setattr__(chunk, "visual", visual)
        object.__setattr__(chunk, "_seed", None if self._seed is None else self._seed + number)
        return chunk

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v of all frames of this rank, projected chunk by chunk without grad mode.

        In backward, it also stores what `input_grads` would otherwise project again, in the restored inputs.
        """
        project = self.project
        if isinstance(inputs, RestoredInputs) and isinstance(project, KVProjection) and project.key_norm is not None:
            differentiated = inputs[0].requires_grad or len(inputs) > 1
            if differentiated and project.has_direct_grads(inputs[1:]):
                inputs.raw_keys = []
                project = functools.partial(project, raw_keys=inputs.raw_keys)
        with torch.no_grad(), self._forward_mode():
            return project_chunks(project, inputs[0], self.visual.index, self.dtype)

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, computed one chunk of frames at a time.

        `KVProjection` computes them without projecting K and V again, if it can; autograd does it otherwise.
        """
        if not any(needed):
            return [None] * len(inputs)
        features, *parameters = inputs
        chunks, tokens = frame_chunks(features), features.shape[1]
        trained = [p for p, n in zip(parameters, needed[1:], strict=True) if n]
        chunk_grads = self._chunk_grads(inputs, needed[0], trained)
        with self._forward_mode():
            if len(chunks) == 1:  # no sums, and no copies
                d_features, grads = chunk_grads(features, self.visual.index, dk, dv)
            else:
                d_features, sums = None, GradientSums(len(trained))
                for chunk in chunks:
                    keys = slice(chunk.start * tokens, chunk.stop * tokens)
                    of_chunk = features[chunk], self.visual.index[chunk], dk[:, :, keys], dv[:, :, keys]
                    d_part, grads = chunk_grads(*of_chunk)
                    if d_part is not None:
                        d_features = torch.zeros_like(features) if d_features is None else d_features
                        d_features[chunk] = d_part
                    sums.add(grads)
                grads = sums.totals
        done = (None if x is None else x.to(p.dtype) for p, x in zip(trained, grads, strict=True))
        return [d_features, *(next(done) if need else None for need in needed[1:])]

    def _chunk_grads(
        self, inputs: Sequence[Tensor], needs_features: bool, trained: Sequence[Tensor]
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Grads]:
        """Return a function of features, index, dk and dv of one chunk, to be called for the chunks in order."""
        project, raw_keys = self.project, inputs.raw_keys if isinstance(inputs, RestoredInputs) else None
        if isinstance(project, KVProjection) and project.has_direct_grads(trained):
            if project.key_norm is None:
                return lambda y, index, dk, dv: project.direct_grads(y, index, dk, dv, needs_features, trained)
            if raw_keys is not None:  # released one chunk at a time
                return lambda y, index, dk, dv: project.direct_grads(
                    y, index, dk, dv, needs_features, trained, raw_keys.pop(0)
                )
        return lambda y, index, dk, dv: autograd_grads(project, y, index, dk, dv, self.dtype, needs_features, trained)

    def _parameters(self) -> list[Tensor]:
        return parameters_of(self.modules, trained=True)

    @property
    def is_random(self) -> bool:
        """Whether the projection draws random numbers, as dropout does."""
        return self._seed is not None

    def _uses_random_numbers(self) -> bool:
        for module in self.modules:
            for part in module.modules() if module._modules else (module,):
                if isinstance(part, _DROPOUT) and part.training and part.p > 0:
                    return True
        return False

    def _forward_mode(self) -> AbstractContextManager[object]:
        """Restore the autocast mode of the forward pass and, if `project` uses random numbers, replay them."""
        return self._autocast.again() if self._seed is None else self._replayed(self._seed)

    @contextmanager
    def _replayed(self, seed: int) -> Iterator[None]:
        device = self.visual.features.device
        devices = [device] if device.type == "cuda" else []
        with self._autocast.again(), torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
