"""One forward pass of a patched model: what all its layers share. It travels to them as a keyword argument.

Three ways to run. "sharded": text and frames are dealt to the ranks, for training and for any pass without a cache.
"replicated": every rank has all text and its own frames, for generating with a cache. A long prompt is read sharded
with a cache: its K and V, the text's and the frames', then stay with their ranks while later passes are replicated.

An object of its own, not a container of tensors, so that FSDP, checkpointing and autocast hand it through as it is; and
not kept on a module, so that a recomputation in backward sees what its forward pass saw.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .attention.block import BlockMath, Partial
from .attention.decode import decode_attention, merge_over_ranks
from .attention.distributed import Plan
from .attention.joint import attend
from .attention.planning import accumulation
from .attention.sources import GivenKeys, KeySource
from .cached_text import CachedRows
from .context import SeqParContext
from .errors import ConfigError
from .masks import Blocks, FrameBlocks, FrameMask
from .sharding import frame_bounds
from .text import TextShards
from .visual import KeptVisual, Projection, RecomputedKeys, SharedVisual


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
class VisualShards:
    """The frames of one forward pass: this rank's features, and what each text row sees of all frames.

    Attributes:
        visual: this rank's features.
        blocks: the visible tiles of every block.
        key_lengths: visual keys of every rank.
        sees: (B, s) bool, this rank's rows that see any frame.
    """

    visual: SharedVisual
    blocks: Blocks
    key_lengths: tuple[int, ...]
    sees: Tensor

    @classmethod
    def of(cls, visual: SharedVisual, mask: FrameMask, text: TextShards, units_per_frame: int = 1) -> VisualShards:
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
        return cls(visual, FrameBlocks(by_rank, frames), key_lengths, by_rank[text.comm.rank].sees_any())


@dataclass(frozen=True)
class SeqParCall:
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
    frames: VisualShards | None = None
    frame_mask: FrameMask | None = None
    units_per_frame: int = 1
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    kept: KeptVisual | None = None
    cached: CachedRows | None = None
    tokens: int | None = None

    @property
    def shards_text(self) -> bool:
        """Whether hidden states hold this rank's tokens only."""
        return self.text is not None and self.context.config.self_attention != "local"

    def text_keys(self, k: Tensor, v: Tensor, window: int | None = None) -> GivenKeys:
        """This rank's text keys (B, G, s, D), causal, by the configured self-attention."""
        assert self.text is not None
        size = self.context.comm.size
        # Star Attention: rows go where they see something, which is nowhere
        tile = (size, 1) if self.context.config.self_attention == "star" else (1, size)
        return GivenKeys(self._plan(tile, self.text.blocks(window), (self.text.local,) * size, k.dtype), k, v)

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
        keys = self.visual_keys(layer, project, modules, q.dtype)
        if self.shards_text:
            return self.attend(q, [keys], scale).to(given)
        # the text lives whole on every rank: its rows are shared out for this attention only
        return self.text.unshard(self.attend(self.text.shard(q, 2), [keys], scale), 2).to(given)

    def visual_keys(
        self, layer: Hashable, project: Projection, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> KeySource:
        """The visual keys that a layer projects from the shared features, by the configured strategy."""
        assert self.frames is not None
        size, config = self.context.comm.size, self.context.config
        plan = self._plan(
            (size, 1) if config.strategy == "lv-xattn" else (1, size),
            self.frames.blocks,
            self.frames.key_lengths,
            dtype,
        )
        if self.kept is not None:
            return GivenKeys(plan, *self.kept.keys_values(layer, project, dtype))
        if config.recompute_visual:
            return RecomputedKeys(plan, self.frames.visual, project, modules, dtype)
        k, v = project(self.frames.visual.features, self.frames.visual.index)
        return GivenKeys(plan, k.to(dtype), v.to(dtype))

    def attend(self, q: Tensor, sources: Sequence[KeySource], scale: float) -> Tensor:
        """q (B, H, s, D) -> o (B, H, s, D): one softmax over all sources' keys of all ranks."""
        o, _ = attend(q, sources, comm=self.context.comm, scale=scale, kernel=self.context.config.kernel)
        return o

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q (B, H, L, D), the same on every rank, over the ranks' visual keys -> (o, lse), the same on every rank."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ConfigError(
                "use_cache: a pass with a cache has no backward pass when sequence-parallel; run it under "
                "torch.no_grad(), or pass use_cache=False to train"
            )
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

    def attend_cached_text(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """q (B, H, L, D), the same on every rank, over the text K and V that each rank keeps -> (o, lse) likewise."""
        assert self.cached is not None
        partial = Partial(q, accumulation(torch.float32, q.dtype))
        tiles = self.cached.tiles(q.shape[0], window)
        BlockMath(self.context.config.kernel, scale).forward(q, k, v, tiles, partial)
        return merge_over_ranks(*partial.value, self.context.comm)

    def _plan(self, tile: tuple[int, int], blocks: Blocks, key_lengths: tuple[int, ...], dtype: torch.dtype) -> Plan:
        config = self.context.config
        return Plan(tile, blocks, key_lengths, accumulation(config.accumulate_dtype, dtype), config.overlap)
