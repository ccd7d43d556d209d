"""K and V of a prompt's frames, which later passes attend to: on the device, or in host memory (`visual_offload`).

Each layer projects the frames of this rank once. In host memory they are stored chunk by chunk as (keys, G, D), so that
a chunk of frames is contiguous. Every pass of a layer brings all chunks to the device once: decoding a token reads
2 G D elements per key and layer from host memory. The device holds two chunks for any number of frames.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.keys import GivenKeys, Keys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.rectangles import Span

from .frame_state import Frames
from .fsdp_units import call_within, units_among
from .host_copies import HostCopies
from .kv_projection import Projection
from .offload import HostFeatures
from .visual_features import VisualFeatures, frame_chunks, project_all, project_chunks


class VisualKVCache:
    """K and V of a prompt's frames for decoding: each layer projects the frames of this rank once.

    Copies of a transformers cache share it (`__deepcopy__`), because it never changes after the first pass.

    Attributes:
        total_frames: the number of frames on all ranks; 0 for the placeholder of a rank without frames.
        units: the number of mask units on all ranks (frames, or image tiles of frames).
        tokens_per_unit: keys of one unit.
        layout: how the frames map to ranks.
    """

    def __init__(self, visual: VisualFeatures, total_frames: int) -> None:
        self.total_frames = total_frames
        self.units, self.tokens_per_unit = visual.total_frames, visual.features.shape[1]
        self.layout = visual.layout
        self.states: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._visual: VisualFeatures | None = visual
        self._last: tuple[FrameMask, Frames] | None = None

    @classmethod
    def given(cls, states: dict[Hashable, tuple[Tensor, Tensor]], frames: int, tokens: int) -> VisualKVCache:
        """Return a cache of existing K and V, for `frames` frames of `tokens` keys that are all on this rank."""
        some = next(iter(states.values()))[0]
        empty = VisualFeatures(some.new_empty(0, tokens, 0), torch.zeros(0, dtype=torch.long), frames)
        cache = cls(empty, frames)
        cache.states = dict(states)
        cache.close()
        return cache

    def keys_values(
        self, layer: Hashable, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, keys of this rank, D) of a layer; its first call projects them, with gradients."""
        if layer not in self.states:
            assert self._visual is not None, f"layer {layer} has not seen the prompt's first pass"
            self.states[layer] = project_all(project, modules, self._visual.features, self._visual.index, dtype)
        return self.states[layer]

    def frames_of(self, mask: FrameMask, comm: Communicator) -> Frames:
        """Return the frames of a pass whose rows every rank has; those of the last pass if its mask was equal."""
        if self._last is None or not mask.equals(self._last[0]):
            self._last = mask, Frames.of_rows(self, mask, comm, self.units // max(1, self.total_frames))
        return self._last[1]

    @property
    def no_frames(self) -> VisualFeatures:
        """See `VisualFeatures.no_frames`; in the first pass."""
        assert self._visual is not None
        return self._visual.no_frames

    def keys(
        self, layer: Hashable, spec: CallSpec, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> Keys:
        """Return the keys of a layer; its first call projects them."""
        return GivenKeys(spec, *self.keys_values(layer, project, modules, dtype))

    def key_chunks(self, k: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first unit on this rank, k (1, G, keys, D)) of chunks of the k that `keys_values` returned."""
        yield 0, k

    def close(self) -> None:
        """Release the features after the first pass, in which every layer has projected them."""
        self._visual = None

    def __deepcopy__(self, memo: dict[int, Any]) -> VisualKVCache:
        return self


class HostKVCache(VisualKVCache):
    """K and V of a prompt's frames in host memory; for passes without gradients."""

    def __init__(self, visual: HostFeatures, total_frames: int) -> None:
        super().__init__(visual, total_frames)
        self._chunks, self._copies = frame_chunks(visual.features), HostCopies(visual.index.device)

    def keys_values(
        self, layer: Hashable, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, keys of this rank, D) of a layer, views of host memory; its first call projects them.

        Raises:
            ConfigError: in grad mode.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                'visual_offload="cpu": a pass with a cache keeps K and V in host memory and has no backward pass; run '
                "it under torch.no_grad(), or pass use_cache=False"
            )
        if layer not in self.states:
            stored = call_within(units_among(modules), lambda: self._project(project, dtype))
            self.states[layer] = stored[0].transpose(0, 1)[None], stored[1].transpose(0, 1)[None]
        return self.states[layer]

    def _project(self, project: Projection, dtype: torch.dtype) -> list[Tensor]:
        """Return k and v (keys, G, D) in host memory."""
        visual, tokens = self._visual, self.tokens_per_unit
        assert isinstance(visual, HostFeatures), "the first pass of a prompt projects the K and V of every layer"
        stored: list[Tensor] = []
        chunks = self._copies.to_device("features", visual.features, self._chunks)
        for features, chunk in zip(chunks, self._chunks, strict=True):
            for number, x in enumerate(project_chunks(project, features.to(visual.dtype), visual.index[chunk], dtype)):
                if len(stored) <= number:
                    shape = visual.features.shape[0] * tokens, x.shape[1], x.shape[3]
                    stored.append(self._copies.host_empty(shape, dtype))
                target = stored[number][chunk.start * tokens : chunk.stop * tokens]
                self._copies.to_host(x[0].transpose(0, 1).contiguous(), target)
        return stored

    def key_chunks(self, k: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first unit on this rank, k (1, G, keys, D) on the device) of chunks, which are overwritten later."""
        tokens = self.tokens_per_unit
        keys = [slice(chunk.start * tokens, chunk.stop * tokens) for chunk in self._chunks]
        parts = self._copies.to_device("k", k[0].transpose(0, 1), keys)
        for chunk, part in zip(self._chunks, parts, strict=True):
            yield chunk.start, part.transpose(0, 1)[None]

    def keys(
        self, layer: Hashable, spec: CallSpec, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> Keys:
        """Return the keys of a layer, which are copied to the device chunk by chunk; its first call projects them."""
        k, v = self.keys_values(layer, project, modules, dtype)
        return StoredKeys(spec, k, v, self._chunks, self.tokens_per_unit, self._copies)


@dataclass(frozen=True)
class StoredKeys(Keys):
    """Keys in host memory; they are their own chunks (`KeyChunks`).

    Attributes:
        k, v: (1, G, keys of this rank, D), in host memory.
        frames: the chunks, by frames of `tokens` keys.
        copies: the copies to the device.
    """

    streamed, modules = True, ()

    spec: CallSpec
    k: Tensor
    v: Tensor
    frames: Sequence[slice]
    tokens: int
    copies: HostCopies

    def inputs(self) -> Sequence[Tensor]:
        return ()

    def chunks(self, inputs: Sequence[Tensor], needed: Sequence[bool] | None = None) -> StoredKeys:
        return self

    def __iter__(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        keys = [slice(chunk.start * self.tokens, chunk.stop * self.tokens) for chunk in self.frames]
        parts = [self.copies.to_device(name, x[0].transpose(0, 1), keys) for name, x in (("k", self.k), ("v", self.v))]
        for chunk in self.frames:
            k, v = (next(part).transpose(0, 1)[None] for part in parts)
            yield (chunk.start, chunk.stop), k, v
        for part in parts:
            assert next(part, None) is None  # which marks the last buffer as free

    def add_gradients(self, dk: Tensor, dv: Tensor) -> None:
        raise NotImplementedError("K and V of a cache in host memory have no gradients")

    def input_grads(self, *_: Any) -> Sequence[Tensor | None]:
        return ()


def frame_cache(visual: VisualFeatures, total_frames: int) -> VisualKVCache:
    """Return an empty cache for the K and V of these frames, in the memory that the features are in."""
    if isinstance(visual, HostFeatures):
        return HostKVCache(visual, total_frames)
    return VisualKVCache(visual, total_frames)
