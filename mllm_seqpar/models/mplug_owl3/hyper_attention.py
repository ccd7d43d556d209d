"""Hyper attention: Qwen2's self-attention extended by attention over the frames.

Shape legend: B samples, L text tokens, K text keys (cached ones included), F frames of all samples, T tokens per frame,
H query heads, G KV heads, D head dim, C = H * D channels.

The patched forward calls the same methods: `project`, `visual_projection` and `mix`. Only the attention differs. Here,
on one process, the rows of a sample attend to the frames of that sample only, in blocks of rows (`row_blocks`). The
patched forward attends to the text and frames of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

from mllm_seqpar._compat import takes_cache
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.models.causal_lm import rotate
from mllm_seqpar.runtime.projections import KVProjection
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache

from .configuration import MPlugOwl3Config
from .media import MediaLayout

MASK_ELEMENTS = 1 << 24
"""The largest boolean mask (rows x keys) of one block. The s_q x s_kv mask of a long video is never materialised."""

SHORT_RUN = 32
"""More consecutive rows than this with the same interval form a block without a mask."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Rows [start, stop) of one sample, and the frames [first_frame, stop_frame) that at least one of them attends
    to."""

    start: int
    stop: int
    first_frame: int
    stop_frame: int
    uniform: bool
    """Every row attends to all of these frames, so no mask is needed. True for a block without frames."""


class VisualInputs:
    """The visual features and their visibility for each text row; one object for all layers of a forward pass.

    This class is deliberately neither a dataclass nor a pytree: FSDP, checkpointing and device placement traverse
    containers of tensors and would cast or copy the features once per layer.

    Frames may have come with several passes of a cache. The frames of a sample are then numbered from 0, those of each
    pass after those of the passes before.

    Attributes:
        embeds: (F, T, hidden), the output of `vision2text_model`; None while decoding, when K and V are cached.
        cached: the K and V of each hyper layer, projected once at prefill; None in a pass without a cache.
        frame_position: (F,) int64, the rotary position of each frame's keys.
        first, stop: (B, L) int64. A row attends to the frames first <= f < stop, by global number, or by that of its
            sample.
        ranges: for each pass that brought frames, the global numbers (start, stop) of the frames of each row; empty if
            there is only one such pass.
    """

    def __init__(
        self,
        layout: MediaLayout,
        rows: tuple[Tensor, Tensor],
        tokens_per_frame: int,
        embeds: Tensor | None = None,
        cached: VisualKVCache | None = None,
        ranges: Sequence[Tensor] = (),
    ) -> None:
        """`ranges` are (B, 2), of all passes; rows attend to all frames of those before this one.

        Raises:
            ShapeError: a row does not attend to the first frames of its pass, but to earlier and later ones.
        """
        self.frame_position, (self.first, self.stop) = layout.frame_position, rows
        self.tokens_per_frame, self.embeds, self.cached = tokens_per_frame, embeds, cached
        self.ranges: list[list[list[int]]] = [own.tolist() for own in ranges]
        if ranges:
            before = sum(own.diff(dim=1) for own in ranges[:-1])
            attends, start = self.stop > self.first, ranges[-1][:, :1]
            if bool((attends & (before > 0) & (self.first > start)).any()):
                raise ShapeError(
                    "rows attend to frames of the cache and to new ones, but not to the first new ones, which the "
                    "unpatched model does not support; patch it with patch_model, or hide no frames between others"
                )
            self.first = torch.where(attends & (before == 0), self.first - start, 0)
            self.stop = before + torch.where(attends, self.stop - start, 0)

    @classmethod
    def of_cache(
        cls,
        state: SequenceParallelCacheState,
        past_length: int,
        length: int,
        batch: int,
        device: torch.device,
        embeds: Tensor | None = None,
    ) -> Self:
        """Return the inputs of the `length` tokens that follow `past_length` cached ones, whose frames are cached.

        `embeds` are the frames that came with these tokens, if any did, whose K and V the layers add to the cache.
        """
        visual, ranges = state.visual_kv, []
        assert visual is not None
        state.rows_of(batch)
        state.frame_facts = state.frame_facts.to(device)  # a patched model leaves it on the CPU
        for each in state.by_pass():
            layout, rows = each.frame_facts.to(device), each.rows_of(batch).to(device)
            ranges.append(cls.units_of(layout, layout.sample_range[rows]))
        first, stop = (bound[rows] for bound in layout.rows(past_length, length))
        own = cls.units_of(layout, first), cls.units_of(layout, torch.maximum(first, stop))
        return cls(layout, own, visual.tokens_per_unit, embeds, visual, ranges if len(ranges) > 1 else ())

    @staticmethod
    def units_of(layout: MediaLayout, frames: Tensor) -> Tensor:
        """Return the units (frames here) before these frames."""
        return frames

    @cached_property
    def has_frames(self) -> Tensor:
        """(B, L) bool: whether a row attends to any frame."""
        return self.stop > self.first

    def states(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return k and v (1, G, F * T, D) of a layer for each pass that brought frames.

        Those of this pass are projected on the first call, and stored in the cache.
        """
        if self.cached is None:
            return [project()]
        if layer not in self.cached.states:
            self.cached.states[layer] = project()
        return [part.states[layer] for part in self.cached.parts]

    def keys_of(self, sample: int, block: RowBlock, states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return k and v (1, G, keys, D) of the frames of a block, given `states`."""
        spans, done = [(block.first_frame, block.stop_frame)], 0
        if self.ranges:
            spans = []
            for start, stop in (own[sample] for own in self.ranges):
                low, high = (min(max(x - done, 0), stop - start) for x in (block.first_frame, block.stop_frame))
                spans.append((start + low, start + high))
                done += stop - start
        keys = [slice(low * self.tokens_per_frame, high * self.tokens_per_frame) for low, high in spans]
        parts = [(k[:, :, own], v[:, :, own]) for (k, v), own in zip(states, keys, strict=True)]
        if len(parts) == 1:
            return parts[0]
        k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return k, v

    @cached_property
    def blocks(self) -> list[list[RowBlock]]:
        """The row blocks of each sample, computed once for all hyper layers."""
        bounds = zip(self.first.tolist(), self.stop.tolist(), strict=True)
        return [row_blocks(first, stop, self.tokens_per_frame) for first, stop in bounds]


def row_blocks(first: list[int], stop: list[int], tokens_per_frame: int) -> list[RowBlock]:
    """Split the rows of one sample into blocks: long runs of equal rows need no mask, the other masks are bounded.

    Either all rows of a block attend to a frame or none does, so a mask has no empty row, for which kernels differ.
    """
    blocks: list[RowBlock] = []
    begin = 0
    intervals = [(f, s) if f < s else (0, 0) for f, s in zip(first, stop, strict=True)]
    for (low, high), run in groupby(intervals):
        end = begin + sum(1 for _ in run)
        block = RowBlock(start=begin, stop=end, first_frame=low, stop_frame=high, uniform=True)
        if blocks and low < high and end - begin <= SHORT_RUN:
            last = blocks[-1]
            first_frame, stop_frame = min(last.first_frame, low), max(last.stop_frame, high)
            attends = last.first_frame < last.stop_frame
            short = not last.uniform or last.stop - last.start <= SHORT_RUN
            elements = (end - last.start) * (stop_frame - first_frame) * tokens_per_frame
            if attends and short and elements <= MASK_ELEMENTS:
                blocks.pop()
                block = RowBlock(
                    start=last.start, stop=end, first_frame=first_frame, stop_frame=stop_frame, uniform=False
                )
        blocks.append(block)
        begin = end
    return blocks


class HyperAttention(Qwen2Attention):
    """Self-attention over the text and attention over the frames, with shared queries and one shared output projection.

    Attributes:
        v_kv_proj: projects visual features to K and V; its output channels are (KV head, {K, V}, head dim).
        gate: (hidden,) logits of the weight of the visual output per channel; None unless `config.gate` is "vector".
        gate_proj: maps one head of the text output to the weight of the visual output; None unless `config.gate` is
            "per_head".
    """

    def __init__(self, config: MPlugOwl3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_kv_heads = config.num_key_value_heads
        self.v_kv_proj = nn.Linear(config.hidden_size, 2 * self.num_kv_heads * self.head_dim, bias=True)
        self.fused = config.gate is None  # one softmax over visual and text keys
        self.gate = nn.Parameter(torch.zeros(config.hidden_size)) if config.gate == "vector" else None
        self.gate_proj: nn.Module | None = None
        if config.gate == "per_head":
            self.gate_proj = nn.Sequential(nn.Linear(self.head_dim, self.head_dim), nn.Sigmoid())
        self.rotary_emb = Qwen2RotaryEmbedding(config)  # has no parameters and no entry in the state dict

    def project(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised text (B, L, hidden) -> q (B, H, L, D), and k and v (B, G, K, D) of the text up to these tokens.

        q and k are rotated. With a cache, k and v are added to it, and those of earlier tokens are returned too.
        """
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        k = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return q, k, v

    def visual_projection(self, visual_norm: nn.Module) -> KVProjection:
        """Return the projection of frames (F, T, hidden) to k (rotated) and v, each (1, G, F * T, D).

        It takes the rotation of each frame (`visual_rotation`). All T keys of a frame are rotated by the frame's one
        position, in float32. `visual_norm` is the layer's input norm.
        """
        return KVProjection(
            (self.v_kv_proj,), self.head_dim, interleaved=True, input_norm=visual_norm, rotate=self.rotate_visual
        )

    def visual_rotation(self, frame_position: Tensor) -> Tensor:
        """Return the cosines and sines of frame positions (F,), (F, 2, D) float32; they are the same in all layers."""
        like = torch.empty(0, dtype=torch.float32, device=frame_position.device)
        return torch.cat(self.rotary_emb(like, frame_position[None])).transpose(0, 1)

    def rotate_visual(self, k: Tensor, rotation: Tensor, transposed: bool = False) -> Tensor:
        """Rotate keys (F, T, G, D) of frames by `rotation` (F, 2, D), or apply the transpose of this linear map."""
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return rotate(wide, rotation[:, :, None, None].unbind(1), transposed).to(k.dtype)

    def mix(self, text_out: Tensor, visual_out: Tensor, has_frames: Tensor) -> Tensor:
        """Return text_out (1 - w) + visual_out w, (B, L, C), where the gate gives the weight w.

        `has_frames` (B, L) bool: whether a row attends to any frame. The text output of the other rows is not changed.
        """
        if self.gate_proj is not None:
            weight = self.gate_proj(text_out.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        else:
            assert self.gate is not None, "text and frames share one softmax"
            weight = torch.sigmoid(self.gate)
        weight = weight.to(text_out.dtype)
        return torch.where(has_frames[..., None], text_out * (1 - weight) + visual_out * weight, text_out)

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        visual: VisualInputs | None = None,
        visual_norm: nn.Module | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Normalised text (B, L, hidden) -> (B, L, hidden), and with eager attention the weights of the text keys.

        `visual` is None in a pass without frames. `visual_norm` is the layer's input norm, applied to the frames too.
        """
        q, k, v = self.project(hidden_states, position_embeddings, cache)
        if visual is None:
            out, weights = self._attend_text(q, k, v, attention_mask, **kwargs)
            return self.o_proj(out), weights

        def project() -> tuple[Tensor, Tensor]:
            if visual_norm is None:
                raise TypeError("a hyper layer attends to frames by its input norm; pass it as visual_norm")
            assert visual.embeds is not None
            rotation = self.visual_rotation(visual.frame_position.to(visual.embeds.device))
            return self.visual_projection(visual_norm)(visual.embeds, rotation)

        states = visual.states(self.layer_idx, project)
        if self.fused:
            out, weights = self._attend_jointly(q, k, v, states, attention_mask, visual)
            return self.o_proj(out), weights
        text_out, weights = self._attend_text(q, k, v, attention_mask, **kwargs)
        visual_out = attend_frames(q, states, visual, lambda *block: self._attend(*block)[0])
        return self.o_proj(self.mix(text_out, visual_out, visual.has_frames)), weights

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _attend_text(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return Qwen2's own self-attention (B, L, C), before the output projection."""
        name = self.config._attn_implementation
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        kwargs |= {"dropout": self._dropout, "scaling": self.scaling, "sliding_window": self.sliding_window}
        out, weights = attend(self, q, k, v, attention_mask, **kwargs)
        return out.flatten(2), weights

    def _attend_jointly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: Sequence[tuple[Tensor, Tensor]],
        mask: Any,
        visual: VisualInputs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention with one softmax over [visual keys; text keys], (B, L, C)."""
        text_mask = _text_visibility(mask, q, k)

        def attend(sample: int, block: RowBlock) -> tuple[Tensor, Tensor | None]:
            one, rows = slice(sample, sample + 1), slice(block.start, block.stop)
            visual_k, visual_v = visual.keys_of(sample, block, states)
            visual_keys = visual_k.shape[2]
            visible = visible_keys(visual, sample, block)
            mask_rows = None if text_mask is None else text_mask[sample % text_mask.shape[0], rows]
            out, weights = self._attend(
                q[one, :, rows],
                torch.cat([visual_k, k[one]], dim=2),
                torch.cat([visual_v, v[one]], dim=2),
                _joint_mask(visible, visual_keys, mask_rows, block.stop - block.start, k.shape[2]),
            )
            return out, None if weights is None else weights[..., visual_keys:]

        return by_blocks(visual, attend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """q (1, H, rows, D) -> (1, rows, H, D); mask (rows, keys), boolean (True: visible) or additive, or None."""
        if self.config._attn_implementation == "eager":
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            return eager_attention_forward(self, q, k, v, mask, scaling=self.scaling, dropout=self._dropout)
        return attend_rows(q, k, v, mask, self.scaling, self._dropout), None


class HyperDecoderLayer(Qwen2DecoderLayer):
    """Qwen2's decoder layer with hyper attention; its input norm is applied to the text and to the visual features."""

    def __init__(self, config: MPlugOwl3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = HyperAttention(config, layer_idx)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, visual_norm=self.input_layernorm, **kwargs)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, dropout: float = 0.0) -> Tensor:
    """q (1, H, rows, D), k and v (1, G, keys, D) -> (1, rows, H, D), by torch's attention; mask as in `_attend`."""
    groups = q.shape[1] // k.shape[1]
    if mask is not None and q.is_cuda:
        # On CUDA torch has no fused kernel for a mask with grouped heads. The keys of one block are few, so K and V
        # are expanded.
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out.transpose(1, 2)


def attend_frames(
    q: Tensor, states: Sequence[tuple[Tensor, Tensor]], visual: VisualInputs, attend: Callable[..., Tensor]
) -> Tensor:
    """Return the attention of every row over its visible frames, (B, L, C); 0 for rows without visible frames.

    `attend(q, k, v, mask)` computes a block, as `attend_rows` does.
    """

    def attend_block(sample: int, block: RowBlock) -> tuple[Tensor, None]:
        rows = q[sample : sample + 1, :, block.start : block.stop]
        if block.first_frame == block.stop_frame:
            return torch.zeros_like(rows).transpose(1, 2), None
        k, v = visual.keys_of(sample, block, states)
        return attend(rows, k, v, visible_keys(visual, sample, block)), None

    return by_blocks(visual, attend_block)[0]


def by_blocks(
    visual: VisualInputs, attend: Callable[[int, RowBlock], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Concatenate outputs (1, rows, H, D) of all row blocks to (B, L, C), and weights (1, H, rows, keys) if any."""
    samples = [[attend(number, block) for block in blocks] for number, blocks in enumerate(visual.blocks)]
    outs = torch.cat([torch.cat([out for out, _ in parts], dim=1) for parts in samples]).flatten(2)
    # Every block has weights with eager attention, otherwise none has.
    weights = [torch.cat(of_sample, 2) for parts in samples if (of_sample := [w for _, w in parts if w is not None])]
    return outs, torch.cat(weights) if weights else None


def visible_keys(visual: VisualInputs, sample: int, block: RowBlock) -> Tensor | None:
    """Return (rows, keys of the block's frames) bool, or None if every row attends to all of them."""
    if block.uniform:
        return None
    frames = torch.arange(block.first_frame, block.stop_frame, device=visual.first.device)
    first, stop = (bound[sample, block.start : block.stop, None] for bound in (visual.first, visual.stop))
    return ((first <= frames) & (frames < stop)).repeat_interleave(visual.tokens_per_frame, dim=1)


def _text_visibility(attention_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return (B or 1, L, K), boolean or additive, or None if every row attends to every text key."""
    length, keys = q.shape[2], k.shape[2]
    if attention_mask is not None:
        if attention_mask.dim() != 4 or attention_mask.shape[1] != 1:
            raise TypeError(
                f"a model without a gate needs the text mask as (batch, 1, rows, keys) and got "
                f"{tuple(attention_mask.shape)}; use attn_implementation 'sdpa' or 'eager'"
            )
        return attention_mask[:, 0, :, :keys]
    if length == 1:
        return None
    # transformers passes no mask for plain causal attention from the first key on. A static cache has more keys than
    # there are tokens so far.
    return torch.ones(length, keys, dtype=torch.bool, device=q.device).tril()[None]


def _joint_mask(
    visible: Tensor | None, visual_keys: int, text_mask: Tensor | None, rows: int, text_keys: int
) -> Tensor | None:
    """Concatenate the masks of visual and text keys to (rows, visual_keys + text_keys), in the text mask's form."""
    if text_mask is None:
        if visible is None:
            return None
        text_mask = torch.ones(rows, text_keys, dtype=torch.bool, device=visible.device)
    if visible is None:
        visible = torch.ones(rows, visual_keys, dtype=torch.bool, device=text_mask.device)
    if text_mask.dtype != torch.bool:
        hidden = torch.finfo(text_mask.dtype).min
        visible = torch.zeros_like(visible, dtype=text_mask.dtype).masked_fill(~visible, hidden)
    return torch.cat([visible, text_mask], dim=1)
