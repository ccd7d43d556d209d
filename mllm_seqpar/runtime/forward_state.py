"""One forward pass of a patched model: what all its layers share. It travels to them as a keyword argument.

Three ways to run. "sharded": text and frames are dealt to the ranks, for training and for any pass without a cache.
"replicated": every rank has all text and its own frames, for generating with a cache. A long prompt is read sharded
with a cache: its K and V, the text's and the frames', then stay with their ranks while later passes are replicated.

An object of its own, not a container of tensors, so that FSDP, checkpointing and autocast hand it through as it is; and
not kept on a module, so that a recomputation in backward sees what its forward pass saw.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.attention.block_math import BlockMath, PartialResult
from mllm_seqpar.attention.decode import decode_attention, merge_over_ranks
from mllm_seqpar.attention.distributed import CallSpec
from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.kv_sources import GivenKV, KVSource
from mllm_seqpar.attention.parallel_spec import accumulation, plan_for, problem_of
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks, FrameMask
from mllm_seqpar.sharding import frame_bounds

from .context import SeqParContext
from .selection import (
    CROSS,
    CROSS_MESH,
    SELF,
    SELF_MESH,
    CandidateStrategies,
    CrossAttentionShape,
    Selection,
    selected_spec,
)
from .text_kv_cache import CachedTextMask
from .text_shards import TextShards
from .visual_features import Projection, RecomputedKV, VisualFeatures, VisualKVCache


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype that attention computes in: autocast's where it is on, as it does for torch's own attention.

    Under autocast q and k leave the rotary embedding in float32 while v is what the projection gave.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    narrow = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 else x.to(narrow) for x in tensors)


@dataclass(frozen=True)
class FrameState:
    """The frames of one forward pass: this rank's features, and what each text row sees of all frames.

    Attributes:
        visual: this rank's features.
        blocks: the visible tiles of every block.
        key_lengths: visual keys of every rank.
        sees: (B, s) bool, this rank's rows that see any frame.
        whole: `visual` has the frames of all ranks, and no rank needs another for its rows.
        choice: what "auto" chose for this pass, if it was before any layer ran.
    """

    visual: VisualFeatures
    blocks: BlockMasks
    key_lengths: tuple[int, ...]
    sees: Tensor
    whole: bool = False
    choice: Selection | None = None

    @classmethod
    def of(cls, visual: VisualFeatures, mask: FrameMask, text: TextShards, units_per_frame: int = 1) -> FrameState:
        """From the mask of ALL text rows (B, L), in order; padding rows see nothing.

        Args:
            visual: this rank's features, by units.
            mask: speaks of units, `units_per_frame` to a frame; frames are what ranks hold whole.
            text: how the rows are dealt.
            units_per_frame: the tiles of a picture, for example.
        """
        rows = FrameMask(
            None if mask.bounds is None else (text.pad(mask.bounds[0], 1), text.pad(mask.bounds[1], 1)),
            None if mask.visible is None else text.pad(mask.visible, 1),
            mask.tokens_per_frame,
            mask.total_frames,
        )
        total = mask.total_frames // units_per_frame
        bounds = frame_bounds(total, text.comm.size)
        frames = [(start * units_per_frame, stop * units_per_frame) for start, stop in bounds]
        by_rank = [rows.take(text.positions(rank)) for rank in range(text.comm.size)]
        key_lengths = tuple((stop - start) * mask.tokens_per_frame for start, stop in frames)
        return cls(visual, FrameBlockMasks(by_rank, frames), key_lengths, by_rank[text.comm.rank].any_frame_visible())

    def gathered(self, comm: Communicator, index: Tensor) -> FrameState:
        """The same with all ranks' features on every rank ("replicate"); `index` (units,) is that of all of them.

        Gathered once for all layers; in the backward pass the ranks' gradients of each frame add up, once as well.
        """
        assert isinstance(self.blocks, FrameBlockMasks)
        counts = [stop - start for start, stop in self.blocks.frames]
        own = self.visual.features
        padded = F.pad(own, (0, 0, 0, 0, 0, max(counts) - own.shape[0]))
        parts = gather_shards(padded, comm)
        features = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        visual = VisualFeatures(features, index.to(features.device), self.visual.total_frames)
        everything = (0, self.visual.total_frames)
        lengths = (features.shape[0] * features.shape[1],) * comm.size
        blocks = FrameBlockMasks(self.blocks.masks, [everything] * comm.size)
        return replace(self, visual=visual, blocks=blocks, key_lengths=lengths, whole=True)


def select_for_pass(
    context: SeqParContext, shape: CrossAttentionShape, text: TextShards, shards: FrameState
) -> FrameState:
    """With what `strategy="auto"` takes for all cross-attention layers of a pass, replication among its candidates."""
    assert context.selector is not None
    features, config = shards.visual.features, context.config
    (probe,) = as_attended(features[:0])
    problem = problem_of(
        (text.batch, shape.heads, text.local, shape.dim),
        (1, shape.kv_heads),
        shards.key_lengths,
        probe.dtype,
        config.accumulate_dtype,
    )
    selection = context.selector.select_for_pass(
        problem,
        shards.blocks,
        training=torch.is_grad_enabled(),
        visual_dim=features.shape[2],
        layers=shape.layers,
        recompute=config.recompute_visual,
    )
    return replace(shards, choice=selection)


@dataclass(frozen=True)
class ForwardState:
    """What the layers of one forward pass need to know.

    Attributes:
        context: group and configuration.
        text: how the text is dealt to ranks; None in a replicated pass.
        frames: the frames of a sharded pass; None without any.
        frame_mask: what every text row sees, in a replicated pass with frames.
        units_per_frame: units of `frame_mask` that make a frame.
        rows: further facts of the rows of this pass, (B, s) each, by name.
        kept: the frames' K and V, in a pass with a cache.
        cached: the text's K and V, in a pass with a cache whose text stays dealt to the ranks.
        tokens: of the text so far, this pass included, in a pass with a cache; a static cache is longer.
    """

    context: SeqParContext
    text: TextShards | None = None
    frames: FrameState | None = None
    frame_mask: FrameMask | None = None
    units_per_frame: int = 1
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    kept: VisualKVCache | None = None
    cached: CachedTextMask | None = None
    tokens: int | None = None

    @property
    def shards_text(self) -> bool:
        """Whether hidden states hold this rank's tokens only."""
        return self.text is not None and self.context.config.self_attention != "local"

    def text_keys(self, k: Tensor, v: Tensor, window: int | None = None, heads: int | None = None) -> GivenKV:
        """This rank's text keys, causal, by the configured self-attention.

        Args:
            k, v: (B, G, s, D).
            window: keys that a row sees at most, itself included; None: all before it.
            heads: query heads, None: G; "auto", and a mesh without a tile, choose by them.
        """
        assert self.text is not None
        blocks, lengths = self.text.blocks(window), (self.text.local,) * self.context.comm.size
        name = self.context.config.self_attention
        among = {"auto": SELF, "mesh": SELF_MESH}.get(name)
        if name in ("local", "auto"):  # local: whole everywhere, but for the rows of an attention shared with frames
            name = "ring"
        q_shape = k.shape[0], heads or k.shape[1], *k.shape[2:]
        plan = self._plan(name, among, blocks, lengths, q_shape, k.shape, k.dtype)
        return GivenKV(plan, k, v)

    def cross_attend(
        self, q: Tensor, layer: Hashable, project: Projection, modules: Sequence[nn.Module], scale: float
    ) -> Tensor:
        """The cross-attention of one layer, in every kind of pass.

        Args:
            q: (B, H, s, D), the rows of this pass on this rank.
            layer: names the layer, for what is kept while decoding.
            project: (features (f, tokens, width), index (f,)) -> k, v (1, G, f * tokens, D), frame by frame.
            modules: those that `project` uses.
            scale: factor of q k^T.

        Returns:
            o (B, H, s, D) in the dtype of q; rows that see nothing are 0.
        """
        given = q.dtype
        (q,) = as_attended(q)
        if self.text is None:
            assert self.kept is not None
            k, v = self.kept.keys_values(layer, project, q.dtype)
            return self.attend_replicated(q, k, v, scale)[0].to(given)
        if self.shards_text:
            return self.attend(q, [self.visual_keys(q, layer, project, modules)], scale).to(given)
        # the text lives whole on every rank: its rows are shared out for this attention only
        q = self.text.shard(q, 2)
        o = self.attend(q, [self.visual_keys(q, layer, project, modules)], scale)
        return self.text.unshard(o, 2).to(given)

    def visual_keys(self, q: Tensor, layer: Hashable, project: Projection, modules: Sequence[nn.Module]) -> KVSource:
        """The visual keys that a layer projects from the shared features, for the rows q, by the configured strategy.

        The arguments are those of `cross_attend`; q in the dtype that attention computes in.
        """
        assert self.frames is not None
        visual, dtype = self.frames.visual, q.dtype
        if self.kept is not None:
            k, v = self.kept.keys_values(layer, project, dtype)
            return GivenKV(self._visual_plan(q, k.shape[1]), k, v)
        if not self.context.config.recompute_visual:
            k, v = (x.to(dtype) for x in project(visual.features, visual.index))
            return GivenKV(self._visual_plan(q, k.shape[1]), k, v)
        kv_heads = q.shape[1]
        if self.context.config.strategy in ("mesh", "auto"):
            with torch.no_grad():  # of no frames, for the number of its heads
                kv_heads = project(visual.features[:0], visual.index[:0])[0].shape[1]
        return RecomputedKV(self._visual_plan(q, kv_heads), visual, project, modules, dtype)

    def _visual_plan(self, q: Tensor, kv_heads: int) -> CallSpec:
        """For rows q (B, H, s, D) and keys with so many heads; only "mesh" and "auto" look at these."""
        assert self.frames is not None
        frames, config = self.frames, self.context.config
        if frames.whole:
            dtype = accumulation(config.accumulate_dtype, q.dtype)
            return CallSpec((1, 1), frames.blocks, frames.key_lengths, dtype, config.overlap)
        among = {"auto": CROSS, "mesh": CROSS_MESH}.get(config.strategy)
        # decoding keeps K and V where they are, also for "replicate"
        name = "lv-xattn" if config.strategy in ("auto", "replicate") else config.strategy
        k_shape = 1, kv_heads
        return self._plan(name, among, frames.blocks, frames.key_lengths, q.shape, k_shape, q.dtype, frames.choice)

    def attend(self, q: Tensor, sources: Sequence[KVSource], scale: float) -> Tensor:
        """q (B, H, s, D) -> o (B, H, s, D): one softmax over all sources' keys of all ranks."""
        o, _ = attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
        return o

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q (B, H, L, D), the same on every rank, over the ranks' visual keys -> (o, lse), the same on every rank."""
        if self.wants_grad(q, k, v):
            sources = [self.kept_keys(q, k, v)]
            return attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
        result = decode_attention(
            q,
            k,
            v,
            group=self.context.comm,
            mask=self.frame_mask,
            units_per_frame=self.units_per_frame,
            scale=scale,
            kernel=self.context.config.kernel,
            return_lse=True,
        )
        assert isinstance(result, tuple)
        return result

    def wants_grad(self, *tensors: Tensor) -> bool:
        """Whether a pass with a cache is differentiated, which one process can do.

        Raises:
            ConfigError: it is, on several ranks.
        """
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wanted and self.context.comm.size > 1:
            raise ConfigError(
                "use_cache: a pass with a cache has no backward pass when sequence-parallel; run it under "
                "torch.no_grad(), or pass use_cache=False to train"
            )
        return wanted

    def kept_keys(self, q: Tensor, k: Tensor, v: Tensor) -> GivenKV:
        """Return the frames' K and V of one process as a differentiable source for the rows q."""
        assert self.frame_mask is not None
        blocks = FrameBlockMasks([self.frame_mask], [(0, self.frame_mask.total_frames)])
        return self.own_keys(q, k, v, blocks)

    def own_keys(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMasks) -> GivenKV:
        """Return K and V of one process as a differentiable source, whatever the strategy."""
        dtype = accumulation(self.context.config.accumulate_dtype, q.dtype)
        return GivenKV(CallSpec((1, 1), blocks, (k.shape[2],), dtype), k, v)

    def attend_cached_text(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """q (B, H, L, D), the same on every rank, over the text K and V that each rank keeps -> (o, lse) likewise."""
        assert self.cached is not None
        partial = PartialResult(q, accumulation(torch.float32, q.dtype))
        tiles = self.cached.tiles(q.shape[0], window)
        BlockMath(self.context.config.kernel, scale).forward(q, k, v, tiles, partial)
        return merge_over_ranks(*partial.value, self.context.comm)

    def _plan(
        self,
        strategy: str,
        among: CandidateStrategies | None,
        blocks: BlockMasks,
        key_lengths: tuple[int, ...],
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        dtype: torch.dtype,
        choice: Selection | None = None,
    ) -> CallSpec:
        """Of the choice that was or is made `among` several, where there are rates to choose by; else of `strategy`."""
        config, selector = self.context.config, self.context.selector
        problem = problem_of(q_shape, k_shape, key_lengths, dtype, config.accumulate_dtype)
        if among is not None and selector is not None and problem.ranks > 1:
            choice = choice or selector.select(
                problem, blocks, among, training=torch.is_grad_enabled(), mesh_shape=config.tile_for(strategy)
            )
            return selected_spec(selector, choice, blocks, problem, config, dtype, causal=among.causal)
        accumulate = accumulation(config.accumulate_dtype, dtype)
        return plan_for(strategy, config.tile_for(strategy), blocks, problem, accumulate, config.overlap)
