"""The one shared copy of the visual features, and keys and values that are projected from it when they are needed.

All cross-attention layers read the same features y. A layer's K and V are a function of y and of the layer's own
submodules (norms, projections, LoRA adapters, quantised weights: whatever is there). They are computed for the forward
pass, dropped, and computed again for the backward pass, so that a layer keeps nothing that grows with the number of
visual tokens (arXiv 2502.02406, section 3.2).

The backward pass re-projects in chunks of frames: the intermediate results of a projection (a normalised copy of y in
float32, say) are as large as y or larger, and only one chunk of them is ever alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.attention.distributed import CallSpec
from mllm_seqpar.attention.kv_sources import AutocastState
from mllm_seqpar.errors import ShapeError

CHUNK_BYTES = 64 << 20
"""Features projected at once: what bounds the intermediate results of a projection."""

_SAMPLED = 4096

Projection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class VisualFeatures:
    """This rank's visual features, one copy for all layers.

    Attributes:
        features: (frames, tokens, width), the frames of this rank; zero frames are fine.
        index: (frames,) int64, a number per frame that projections may need (its rotary position, say).
        total_frames: frames of all ranks together.
    """

    features: Tensor
    index: Tensor
    total_frames: int

    def __post_init__(self) -> None:
        if self.features.dim() != 3 or self.index.shape != self.features.shape[:1]:
            raise ShapeError(
                f"VisualFeatures: features are {tuple(self.features.shape)} and index is {tuple(self.index.shape)}; "
                "expected (frames, tokens, width) and (frames,)"
            )


def frame_chunks(features: Tensor) -> list[slice]:
    """The frames of features (frames, tokens, width) in chunks of at most `CHUNK_BYTES`; at least one, maybe empty."""
    frames = features.shape[0]
    step = max(1, CHUNK_BYTES // max(1, features.shape[1] * features.shape[2] * features.element_size()))
    return [slice(start, min(start + step, frames)) for start in range(0, frames, step)] or [slice(0, 0)]


def sampled_bits(frames: Tensor) -> Tensor:
    """Return the bits of some values of every part of the frames, evenly spread: enough to tell two videos apart."""
    x, step = frames.detach(), max(1, frames.numel() // _SAMPLED)
    if x.is_contiguous():
        return x.view(-1)[::step].float().view(torch.int32)
    # one by one: to flatten them, channels last for example, would copy the whole video
    places = torch.arange(0, x.numel(), step, device=x.device)
    return x[torch.unravel_index(places, x.shape)].float().view(torch.int32)


def checksum(*tensors: Tensor | None) -> Tensor:
    """Return a number that changes when an entry does, or when two change places."""
    given = [x.detach().reshape(-1).long() for x in tensors if x is not None]
    if not given:
        return torch.zeros((), dtype=torch.long)
    x = torch.cat(given)
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 2654435761 % 2147483647
    return ((x + 1) * weights).sum()


def fingerprint_of(frames: Tensor) -> tuple[int, ...]:
    """Return shape and checksum of a sample: whether frames passed now are those passed before."""
    return (*frames.shape, int(checksum(sampled_bits(frames))))


def project_all(project: Projection, features: Tensor, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v (1, G, frames * tokens, D) of all frames, contiguous, chunk by chunk; differentiable in grad mode.

    Without it only one chunk of a projection's intermediate results is ever alive, and k and v exist once.
    """
    chunks, tokens = frame_chunks(features), features.shape[1]
    whole: tuple[Tensor, ...] = ()
    for chunk in chunks:
        parts = [x.to(dtype) for x in project(features[chunk], index[chunk])]
        if len(chunks) == 1:
            k, v = (x.contiguous() for x in parts)
            return k, v
        if not whole:
            keys = features.shape[0] * tokens
            whole = tuple(x.new_empty((*x.shape[:2], keys, x.shape[3])) for x in parts)
        for target, part in zip(whole, parts, strict=True):
            target[:, :, chunk.start * tokens : chunk.stop * tokens] = part
    k, v = whole
    return k, v


class VisualKVCache:
    """K and V of one prompt's frames for decoding: each layer projects this rank's once, and they stay here.

    Copies of a cache share it (`__deepcopy__`): after the first pass it never changes.

    Attributes:
        total_frames: frames of all ranks together; 0 where an empty one only keeps the ranks in step.
        units: what masks speak of, of all ranks together (frames, or tiles of them).
        tokens_per_unit: keys of one.
    """

    def __init__(self, visual: VisualFeatures, total_frames: int) -> None:
        self.total_frames = total_frames
        self.units, self.tokens_per_unit = visual.total_frames, visual.features.shape[1]
        self.states: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._visual: VisualFeatures | None = visual

    @classmethod
    def given(cls, states: dict[Hashable, tuple[Tensor, Tensor]], frames: int, tokens: int) -> VisualKVCache:
        """Return K and V that exist already, of `frames` frames of `tokens` keys, of which this rank has all."""
        some = next(iter(states.values()))[0]
        empty = VisualFeatures(some.new_empty(0, tokens, 0), torch.zeros(0, dtype=torch.long), frames)
        kept = cls(empty, frames)
        kept.states = dict(states)
        kept.close()
        return kept

    def keys_values(self, layer: Hashable, project: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k and v (1, G, keys of this rank, D) of a layer, projected on its first call; differentiable in grad mode."""
        if layer not in self.states:
            assert self._visual is not None, f"layer {layer} has not seen the prompt's first pass"
            self.states[layer] = project_all(project, self._visual.features, self._visual.index, dtype)
        return self.states[layer]

    def close(self) -> None:
        """After the first pass: every layer has its K and V, and the features can go."""
        self._visual = None

    def __deepcopy__(self, memo: dict[int, Any]) -> VisualKVCache:
        return self


@dataclass(frozen=True)
class RecomputedKV:
    """A key source projected from shared features, in forward and again in backward.

    Attributes:
        plan: how the group attends to these keys.
        visual: the shared features of this rank.
        project: (features (f, tokens, width), index (f,)) -> k, v of shape (1, G, f * tokens, D), frame-major. It must
            treat frames independently of each other, and do the same when called again.
        modules: the modules whose parameters `project` uses.
        dtype: dtype of k and v, that of the queries.
    """

    plan: CallSpec
    visual: VisualFeatures
    project: Projection
    modules: Sequence[nn.Module]
    dtype: torch.dtype
    _autocast: AutocastState = field(init=False)
    _seed: int | None = field(init=False)

    def __post_init__(self) -> None:
        device = self.visual.features.device
        object.__setattr__(self, "_autocast", AutocastState.current(device.type))
        object.__setattr__(self, "_seed", _draw_seed() if self._draws_random_numbers() else None)

    def inputs(self) -> Sequence[Tensor]:
        """The features and the parameters that are trained."""
        return self.visual.features, *self._parameters()

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Only the features, by reference: parameters belong to their modules, which FSDP gathers again in backward."""
        return inputs[:1]

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The features and the parameters as they are now."""
        return saved[0], *self._parameters()

    def without_inputs(self) -> RecomputedKV:
        """Itself: the features are the one copy that all layers share."""
        return self

    def keys_values(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """k and v of all frames of this rank, projected chunk by chunk without grad mode."""
        with torch.no_grad(), self._as_in_forward():
            return project_all(self.project, inputs[0], self.visual.index, self.dtype)

    def input_grads(
        self, inputs: Sequence[Tensor], needed: Sequence[bool], dk: Tensor, dv: Tensor
    ) -> Sequence[Tensor | None]:
        """The chain rule through `project`, a chunk of frames at a time."""
        features, *parameters = inputs
        tokens = features.shape[1]
        d_features = torch.zeros_like(features) if needed[0] else None
        wanted = [p for p, n in zip(parameters, needed[1:], strict=True) if n]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        if not any(needed):
            return [None] * len(inputs)
        with torch.enable_grad(), self._as_in_forward():
            for chunk in frame_chunks(features):
                part = features[chunk].detach().requires_grad_(needed[0])
                k, v = (x.to(self.dtype) for x in self.project(part, self.visual.index[chunk]))
                keys = slice(chunk.start * tokens, chunk.start * tokens + k.shape[2])
                outputs = [(x, g[:, :, keys].to(x.dtype)) for x, g in ((k, dk), (v, dv)) if x.requires_grad]
                if not outputs:
                    continue
                targets = ([part] if needed[0] else []) + wanted
                found = list(
                    torch.autograd.grad([x for x, _ in outputs], targets, [g for _, g in outputs], allow_unused=True)
                )
                if d_features is not None:
                    d_part = found.pop(0)
                    if d_part is not None:
                        d_features[chunk] = d_part
                for total, grad in zip(sums, found, strict=True):
                    if grad is not None:
                        total += grad
        done = iter(total.to(p.dtype) for p, total in zip(wanted, sums, strict=True))
        return [d_features, *(next(done) if need else None for need in needed[1:])]

    def _parameters(self) -> list[Tensor]:
        seen: dict[int, Tensor] = {}
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    seen.setdefault(id(parameter), parameter)
        return list(seen.values())

    def _draws_random_numbers(self) -> bool:
        dropouts = (
            m for module in self.modules for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)
        )
        return any(m.training and m.p > 0 for m in dropouts)

    def _as_in_forward(self) -> _AsInForward:
        return _AsInForward(self._autocast, self._seed, self.visual.features.device)


class _AsInForward:
    """Autocast as it was in the forward pass, and, where something draws random numbers, the same ones."""

    def __init__(self, autocast: AutocastState, seed: int | None, device: torch.device) -> None:
        self._autocast, self._seed, self._device = autocast.again(), seed, device
        devices = [device] if device.type == "cuda" else []
        self._fork = torch.random.fork_rng(devices) if seed is not None else nullcontext()

    def __enter__(self) -> None:
        self._autocast.__enter__()
        self._fork.__enter__()
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    torch.cuda.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._fork.__exit__(*error)  # type: ignore[arg-type]
        self._autocast.__exit__(*error)


def _draw_seed() -> int:
    """A seed of this call's own to replay from, drawn from the CPU's generator, which checkpointing replays too."""
    return int(torch.randint(2**62, ()))
