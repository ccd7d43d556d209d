"""The visual features that all layers share, and the K and V that layers project from them.

The K and V of a cross-attention layer are a function of the features y and of the layer's own modules (norms,
projections, LoRA adapters, quantised weights). They are computed for the forward pass, dropped, and recomputed for the
backward pass (`RecomputedKeys`), so a layer saves nothing that grows with the number of visual tokens (arXiv
2502.02406, section 3.2).

Recomputation runs in chunks of mask units: the intermediate results of a projection (a normalised float32 copy of y,
for example) are at least as large as y, and only one chunk of them is alive at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from mllm_seqpar._compat import dropout_class
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys, InputGrads, Keys, WholeKeys
from mllm_seqpar.fsdp_units import call_within, fsdp_units_among
from mllm_seqpar.recomputation import AutocastState, GradientSums, ParameterCheck, trained_parameters
from mllm_seqpar.sharding import FrameSizes, Spans

from .projections import KVProjection, ProjectFunction, Projection, autograd_grads

CHUNK_BYTES = 64 << 20
"""The size of the features that are projected at once; it bounds the intermediate results of a projection."""

CUDA_CHUNK_BYTES = 512 << 20
"""The same on a GPU, whose matrix multiplications are efficient for more rows, and which has fewer launches then."""

_DROPOUT = dropout_class()


@dataclass(frozen=True)
class VisualFeatures:
    """This rank's visual features, one copy for all layers.

    Attributes:
        features: (units, tokens, width), the mask units (frames, or image tiles of frames) of this rank; there may be
            none.
        index: (units, ...), what projections may need of each unit: a number, or its rotation.
        units: the number of mask units on all ranks.
        recompute: whether K and V are projected again in backward, instead of saved.
        layout: how the frames map to ranks; see `sharding.frame_spans`.
    """

    features: Tensor
    index: Tensor
    units: int
    recompute: bool = True
    layout: str = "contiguous"

    @property
    def tokens_per_unit(self) -> int:
        return self.features.shape[1]

    @property
    def empty_features(self) -> VisualFeatures:
        """Features of no units, on the device that computes."""
        return replace(self, features=self.features[:0], index=self.index[:0])

    def frames_by_rank(self, sizes: FrameSizes, ranks: int) -> Sequence[Spans]:
        """Return the frames of every rank, given the size of each."""
        return sizes.spans(ranks, self.layout)

    @functools.cached_property
    def without_features(self) -> Self:
        """This object with features of no tokens, for the graph to hold."""
        return replace(self, features=self.features.new_empty(self.features.shape[0], 0, 0))

    def keys(self, layer: Hashable, spec: CallSpec, project: Projection, dtype: torch.dtype) -> Keys:
        """Return the keys of a layer; see `RecomputedKeys`. K and V that backward does not need again are given."""
        if self.recompute:
            keys = RecomputedKeys(spec, self, project, dtype)
            if torch.is_grad_enabled() or keys.is_random:  # the same random numbers with and without gradients
                return keys
        return GivenKeys(spec, *self.keys_values(project, dtype))

    def keys_values(self, project: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, units * tokens, D) of all units, contiguous; differentiable in grad mode."""
        within = fsdp_units_among(project.modules)
        if torch.is_grad_enabled() and (self.features.requires_grad or trained_parameters(project.modules)):
            return call_within(within, lambda x: project_chunks(project, x, self.index, dtype, True), self.features)
        # Also in grad mode: autograd saves nothing of a frozen projection, unless a hook uses a trained tensor.
        return call_within(within, lambda: project_chunks(project, self.features, self.index, dtype))


def unit_chunks(features: Tensor) -> list[slice]:
    """Return chunks of the units of features (units, tokens, width): at least one, each at most `CHUNK_BYTES` (on CUDA,
    `CUDA_CHUNK_BYTES`) or one unit."""
    units = features.shape[0]
    limit = CUDA_CHUNK_BYTES if features.device.type == "cuda" else CHUNK_BYTES
    step = max(1, limit // max(1, features.shape[1] * features.shape[2] * features.element_size()))
    if units <= step:
        return [slice(0, units)]
    return [slice(start, min(start + step, units)) for start in range(0, units, step)]


_WITHOUT_RECOMPUTATION = "recompute_visual=False and without visual_offload"


def project_chunks(
    project: ProjectFunction, features: Tensor, index: Tensor, dtype: torch.dtype, at_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Return k and v (1, G, units * tokens, D), contiguous.

    Only one chunk of intermediate results is alive at a time, and k and v exist once, unless autograd saves them.
    `at_once` projects all units in one call, for autograd to save what it needs.
    """
    chunks, tokens = unit_chunks(features), features.shape[1]
    if at_once or len(chunks) == 1:
        k, v = project(features, index)
        return k.to(dtype).contiguous(), v.to(dtype).contiguous()
    whole: tuple[Tensor, ...] = ()
    for chunk in chunks:
        parts = [x.to(dtype) for x in project(features[chunk], index[chunk])]
        if not whole:
            whole = tuple(x.new_empty((*x.shape[:2], features.shape[0] * tokens, x.shape[3])) for x in parts)
        for target, part in zip(whole, parts, strict=True):
            target[:, :, chunk.start * tokens : chunk.stop * tokens] = part
    k, v = whole
    return k, v


@dataclass(eq=False)
class RecomputedKeys(WholeKeys):
    """Keys that are projected from the shared features, in forward and again in backward.

    Attributes:
        visual: the shared features of this rank.
        project: how k and v are projected.
        dtype: dtype of k and v, that of the queries.
    """

    spec: CallSpec
    visual: VisualFeatures
    project: Projection
    dtype: torch.dtype
    modules: Sequence[nn.Module] = field(init=False)
    _autocast: AutocastState = field(init=False)
    _seed: int | None = field(init=False)
    _parameters: ParameterCheck | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.modules = self.project.modules
        # The CPU generator gives the seed, because activation checkpointing replays that generator too.
        self._autocast = AutocastState.current(self.visual.features.device.type)
        self._seed = None
        for module in self.modules:
            for part in module.modules() if module._modules else (module,):
                if self._seed is None and isinstance(part, _DROPOUT) and part.training and part.p > 0:
                    self._seed = int(torch.randint(2**62, ()))

    def inputs(self) -> Sequence[Tensor]:
        """Return the features and the parameters that require gradients."""
        return self.visual.features, *trained_parameters(self.modules)

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[RecomputedKeys, Sequence[Tensor]]:
        """Return these keys without the features, and the features.

        Only saved tensors hold the features while the graph is alive. Parameters belong to their modules, and FSDP
        gathers them again in backward, which checks that they are the same.
        """
        keys = copy.copy(self)
        keys.visual = self.visual.without_features
        keys._parameters = ParameterCheck(self.modules)
        return keys, inputs[:1]

    def of_chunk(self, visual: VisualFeatures, number: int) -> RecomputedKeys:
        """Return the keys of a chunk of the units: with the same projection and autocast mode, and its own seed.

        The caller checks the parameters, once for all chunks.
        """
        chunk = copy.copy(self)
        chunk.visual, chunk._seed = visual, None if self._seed is None else self._seed + number
        chunk._parameters = None
        return chunk

    def require_unchanged_parameters(self) -> None:
        """Raise ConfigError in backward if the parameters are not those of the forward pass."""
        if self._parameters is not None:
            self._parameters.require_unchanged(_WITHOUT_RECOMPUTATION)

    def keys_values(self, inputs: Sequence[Tensor], raw_keys: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return k and v of all units of this rank, projected chunk by chunk without grad mode.

        K before its norm, (f, tokens, G, D), is appended to `raw_keys` for each chunk.
        """
        project: ProjectFunction = self.project
        if raw_keys is not None:
            assert isinstance(project, KVProjection)
            project = functools.partial(project, raw_keys=raw_keys)
        with torch.no_grad(), self._forward_mode():
            return project_chunks(project, inputs[0], self.visual.index, self.dtype)

    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        """Return k and v, and the function of their gradients, which computes one chunk of units at a time.

        `KVProjection` computes gradients without projecting K and V again, if it can; autograd does it otherwise.
        """
        self.require_unchanged_parameters()
        inputs = saved[0], *trained_parameters(self.modules)
        project, trained = self.project, [p for p, need in zip(inputs[1:], needed[1:], strict=True) if need]
        direct: KVProjection | None = None
        if any(needed) and isinstance(project, KVProjection) and project.has_direct_grads(trained):
            direct = project
        raw_keys: list[Tensor] | None = [] if direct is not None and direct.key_norm is not None else None
        k, v = self.keys_values(inputs, raw_keys)
        return k, v, functools.partial(self._input_grads, inputs, needed, trained, direct, raw_keys)

    def _input_grads(
        self,
        inputs: Sequence[Tensor],
        needed: Sequence[bool],
        trained: Sequence[Tensor],
        direct: KVProjection | None,
        raw_keys: list[Tensor] | None,
        dk: Tensor,
        dv: Tensor,
    ) -> Sequence[Tensor | None]:
        if not any(needed):
            return [None] * len(inputs)
        features, d_features, sums = inputs[0], None, GradientSums(len(trained))
        chunks, tokens = unit_chunks(features), features.shape[1]
        with self._forward_mode():
            for chunk in chunks:
                keys = slice(chunk.start * tokens, chunk.stop * tokens)
                of_chunk = features[chunk], self.visual.index[chunk], dk[:, :, keys], dv[:, :, keys]
                if direct is None:
                    d_part, grads = autograd_grads(self.project, *of_chunk, needed[0], trained, self.dtype)
                else:  # K before its norm is released one chunk at a time
                    raw = None if raw_keys is None else raw_keys.pop(0)
                    d_part, grads = direct.direct_grads(*of_chunk, needed[0], trained, raw)
                if len(chunks) == 1:  # no sums, and no copies
                    d_features, sums.totals = d_part, grads
                    break
                if d_part is not None:
                    d_features = torch.zeros_like(features) if d_features is None else d_features
                    d_features[chunk] = d_part
                sums.add(grads)
        done = iter([x if x is None else x.to(p.dtype) for p, x in zip(trained, sums.totals, strict=True)])
        return [d_features, *(next(done) if need else None for need in needed[1:])]

    @property
    def is_random(self) -> bool:
        """Whether the projection draws random numbers, as dropout does."""
        return self._seed is not None

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
