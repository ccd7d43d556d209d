"""The visual features that all layers share, and the K and V that layers project from them.

The K and V of a cross-attention layer are a function of the features y and of the layer's own modules (norms,
projections, LoRA adapters, quantised weights). They are computed for the forward pass, dropped, and recomputed for the
backward pass (`RecomputedKeys`), so a layer saves nothing that grows with the number of visual tokens (arXiv
2502.02406, section 3.2).

Recomputation runs in chunks of frames: the intermediate results of a projection (a normalised float32 copy of y, for
example) are at least as large as y, and only one chunk of them is alive at a time.

Most projections consist of norms, linear layers and a rotation. `KVProjection` describes such a projection, and
computes its gradients for a chunk of frames without repeating the matrix multiplications of its forward pass:

    x = input_norm(y);  raw k, v = x W^T + b;  k = rotate(key_norm(raw k))
    d raw k = key_norm'(rotate^T dk);  dW = [d raw k, dv]^T x;  db = sum of [d raw k, dv];  dx = [d raw k, dv] W

where x is recomputed, which is an element-wise computation, and raw k is kept from the projection of the same backward
pass if there is a key_norm. Norms are differentiated by autograd. Every other projection, among them one with adapters
or quantised weights, is differentiated by autograd as a whole (`autograd_grads`).
"""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from mllm_seqpar._compat import dropout_class, global_module_hooks
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys, InputGrads, Keys, WholeKeys
from mllm_seqpar.checkpointing import AutocastState, ParameterCheck, detached_parameters, trained_parameters
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.fsdp_units import call_within, fsdp_units_among

ProjectFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(features (f, tokens, width), index (f, ...)) -> k, v (1, G, f * tokens, D), frame by frame."""

Grads = tuple[Tensor | None, list[Tensor | None]]
"""Gradients of a chunk of features and of the trained parameters; None where there is none."""

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

    def __post_init__(self) -> None:
        if self.features.dim() != 3 or self.index.shape[:1] != self.features.shape[:1]:
            raise ShapeError(
                f"VisualFeatures: features are {tuple(self.features.shape)} and index is {tuple(self.index.shape)}; "
                "expected (frames, tokens, width) and (frames, ...)"
            )

    @property
    def tokens_per_unit(self) -> int:
        return self.features.shape[1]

    @property
    def no_frames(self) -> VisualFeatures:
        """Features of no frames, on the device that computes."""
        return replace(self, features=self.features[:0], index=self.index[:0])

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
        if not torch.is_grad_enabled():
            return GivenKeys(spec, *self.keys_values(project, dtype))
        # At once, for autograd to save.
        project_whole = functools.partial(_projected, project, index=self.index, dtype=dtype)
        return GivenKeys(spec, *call_within(fsdp_units_among(project.modules), project_whole, self.features))

    def keys_values(self, project: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, frames * tokens, D) of all frames, contiguous; differentiable in grad mode.

        Without grad mode, only one chunk of intermediate results is alive at a time, and k and v exist once.
        """
        within = fsdp_units_among(project.modules)
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


def sampling_step(x: Tensor, count: int) -> int:
    """Return the distance of about `count` values that are spread over x, and over all rows and columns of its last two
    dims: the left column of two videos may be the same black border."""
    step, plane = max(1, x.numel() // count), math.prod(x.shape[-2:])
    while math.gcd(step, plane) > 1:
        step += 1
    return step


def sampled_bits(x: Tensor, count: int = _SAMPLED) -> Tensor:
    """Return the bits of about `count` values that are spread over x; those of two videos differ."""
    x, step = x.detach(), sampling_step(x, count)
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


def _projected(project: ProjectFunction, features: Tensor, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, v = project(features, index)
    return k.to(dtype).contiguous(), v.to(dtype).contiguous()


def project_chunks(
    project: ProjectFunction, features: Tensor, index: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
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


class Projection(Protocol):
    """How a layer projects K and V from features: a `KVProjection`, or a `FunctionProjection`.

    It treats frames independently of each other, because it is called for chunks of frames, and gives the same result
    when backward calls it again.
    """

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Everything that the projection uses, so that the parameters receive gradients."""

    def __call__(self, features: Tensor, index: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, f * tokens, D) of features (f, tokens, width) and index (f, ...), frame by frame."""


@dataclass(frozen=True)
class FunctionProjection:
    """A `Projection` by any function, which autograd differentiates.

    Attributes:
        function: (features (f, tokens, width), index (f, ...)) -> k, v (1, G, f * tokens, D). It treats frames
            independently of each other, and gives the same result when called again.
        modules: the modules that it uses, so that their parameters receive gradients.
    """

    function: ProjectFunction
    modules: Sequence[nn.Module]

    def __call__(self, features: Tensor, index: Tensor, /) -> tuple[Tensor, Tensor]:
        return self.function(features, index)


@dataclass(eq=False)
class RecomputedKeys(WholeKeys):
    """Keys that are projected from the shared features, in forward and again in backward.

    Attributes:
        spec: how the group attends to these keys.
        visual: the shared features of this rank.
        project: how k and v are projected.
        dtype: dtype of k and v, that of the queries.
        modules: those of the projection.
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
        self._seed = int(torch.randint(2**62, ())) if self._uses_random_numbers() else None

    def inputs(self) -> Sequence[Tensor]:
        """Return the features and the parameters that require gradients."""
        return self.visual.features, *trained_parameters(self.modules)

    def for_backward(self, inputs: Sequence[Tensor]) -> tuple[RecomputedKeys, Sequence[Tensor]]:
        """Return these keys without the features, and the features.

        Only saved tensors hold the features while the graph is alive. Parameters belong to their modules, and FSDP
        gathers them again in backward, which checks that they are the same.
        """
        keys = self.of_chunk(self.visual.without_features, 0)
        keys._parameters = ParameterCheck(self.modules)
        return keys, inputs[:1]

    def of_chunk(self, visual: VisualFeatures, number: int) -> RecomputedKeys:
        """Return the keys of a chunk of the frames: with the same projection and autocast mode, and its own seed."""
        chunk = copy.copy(self)
        chunk.visual, chunk._seed = visual, None if self._seed is None else self._seed + number
        return chunk

    def keys_values(self, inputs: Sequence[Tensor], raw_keys: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return k and v of all frames of this rank, projected chunk by chunk without grad mode.

        K before its norm, (f, tokens, G, D), is appended to `raw_keys` for each chunk.
        """
        project: ProjectFunction = self.project
        if raw_keys is not None:
            assert isinstance(project, KVProjection)
            project = functools.partial(project, raw_keys=raw_keys)
        with torch.no_grad(), self._forward_mode():
            return project_chunks(project, inputs[0], self.visual.index, self.dtype)

    def vjp(self, saved: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, Tensor, InputGrads]:
        """Return k and v, and the function of their gradients, which computes one chunk of frames at a time.

        `KVProjection` computes gradients without projecting K and V again, if it can; autograd does it otherwise.
        """
        if self._parameters is not None:
            self._parameters.require_unchanged("recompute_visual=False and without visual_offload")
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
        chunks, tokens = frame_chunks(features), features.shape[1]
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


@dataclass(frozen=True)
class KVProjection:
    """A `Projection` that is made of linear layers, and optionally of norms and a rotation.

    The modules are called, so that their hooks, adapters and quantised weights take part.

    Attributes:
        linears: the linear layers of K and of V, or one for both.
        head_dim: D.
        interleaved: whether the output channels of one linear layer for both are (KV head, {K, V}, D). They are
            ({K, V}, KV head, D) otherwise.
        input_norm: applied to the features before the linear layers.
        key_norm: applied to each head of K after its linear layer.
        rotate: (k (f, tokens, G, D), index (f, ...), transposed) -> k of the same shape and dtype, last of all. It is
            linear in k, and returns its transpose (the inverse of a rotation) if `transposed` is true.
    """

    linears: tuple[nn.Module, ...]
    head_dim: int
    interleaved: bool = False
    input_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    rotate: Callable[[Tensor, Tensor, bool], Tensor] | None = None

    @functools.cached_property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose parameters the projection uses."""
        before = () if self.input_norm is None else (self.input_norm,)
        return [*before, *self.linears] if self.key_norm is None else [*before, *self.linears, self.key_norm]

    def __call__(self, features: Tensor, index: Tensor, raw_keys: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, f * tokens, D) of features (f, tokens, width), frame by frame.

        Args:
            features: the features of f frames.
            index: (f, ...), what `rotate` takes of each frame.
            raw_keys: the output of the linear layer of K, (f, tokens, G, D), is appended to it.
        """
        x = self._as_input(features)
        x = x if self.input_norm is None else self.input_norm(x)
        k, v = self._split([linear(x) for linear in self.linears])
        if raw_keys is not None:
            raw_keys.append(k.contiguous())  # not a view that keeps V alive
        if self.key_norm is not None:
            k = self.key_norm(k)
        if self.rotate is not None:
            k = self.rotate(k, index, False)
        v = v.flatten(0, 1).transpose(0, 1)[None]
        if len(self.linears) == 1 and (self.key_norm is not None or self.rotate is not None):
            v = v.contiguous()  # a view would keep the unmodified K, which shares its storage, alive
        return k.flatten(0, 1).transpose(0, 1)[None], v

    def has_direct_grads(self, trained: Sequence[Tensor]) -> bool:
        """Return whether `direct_grads` computes the gradients of the parameters `trained`: whether every linear layer
        is exactly torch's with ordinary weights, and every parameter belongs to the modules; none has hooks."""
        known = {id(parameter) for parameter in trained_parameters(self.modules)}
        plain = all(_is_plain_linear(linear) for linear in self.linears) and not _has_foreign_global_hook()
        return plain and not _have_hooks(trained) and all(id(parameter) in known for parameter in trained)

    def direct_grads(
        self,
        features: Tensor,
        index: Tensor,
        dk: Tensor,
        dv: Tensor,
        needs_features: bool,
        trained: Sequence[Tensor],
        raw_keys: Tensor | None = None,
    ) -> Grads:
        """Return the gradients of features (f, tokens, width) and of the parameters `trained`, without repeating the
        matrix multiplications of the forward pass.

        Args:
            features: the features of f frames.
            index: (f, ...).
            dk: (1, G, f * tokens, D), the gradient of k, in any dtype.
            dv: the same for v.
            needs_features: whether the gradient of the features is returned.
            trained: the parameters whose gradients are returned.
            raw_keys: (f, tokens, G, D), what the projection of this chunk stored, if there is a `key_norm`.

        Returns:
            The gradients, that of the features in their dtype.
        """
        of_input, of_key = (_parameters_in(norm, trained) for norm in (self.input_norm, self.key_norm))
        grads: dict[int, Tensor] = {}
        needs_x = needs_features or bool(of_input)
        y = self._as_input(features.detach()).requires_grad_(needs_features)
        with torch.enable_grad():
            x = y if self.input_norm is None else self.input_norm(_inner(y))
        dk, dv = (g[0].transpose(0, 1).unflatten(0, features.shape[:2]) for g in (dk, dv))  # (f, tokens, G, D)
        if self.rotate is not None:
            dk = self.rotate(dk, index, True)
        if self.key_norm is not None:
            assert raw_keys is not None
            raw = raw_keys.detach().requires_grad_()
            with torch.enable_grad():
                k = self.key_norm(_inner(raw))
            dk, *found = torch.autograd.grad(k, [raw, *of_key], dk.to(k.dtype).contiguous(), allow_unused=True)
            _add(grads, of_key, found)
        dx = self._linear_grads(x.detach().flatten(0, 1), self._join(dk, dv), needs_x, trained, grads)
        d_features = None
        if dx is not None:
            dx = dx.view_as(x)
            if self.input_norm is None:
                d_features = dx.to(features.dtype)
            else:
                targets = ([y] if needs_features else []) + of_input
                found = list(torch.autograd.grad(x, targets, dx.to(x.dtype), allow_unused=True))
                d_features = found.pop(0) if needs_features else None
                d_features = None if d_features is None else d_features.to(features.dtype)
                _add(grads, of_input, found)
        return d_features, [grads.get(id(parameter)) for parameter in trained]

    def _linear_grads(
        self, x: Tensor, outputs: list[Tensor], needs_x: bool, trained: Sequence[Tensor], grads: dict[int, Tensor]
    ) -> Tensor | None:
        """Add the gradients of weights and biases to `grads`, and return that of x (rows, width) if it is needed.

        `outputs` has the gradient (rows, channels) of each linear layer's output. Products are computed in the dtype of
        the forward pass: autocast casts the operands of `mm` and `addmm` as it does those of `linear`.
        """
        ids = {id(parameter) for parameter in trained}
        dx: Tensor | None = None
        for linear, g in zip(self.linears, outputs, strict=True):
            weight, bias = linear.weight, linear.bias
            assert isinstance(weight, Tensor)
            if id(weight) in ids:
                _add(grads, [weight], [torch.mm(g.t(), x)])
            if isinstance(bias, Tensor) and id(bias) in ids:
                _add(grads, [bias], [g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32))])
            if needs_x:
                dx = torch.mm(g, weight) if dx is None else torch.addmm(dx, g, weight)
        return dx

    def _as_input(self, features: Tensor) -> Tensor:
        """Return the features in the dtype of the linear layers' weights, unless autocast or the layers cast them.

        FSDP2's mixed precision gathers the weights of a decoder layer in another dtype than that of the features. It
        casts the arguments of the layer too, but not the features, which are in the state of the pass.
        """
        weight = getattr(self.linears[0], "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:  # quantised
            return features
        return features if torch.is_autocast_enabled(features.device.type) else features.to(weight.dtype)

    def _split(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v (f, tokens, G, D) from the outputs (f, tokens, channels) of the linear layers."""
        if len(outputs) == 1 and self.interleaved:
            k, v = outputs[0].unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        else:
            k, v = (
                x.unflatten(-1, (-1, self.head_dim))
                for x in (outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs)
            )
        return k, v

    def _join(self, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """Return the gradients (rows, channels) of the linear layers' outputs, given those of the results of `_split`.

        They are in the dtype of the outputs.
        """
        gradients = [g.flatten(0, 1) for g in (dk, dv)]
        dtypes = [_output_dtype(linear) for linear in self.linears]
        if len(dtypes) == 1:
            both = [g.to(dtypes[0]) for g in gradients]
            return [torch.stack(both, dim=-2 if self.interleaved else -3).flatten(1)]
        contiguous = torch.contiguous_format
        return [g.to(x, memory_format=contiguous).flatten(1) for g, x in zip(gradients, dtypes, strict=True)]


def autograd_grads(
    project: Projection,
    features: Tensor,
    index: Tensor,
    dk: Tensor,
    dv: Tensor,
    needs_features: bool,
    trained: Sequence[Tensor],
    dtype: torch.dtype,
) -> Grads:
    """Return the gradients of features (f, tokens, width) and of the parameters `trained`, by differentiating
    `project`, the result of which is cast to `dtype`.

    The other arguments are those of `KVProjection.direct_grads`. Hooks that users registered on a parameter run when
    autograd gets the result, and not here.
    """
    detached = detached_parameters(project.modules) if _have_hooks(trained) else nullcontext(dict[int, Tensor]())
    with torch.enable_grad(), detached as replaced:
        part = features.detach().requires_grad_(needs_features)
        k, v = (x.to(dtype) for x in project(_inner(part), index))
    outputs = [(x, g.to(x.dtype)) for x, g in ((k, dk), (v, dv)) if x.requires_grad]
    if not outputs:
        return None, [None] * len(trained)
    targets = [*([part] if needs_features else []), *(replaced.get(id(p), p) for p in trained)]
    found = torch.autograd.grad([x for x, _ in outputs], targets, [g for _, g in outputs], allow_unused=True)
    grads: list[Tensor | None] = list(found)
    return grads.pop(0) if needs_features else None, grads


class GradientSums:
    """Sums over chunks of the gradients of parameters, in float32 or wider; None for one that has no gradient.

    A parameter that nothing computes with has no gradient, as in the unpatched model. Zeros would hide that a gradient
    went elsewhere.
    """

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            total = self.totals[index]
            if grad is None:
                continue
            if total is None:
                self.totals[index] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total += grad


def _inner(leaf: Tensor) -> Tensor:
    """Return the tensor as the result of an operation: the hooks of torch's FLOP counter do not accept leaf tensors."""
    return leaf.view_as(leaf)


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a call of the module is `torch.nn.functional.linear` with ordinary tensors, and nothing else.

    Adapters, quantised layers and parametrizations are other classes; sharded and quantised weights are tensors of
    other classes. FSDP gathers a sharded weight before backward reads it here.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    tensors = (module.weight, module.bias)
    return not any(hooks) and all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors)


def _output_dtype(linear: nn.Module) -> torch.dtype:
    """Return the dtype of the output of a linear layer, under autocast or without."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    device = weight.device.type
    casts = torch.is_autocast_enabled(device) and weight.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if casts else weight.dtype


def _has_foreign_global_hook() -> bool:
    """Return whether every module calls a hook of another library. Those of torch (its FLOP counter) only observe."""
    owners = (type(getattr(hook, "__self__", None)) for hook in global_module_hooks())
    return any(not owner.__module__.startswith("torch.") for owner in owners)


def _have_hooks(parameters: Sequence[Tensor]) -> bool:
    return any(parameter._backward_hooks for parameter in parameters)


def _parameters_in(module: nn.Module | None, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return those of `trained` that are parameters of the module."""
    own = set() if module is None else {id(parameter) for parameter in trained_parameters([module])}
    return [parameter for parameter in trained if id(parameter) in own]


def _add(grads: dict[int, Tensor], parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add gradients to those of the same parameters: modules may share one."""
    for parameter, grad in zip(parameters, found, strict=True):
        if grad is not None:
            known = grads.get(id(parameter))
            grads[id(parameter)] = grad if known is None else known + grad
