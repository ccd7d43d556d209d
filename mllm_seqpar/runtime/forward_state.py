"""The state of one forward pass, which all layers of a patched model share; it reaches them as a keyword argument.

There are three kinds of passes. In a sharded pass each rank has its shard of text and frames: training, and any pass
without a cache. In a replicated pass each rank has all text and its own frames: generation with a cache. A long prompt
is prefilled in a sharded pass with a cache: the K and V of text and frames stay on their ranks, and the later,
replicated passes attend to them there.

The state is neither a dataclass nor another container that FSDP, checkpointing or device placement traverse: they would
cast its tensors in every layer, and lead the gradients of the features through all of them. It is not stored on a
module, so that recomputation in backward uses the state of its own forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mllm_seqpar.attention.call_spec import CallSpec, accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.decode import PreparedAttention, merge_over_ranks, prepare_frames
from mllm_seqpar.attention.joint import KeySource, attend
from mllm_seqpar.attention.kv_sources import GivenKV, as_attended
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels.merge import merge
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks, FrameMask

from .attention_record import RowRecorder
from .context import SeqParContext
from .frame_state import FrameState
from .fsdp_units import call_within, units_among
from .kv_projection import Projection
from .offload_cache import HostKVCache
from .strategy_selector import CROSS, CROSS_MESH, SELF, SELF_MESH, CandidateStrategies, SelectedStrategy, selected_spec
from .text_kv_cache import CachedTextMask
from .text_shards import TextShards
from .visual_features import VisualKVCache, project_all, project_whole

MAX_TEXT_MASK = 1 << 24
"""On one process, torch's own attention takes a mask (B, L, L) of at most this many entries for padded text."""


class ForwardState:
    """The state that all layers of one forward pass share.

    Attributes:
        context: group and configuration.
        text: the sharding of the text; None in a replicated pass.
        frames: the frames of a sharded pass; None without any.
        frame_mask: the mask of all text rows, in a replicated pass with frames.
        units_per_frame: how many units of `frame_mask` make a frame.
        rows: further facts about the rows of this pass, (B, s) each, by name.
        visual_cache: K and V of the frames, in a pass with a cache.
        cached_text: the mask over K and V of the text, in a pass with a cache whose text is sharded.
        tokens: the number of text tokens so far, this pass included, in a pass with a cache; a static cache is longer.
        recorder: stores a row of each cross-attention layer, in a pass whose attention to frames is recorded.
    """

    def __init__(
        self,
        context: SeqParContext,
        *,
        text: TextShards | None = None,
        frames: FrameState | None = None,
        frame_mask: FrameMask | None = None,
        units_per_frame: int = 1,
        rows: Mapping[str, Tensor] | None = None,
        visual_cache: VisualKVCache | None = None,
        cached_text: CachedTextMask | None = None,
        tokens: int | None = None,
        recorder: RowRecorder | None = None,
    ) -> None:
        self.context, self.text, self.frames, self.tokens, self.recorder = context, text, frames, tokens, recorder
        self.frame_mask, self.units_per_frame, self.cached_text = frame_mask, units_per_frame, cached_text
        self.rows, self.visual_cache = rows or {}, visual_cache
        self._specs: dict[Hashable, CallSpec] = {}
        self._prepared: dict[Hashable, PreparedAttention] = {}  # by the shapes that they are for

    @cached_property
    def text_on_one_process(self) -> Literal["", "plain", "masked"]:
        """How torch's own attention computes the text, as in the unpatched model; empty if it does not.

        "plain": without a mask, causal. "masked": with the decoder's `attention_mask`. Several ranks, a block kernel
        selected by name and masks that would be large need the block kernels.
        """
        text, config = self.text, self.context.config
        if text is None or self.context.comm.size > 1 or not self.shards_text or config.kernel != "auto":
            return ""
        if text.is_plain:
            return "plain"
        return "masked" if text.batch * text.length**2 <= MAX_TEXT_MASK else ""

    @property
    def _offloads(self) -> bool:
        """Whether the features, and K and V of a cache, are in host memory."""
        return self.context.config.visual_offload is not None

    @property
    def shards_text(self) -> bool:
        """Whether hidden states hold this rank's tokens only."""
        return self.text is not None and self.context.config.self_attention != "local"

    def attend(self, q: Tensor, sources: Sequence[KeySource], scale: float) -> Tensor:
        """q (B, H, s, D) -> o (B, H, s, D): one softmax over the keys of all sources on all ranks."""
        comm, config = self.context.comm, self.context.config
        options: dict[str, Any] = {"kernel": config.kernel, "recompute": config.recompute_attention}
        compute = functools.partial(attend, sources=sources, comm=comm, scale=scale, **options)
        o, lse = call_within(units_among(module for source in sources for module in source.modules), compute, q)
        if self.recorder is not None:
            self.recorder.add_sources(q, sources, lse, scale)
        return o

    def text_keys(self, k: Tensor, v: Tensor, window: int | None = None, heads: int | None = None) -> GivenKV:
        """Return this rank's text keys as a causal source, for the configured self-attention.

        Args:
            k, v: (B, G, s, D).
            window: the number of keys that a token attends to at most, itself included; None: all before it.
            heads: query heads, None: G; used to select a strategy or mesh shape.
        """
        key = "text", k.shape, k.dtype, window, heads, torch.is_grad_enabled()
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self._text_spec(k, window, heads or k.shape[1])
        return GivenKV(spec, k, v)

    def visual_keys(self, q: Tensor, layer: Hashable, project: Projection, modules: Sequence[nn.Module]) -> KeySource:
        """Return the visual keys of a layer as a source, for the configured strategy.

        The arguments are those of `cross_attend`, with q in the dtype that attention computes in.
        """
        assert self.frames is not None
        visual, k, v = self.frames.visual, None, None
        if self.visual_cache is not None:
            k, v = self.visual_cache.keys_values(layer, project, modules, q.dtype)
        elif not self.context.config.recompute_visual:
            k, v = project_whole(project, modules, visual.features, visual.index, q.dtype)
        spec = self._visual_spec(q, k, project, modules)
        if k is None or v is None:
            return visual.source(spec, project, modules, q.dtype)
        return GivenKV(spec, k, v) if self.visual_cache is None else self.visual_cache.source(spec, k, v)

    def cross_attend(
        self, q: Tensor, layer: Hashable, project: Projection, modules: Sequence[nn.Module], scale: float
    ) -> Tensor:
        """Return the cross-attention of one layer, in every kind of pass.

        Args:
            q: (B, H, s, D), the rows of this pass on this rank.
            layer: identifies the layer in the visual KV cache.
            project: (features (f, tokens, width), index (f, ...)) -> k, v (1, G, f * tokens, D), frame by frame.
            modules: the modules that `project` uses.
            scale: factor of q k^T.

        Returns:
            o (B, H, s, D) in the dtype of q; 0 in rows that attend to no frame.
        """
        given = q.dtype
        (q,) = as_attended(q)
        if self.text is None:
            assert self.visual_cache is not None
            k, v = self.visual_cache.keys_values(layer, project, modules, q.dtype)
            return self.attend_cached_frames(q, k, v, scale).to(given)
        recomputes = torch.is_grad_enabled() and self.context.config.recompute_visual
        if self.context.comm.size == 1 and not recomputes and not self._offloads:
            return self._attend_on_one_process(q, project, modules, scale).to(given)
        if self.shards_text:
            return self.attend(q, [self.visual_keys(q, layer, project, modules)], scale).to(given)
        # With self_attention="local" the text is replicated, and sharded for this attention only.
        q = self.text.shard(q, 2)
        o = self.attend(q, [self.visual_keys(q, layer, project, modules)], scale)
        return self.text.unshard(o, 2).to(given)

    def _attend_on_one_process(
        self, q: Tensor, project: Projection, modules: Sequence[nn.Module], scale: float
    ) -> Tensor:
        """Return the cross-attention of a layer whose K and V are not computed again in backward."""
        frames = self.frames
        assert frames is not None and isinstance(frames.masks, FrameBlockMasks)
        # In grad mode K and V stay, so nothing is saved by projecting in chunks, or by copies.
        projected = project_whole if torch.is_grad_enabled() else project_all
        k, v = projected(project, modules, frames.visual.features, frames.visual.index, q.dtype)
        prepared = self._prepare(q, k, frames.masks.masks[0])
        if torch.is_grad_enabled() and not prepared.differentiable:
            return self.attend(q, [GivenKV(self._visual_spec(q, k, project, modules), k, v)], scale)
        return prepared.output(q, k, v, scale)

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q (B, H, L, D), the same on every rank, over the ranks' visual keys; likewise."""
        if self.requires_backward(q, k, v):
            sources = [self.cached_visual_source(q, k, v)]
            return attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
        o, lse = merge_over_ranks(*self._cached_frames_partial(q, k, v, scale), self.context.comm)
        return o.to(q.dtype), lse

    def attend_cached_frames(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return o of `attend_replicated` alone, for which one process needs no log-sum-exp."""
        if self._offloads or self.context.comm.size > 1 or self.requires_backward(q, k, v):
            o, lse = self.attend_replicated(q, k, v, scale)
        else:
            o, lse = self._prepare(q, k, self.frame_mask).output(q, k, v, scale), None
        if self.recorder is not None:
            self.recorder.add(q, k, lse, scale)
        return o

    def _prepare(self, q: Tensor, k: Tensor, mask: FrameMask | None) -> PreparedAttention:
        comm, kernel, units = self.context.comm, self.context.config.kernel, self.units_per_frame
        known = self._prepared if mask is None else mask.derived
        key = q.shape, k.shape, q.dtype, q.device, comm.identity, kernel, units
        found = known.get(key)
        if found is None:
            found = known[key] = prepare_frames(q, k, mask, comm, kernel, units)
        return found

    def attend_cached_text(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q (B, H, L, D), the same on every rank, over the text K and V of all ranks; likewise."""
        return merge_over_ranks(*self._cached_text_partial(q, k, v, scale, window), self.context.comm)

    def attend_text_and_frames(
        self,
        q: Tensor,
        text: tuple[Tensor, Tensor],
        frames: tuple[Tensor, Tensor],
        scale: float,
        window: int | None = None,
        *,
        jointly: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (o of the text, o of the frames), of K and V that are sharded over ranks, by one exchange.

        Both are o (B, H, L, D) in the accumulator's dtype, the same on every rank; with `jointly`, both are the
        attention with one softmax over all keys.
        """
        on_text = self._cached_text_partial(q, *text, scale, window)
        on_frames = self._cached_frames_partial(q, *frames, scale)
        o, lse = merge(on_text, on_frames) if jointly else map(torch.cat, zip(on_text, on_frames, strict=True))
        o, lse = merge_over_ranks(o, lse, self.context.comm)
        if self.recorder is not None:
            self.recorder.add(q, frames[0], lse if jointly else lse.chunk(2)[1], scale, jointly=jointly)
        if jointly:
            return o, o
        text_o, frames_o = o.chunk(2)
        return text_o, frames_o

    def _cached_frames_partial(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q over the K and V of frames that this rank stores, on the device or in host memory."""
        if not isinstance(self.visual_cache, HostKVCache):
            return self._prepare(q, k, self.frame_mask).partial(q, k, v, scale)
        assert self.frame_mask is not None
        comm, kernel, units = self.context.comm, self.context.config.kernel, self.units_per_frame
        return self.visual_cache.partial(
            q, k, v, group=comm, mask=self.frame_mask, units_per_frame=units, scale=scale, kernel=kernel
        )

    def _cached_text_partial(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q over the text K and V that this rank stores."""
        assert self.cached_text is not None
        key = "text", q.shape, k.shape, q.dtype, window
        found = self._prepared.get(key)
        if found is None:
            rectangles = self.cached_text.rectangles(q.shape[0], window)
            found = self._prepared[key] = PreparedAttention(q, k, rectangles, self.context.config.kernel)
        return found.partial(q, k, v, scale)

    def requires_backward(self, *tensors: Tensor) -> bool:
        """Return whether a pass with a cache is differentiated, which only a single process supports.

        Raises:
            ConfigError: it is, on several ranks.
        """
        required = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if required and self.context.comm.size > 1:
            raise ConfigError(
                "use_cache: a pass with a cache has no backward pass when sequence-parallel; run it under "
                "torch.no_grad(), or pass use_cache=False to train"
            )
        return required

    def cached_visual_source(self, q: Tensor, k: Tensor, v: Tensor) -> GivenKV:
        """Return the K and V of the visual cache as a differentiable source, in a single process."""
        assert self.frame_mask is not None
        return self.local_source(q, k, v, FrameBlockMasks([self.frame_mask], [(0, self.frame_mask.total_frames)]))

    def local_source(self, q: Tensor, k: Tensor, v: Tensor, masks: BlockMasks) -> GivenKV:
        """Return K and V of a single process as a differentiable source, for any strategy."""
        dtype = accumulation(self.context.config.accumulate_dtype, q.dtype)
        return GivenKV(CallSpec((1, 1), masks, (k.shape[2],), dtype), k, v)

    def _text_spec(self, k: Tensor, window: int | None, heads: int) -> CallSpec:
        assert self.text is not None
        name = self.context.config.self_attention
        candidates = {"auto": SELF, "mesh": SELF_MESH}.get(name)
        if name in ("local", "auto"):  # "local": for text that shares a softmax with frames and is sharded only there
            name = "ring"
        masks, lengths = self.text.blocks(window), (self.text.local,) * self.context.comm.size
        return self._spec(name, candidates, masks, lengths, (k.shape[0], heads, *k.shape[2:]), k.shape, k)

    def _visual_spec(self, q: Tensor, k: Tensor | None, project: Projection, modules: Sequence[nn.Module]) -> CallSpec:
        key = "visual", q.shape, q.dtype, torch.is_grad_enabled()
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self._new_visual_spec(q, k, project, modules)
        return spec

    def _new_visual_spec(
        self, q: Tensor, k: Tensor | None, project: Projection, modules: Sequence[nn.Module]
    ) -> CallSpec:
        assert self.frames is not None
        frames, visual, config = self.frames, self.frames.visual, self.context.config
        if frames.replicated:
            dtype = accumulation(config.accumulate_dtype, q.dtype)
            return CallSpec((1, 1), frames.masks, frames.key_lengths, dtype, config.overlap)
        candidates = {"auto": CROSS, "mesh": CROSS_MESH}.get(config.strategy)
        if k is None and candidates is not None:
            with torch.no_grad():  # projecting zero frames gives the number of KV heads
                k = project_all(project, modules, visual.features[:0], visual.index[:0], q.dtype)[0]
        # Decoding leaves K and V where they are, also with "replicate".
        name = "lv-xattn" if config.strategy in ("auto", "replicate") else config.strategy
        k_shape = 1, q.shape[1] if k is None else k.shape[1]
        return self._spec(name, candidates, frames.masks, frames.key_lengths, q.shape, k_shape, q, frames.selection)

    def _spec(
        self,
        strategy: str,
        candidates: CandidateStrategies | None,
        masks: BlockMasks,
        key_lengths: tuple[int, ...],
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        like: Tensor,
        selection: SelectedStrategy | None = None,
    ) -> CallSpec:
        """Return the spec of the selection among `candidates` if there is a selector; else that of `strategy`."""
        config, selector = self.context.config, self.context.selector
        problem = problem_of(q_shape, k_shape, key_lengths, like.dtype, config.accumulate_dtype)
        mesh_shape = config.tile_for(strategy)
        if candidates is not None and selector is not None and problem.ranks > 1:
            selection = selection or selector.select(
                problem, masks, candidates, like, training=torch.is_grad_enabled(), mesh_shape=mesh_shape
            )
            return selected_spec(selector, selection, masks, problem, config, like.dtype, causal=candidates.causal)
        accumulate = accumulation(config.accumulate_dtype, like.dtype)
        return call_spec_for(strategy, mesh_shape, masks, problem, accumulate, config.overlap)
