"""The state of one forward pass, which all layers of a patched model share; it reaches them as a keyword argument.

There are three kinds of passes. In a sharded pass each rank has its shard of text and frames: training, and any pass
without a cache. In a replicated pass each rank has all text and its own frames: generation with a cache. A long prompt
is prefilled in a sharded pass with a cache: the K and V of text and frames stay on their ranks, and the later,
replicated passes attend to them there.

The state is a plain object rather than a container of tensors, so that FSDP, checkpointing and autocast pass it on
unchanged, and it is not stored on a module, so that recomputation in backward uses the state of its own forward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.block_math import BlockMath, PartialResult
from mllm_seqpar.attention.call_spec import CallSpec, accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.decode import merge_over_ranks
from mllm_seqpar.attention.joint import KeySource, attend
from mllm_seqpar.attention.kv_sources import GivenKV
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks, FrameMask
from mllm_seqpar.sharding import frame_bounds

from .context import SeqParContext
from .strategy_selector import (
    CROSS,
    CROSS_MESH,
    SELF,
    SELF_MESH,
    CandidateStrategies,
    CrossAttentionShape,
    SelectedStrategy,
    selected_spec,
)
from .text_kv_cache import CachedTextMask
from .text_shards import TextShards
from .visual_features import Projection, VisualFeatures, VisualKVCache


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if it is enabled, as autocast does for torch's own attention.

    Under autocast, q and k leave the rotary embedding in float32, while v has the dtype of the projection.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    narrow = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 else x.to(narrow) for x in tensors)


@dataclass(frozen=True)
class FrameState:
    """The frames of one forward pass: this rank's features, and the frame mask of this pass.

    Attributes:
        visual: this rank's features.
        masks: the mask rectangles of every block.
        key_lengths: the number of visual keys on every rank.
        any_frame_visible: (B, s) bool, this rank's rows that attend to any frame, on the device of the features.
        replicated: whether every rank holds the features of all frames.
        selection: the strategy that "auto" selected for the whole pass, if it did.
    """

    visual: VisualFeatures
    masks: BlockMasks
    key_lengths: tuple[int, ...]
    any_frame_visible: Tensor
    replicated: bool = False
    selection: SelectedStrategy | None = None

    @classmethod
    def of(cls, visual: VisualFeatures, mask: FrameMask, text: TextShards, units_per_frame: int = 1) -> FrameState:
        """Return the state for a mask of ALL text rows (B, L) in order; padding rows attend to nothing.

        Args:
            visual: this rank's features.
            mask: the mask over units, `units_per_frame` of which make a frame; a frame is never split over ranks.
            text: the sharding of the rows.
            units_per_frame: the number of image tiles of a picture, for example.
        """
        padded = FrameMask(
            None if mask.bounds is None else (text.pad(mask.bounds[0], 1), text.pad(mask.bounds[1], 1)),
            None if mask.visible is None else text.pad(mask.visible, 1),
            mask.tokens_per_frame,
            mask.total_frames,
        )
        bounds = frame_bounds(mask.total_frames // units_per_frame, text.comm.size)
        units = [(start * units_per_frame, stop * units_per_frame) for start, stop in bounds]
        by_rank = [padded.take(text.positions(rank)) for rank in range(text.comm.size)]
        key_lengths = tuple((stop - start) * mask.tokens_per_frame for start, stop in units)
        visible = copy_to_device(by_rank[text.comm.rank].any_frame_visible(), visual.index.device)
        return cls(visual, FrameBlockMasks(by_rank, units), key_lengths, visible)

    def gathered(self, comm: Communicator, index: Tensor) -> FrameState:
        """Return the state with all ranks' features on every rank ("replicate").

        The features are gathered once for all layers; backward sums the ranks' gradients of each frame, also once.

        Args:
            comm: the group.
            index: (units,), the index of all units.
        """
        assert isinstance(self.masks, FrameBlockMasks)
        counts = [stop - start for start, stop in self.masks.frames]
        local = self.visual.features
        parts = gather_shards(F.pad(local, (0, 0, 0, 0, 0, max(counts) - local.shape[0])), comm)
        features = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        total = self.visual.total_frames
        return replace(
            self,
            visual=VisualFeatures(features, copy_to_device(index, features.device), total),
            masks=FrameBlockMasks(self.masks.masks, [(0, total)] * comm.size),
            key_lengths=(features.shape[0] * features.shape[1],) * comm.size,
            replicated=True,
        )


def select_for_pass(
    context: SeqParContext, shape: CrossAttentionShape, text: TextShards, frames: FrameState
) -> FrameState:
    """Return the frames with what "auto" selects for all cross-attention layers of the pass, possibly replication."""
    features, config = frames.visual.features, context.config
    (probe,) = as_attended(features[:0])
    q_shape, k_shape = (text.batch, shape.heads, text.local, shape.dim), (1, shape.kv_heads)
    assert context.selector is not None
    selection = context.selector.select_for_pass(
        problem_of(q_shape, k_shape, frames.key_lengths, probe.dtype, config.accumulate_dtype),
        frames.masks,
        probe,
        training=torch.is_grad_enabled(),
        visual_dim=features.shape[2],
        layers=shape.layers,
        recompute=config.recompute_visual,
    )
    return replace(frames, selection=selection)


@dataclass(frozen=True)
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
    """

    context: SeqParContext
    text: TextShards | None = None
    frames: FrameState | None = None
    frame_mask: FrameMask | None = None
    units_per_frame: int = 1
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    visual_cache: VisualKVCache | None = None
    cached_text: CachedTextMask | None = None
    tokens: int | None = None

    @cached_property
    def _specs(self) -> dict[Hashable, CallSpec]:
        """The call specs of this pass; not a field, because FSDP copies dataclasses field by field."""
        return {}

    @property
    def shards_text(self) -> bool:
        """Whether hidden states hold this rank's tokens only."""
        return self.text is not None and self.context.config.self_attention != "local"

    def attend(self, q: Tensor, sources: Sequence[KeySource], scale: float) -> Tensor:
        """q (B, H, s, D) -> o (B, H, s, D): one softmax over the keys of all sources on all ranks."""
        o, _ = attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
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
            k, v = self.visual_cache.keys_values(layer, project, q.dtype)
        elif not self.context.config.recompute_visual:
            k, v = (x.to(q.dtype) for x in project(visual.features, visual.index))
        key = "visual", q.shape, q.dtype, torch.is_grad_enabled()
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = self._visual_spec(q, k, project)
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
            project: (features (f, tokens, width), index (f,)) -> k, v (1, G, f * tokens, D), frame by frame.
            modules: the modules that `project` uses.
            scale: factor of q k^T.

        Returns:
            o (B, H, s, D) in the dtype of q; 0 in rows that attend to no frame.
        """
        given = q.dtype
        (q,) = as_attended(q)
        if self.text is None:
            assert self.visual_cache is not None
            k, v = self.visual_cache.keys_values(layer, project, q.dtype)
            return self.attend_replicated(q, k, v, scale)[0].to(given)
        if self.shards_text:
            return self.attend(q, [self.visual_keys(q, layer, project, modules)], scale).to(given)
        # With self_attention="local" the text is replicated, and sharded for this attention only.
        q = self.text.shard(q, 2)
        o = self.attend(q, [self.visual_keys(q, layer, project, modules)], scale)
        return self.text.unshard(o, 2).to(given)

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q (B, H, L, D), the same on every rank, over the ranks' visual keys; likewise."""
        if self.requires_backward(q, k, v):
            sources = [self.cached_visual_source(q, k, v)]
            return attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
        assert self.visual_cache is not None
        return self.visual_cache.decode(
            q,
            k,
            v,
            group=self.context.comm,
            mask=self.frame_mask,
            units_per_frame=self.units_per_frame,
            scale=scale,
            kernel=self.context.config.kernel,
        )

    def attend_cached_text(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of q (B, H, L, D), the same on every rank, over the text K and V of all ranks; likewise."""
        assert self.cached_text is not None
        partial = PartialResult(q, accumulation(torch.float32, q.dtype))
        rectangles = self.cached_text.rectangles(q.shape[0], window)
        BlockMath(self.context.config.kernel, scale).forward(q, k, v, rectangles, partial)
        return merge_over_ranks(*partial.value, self.context.comm)

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

    def _visual_spec(self, q: Tensor, k: Tensor | None, project: Projection) -> CallSpec:
        assert self.frames is not None
        frames, config = self.frames, self.context.config
        if frames.replicated:
            dtype = accumulation(config.accumulate_dtype, q.dtype)
            return CallSpec((1, 1), frames.masks, frames.key_lengths, dtype, config.overlap)
        candidates = {"auto": CROSS, "mesh": CROSS_MESH}.get(config.strategy)
        if k is None and candidates is not None:
            with torch.no_grad():  # projecting zero frames gives the number of KV heads
                k = project(frames.visual.features[:0], frames.visual.index[:0])[0]
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
