"""K and V of frames in host memory, for decoding with `visual_offload="cpu"`.

Each layer projects the prompt's frames once, chunk by chunk, and stores K and V in host memory as (keys, G, D), so that
a chunk of frames is contiguous. Every pass of a layer brings all chunks to the device once: decoding a token reads
2 G D elements per key and layer from host memory. The device holds two chunks for any number of frames.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mllm_seqpar.attention.block_math import BlockMath, PartialResult, fold, prepare, unfold
from mllm_seqpar.attention.call_spec import CallSpec, accumulation
from mllm_seqpar.attention.streamed import StreamedKV
from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.rectangles import Span
from mllm_seqpar.sharding import frame_range

from .fsdp_units import call_within, units_among
from .host_copies import HostCopies
from .kv_projection import Projection
from .offload import HostFeatures
from .visual_features import VisualKVCache, frame_chunks, project_chunks


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

    def source(self, spec: CallSpec, k: Tensor, v: Tensor) -> StreamedKV:
        return StoredKV(spec, self._open(k, v))

    def partial(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: Communicator,
        mask: FrameMask,
        units_per_frame: int,
        scale: float,
        kernel: str,
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) over this rank's keys as partial results; the arguments are those of `decode_attention`."""
        rows, folded = fold(q), mask.folded()
        first = frame_range(mask.total_frames // units_per_frame, group).start * units_per_frame
        partial, block_math = PartialResult(rows, accumulation(torch.float32, q.dtype)), BlockMath(kernel, scale)
        for (start, stop), k_part, v_part in self._open(k, v):
            rectangles = prepare(folded.rectangles(first + start, first + stop), rows, k_part, kernel)
            block_math.forward(rows, k_part, v_part, rectangles, partial)
        o, lse = (unfold(x, q.shape[0]).contiguous() for x in partial.value)
        return o, lse

    def _open(self, k: Tensor, v: Tensor) -> _StoredPass:
        return _StoredPass((k, v), self._chunks, self.tokens_per_unit, self._copies)


@dataclass(frozen=True)
class _StoredPass:
    """Passes over K and V in host memory; see `attention.streamed.ChunkPass`."""

    keys_values: tuple[Tensor, Tensor]
    chunks: Sequence[slice]
    tokens: int
    copies: HostCopies

    def __iter__(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        keys = [slice(chunk.start * self.tokens, chunk.stop * self.tokens) for chunk in self.chunks]
        stored = zip("kv", self.keys_values, strict=True)
        parts = [self.copies.to_device(name, x[0].transpose(0, 1), keys) for name, x in stored]
        for chunk in self.chunks:
            k, v = (next(part).transpose(0, 1)[None] for part in parts)
            yield (chunk.start, chunk.stop), k, v
        for part in parts:
            assert next(part, None) is None  # which marks the last buffer as free

    def add_gradients(self, dk: Tensor, dv: Tensor) -> None:
        raise NotImplementedError("K and V of a cache in host memory have no gradients")

    def input_grads(self) -> Sequence[Tensor | None]:
        return ()


@dataclass(frozen=True)
class StoredKV(StreamedKV):
    """K and V in host memory as a KV source, for the sharded prompt of a pass with a cache."""

    spec: CallSpec
    chunks: _StoredPass

    @property
    def k(self) -> Tensor:
        """(1, G, keys of this rank, D), in host memory."""
        return self.chunks.keys_values[0]

    def inputs(self) -> Sequence[Tensor]:
        return ()

    def saved(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return ()

    def restored(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        return ()

    def open(self, inputs: Sequence[Tensor], needed: Sequence[bool] | None = None) -> _StoredPass:
        return self.chunks
