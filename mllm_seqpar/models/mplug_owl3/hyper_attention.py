"""Hyper attention: Qwen2's self-attention that also looks at the frames.

Shape legend: B samples, L text tokens, K text keys (cached ones included), F frames of all samples, T tokens a frame,
H query heads, G KV heads, D head dim, C = H * D channels.

The parts (projections, rotary embedding, mixing) are methods of their own, so that a distributed forward can be put
together from them. `forward` puts them together for one process: each sample's rows attend to that sample's frames
only, in blocks of rows (`visual_inputs.row_blocks`).
"""

from collections.abc import Callable
from typing import Any

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
    rotate_half,
)

from .configuration import MPlugOwl3Config
from .hyper_masks import joint_mask, text_visibility, visible_keys
from .visual_inputs import VisualInputs, visual_cache


class HyperAttention(Qwen2Attention):
    """Self-attention over the text and attention over the frames, with shared queries and one shared output projection.

    Attributes:
        v_kv_proj: visual features to K and V; its output channels are (KV head, {K, V}, head dim).
        gate: (hidden,) logits of the visual part's share per channel; None unless `config.gate` is "vector".
        gate_proj: the visual part's share as a function of one head of the text's attention output; None unless
            `config.gate` is "per_head".
    """

    def __init__(self, config: MPlugOwl3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_kv_heads = config.num_key_value_heads
        self.v_kv_proj = nn.Linear(config.hidden_size, 2 * self.num_kv_heads * self.head_dim, bias=True)
        self.fused = config.gate is None
        self.gate = nn.Parameter(torch.zeros(config.hidden_size)) if config.gate == "vector" else None
        self.gate_proj: nn.Module | None = None
        if config.gate == "per_head":
            self.gate_proj = nn.Sequential(nn.Linear(self.head_dim, self.head_dim), nn.Sigmoid())
        self.rotary_emb = Qwen2RotaryEmbedding(config)  # no parameters and nothing in the state dict

    def project_text(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, L, D), k and v (B, G, L, D) of normalised text (B, L, hidden); q and k rotated."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            projection(hidden_states).view(heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return q, k, v

    def project_visual(self, embeds: Tensor, frame_position: Tensor) -> tuple[Tensor, Tensor]:
        """k (rotated) and v, each (1, G, F * T, D), of normalised frames (F, T, hidden).

        All T keys of a frame are rotated with the one position of the frame, (F,), in float32.
        """
        frames, tokens, _ = embeds.shape
        kv = self.v_kv_proj(embeds).view(frames, tokens, self.num_kv_heads, 2, self.head_dim)
        k, v = kv.unbind(-2)
        k = self._rotate_frames(k, frame_position)
        v = v.contiguous()  # or it would keep the unrotated K, its neighbour in memory, alive
        k, v = (part.reshape(1, frames * tokens, self.num_kv_heads, self.head_dim).transpose(1, 2) for part in (k, v))
        return k, v

    def _rotate_frames(self, k: Tensor, frame_position: Tensor) -> Tensor:
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        cos, sin = self.rotary_emb(wide, frame_position[None].to(k.device))  # (1, F, D)
        cos, sin = cos[0, :, None, None], sin[0, :, None, None]
        return (wide * cos + rotate_half(wide) * sin).to(k.dtype)

    def mix(self, text_out: Tensor, visual_out: Tensor, sees: Tensor) -> Tensor:
        """Return text_out (1 - s) + visual_out s, (B, L, C), with the share s that the gate gives the visual part.

        `sees` is (B, L) bool. A row that sees nothing keeps its self-attention untouched.
        """
        if self.gate_proj is not None:
            share = self.gate_proj(text_out.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        elif self.gate is not None:
            share = torch.sigmoid(self.gate)
        else:
            raise TypeError("config.gate is None: visual and text keys share one softmax, there are no parts to mix")
        share = share.to(text_out.dtype)
        return torch.where(sees[..., None], text_out * (1 - share) + visual_out * share, text_out)

    def output(self, mixed: Tensor) -> Tensor:
        """(B, L, hidden) of the joined heads (B, L, C)."""
        return self.o_proj(mixed)

    def visual_states(
        self, visual: VisualInputs, visual_norm: nn.Module, past_key_values: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """k and v of all frames, (1, G, F * T, D): from the cache, or projected and then kept there."""
        cache = visual_cache(past_key_values)
        if cache is not None and self.layer_idx in cache.states:
            return cache.states[self.layer_idx]
        states = self.project_visual(visual_norm(visual.embeds), visual.frame_position)
        if cache is not None:
            cache.states[self.layer_idx] = states
        return states

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        visual: VisualInputs | None = None,
        visual_norm: nn.Module | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of normalised text (B, L, hidden) over text and frames.

        Args:
            hidden_states: after the layer's input norm.
            position_embeddings: cos and sin of the text.
            attention_mask: as transformers prepared it for this layer's attention implementation.
            past_key_values: text cache, with the visual K and V beside it.
            visual: what this pass knows about the frames; None in a pass without any.
            visual_norm: the layer's input norm, which the frames' features go through too.
            **kwargs: for the attention function.

        Returns:
            (B, L, hidden), and with eager attention the weights on the text keys.
        """
        q, k, v = self.project_text(hidden_states, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if visual is None:
            mixed, weights = self._attend_text(q, k, v, attention_mask, **kwargs)
            return self.output(mixed), weights
        if visual_norm is None:
            raise TypeError("visual_norm is missing: hyper attention normalises the frames with its layer's input norm")
        visual_k, visual_v = self.visual_states(visual, visual_norm, past_key_values)
        if self.fused:
            mixed, weights = self._attend_jointly(q, k, v, visual_k, visual_v, attention_mask, visual)
        else:
            text_out, weights = self._attend_text(q, k, v, attention_mask, **kwargs)
            mixed = self.mix(text_out, self._attend_frames(q, visual_k, visual_v, visual), visual.sees)
        return self.output(mixed), weights

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _attend_text(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, L, C): Qwen2's own self-attention, before the output projection."""
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self._dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return out.flatten(2), weights

    def _attend_frames(self, q: Tensor, k: Tensor, v: Tensor, visual: VisualInputs) -> Tensor:
        """(B, L, C): attention of every row over the frames it sees, with a softmax of its own; 0 without any."""
        samples = []
        for sample, blocks in enumerate(visual.blocks):
            parts = []
            for block in blocks:
                rows = q[sample : sample + 1, :, block.start : block.stop]
                if block.first_frame == block.stop_frame:
                    parts.append(torch.zeros_like(rows).transpose(1, 2))
                    continue
                keys = slice(block.first_frame * visual.tokens_per_frame, block.stop_frame * visual.tokens_per_frame)
                mask = visible_keys(visual, sample, block)
                parts.append(self._attend(rows, k[:, :, keys], v[:, :, keys], mask)[0])
            samples.append(torch.cat(parts, dim=1))
        return torch.cat(samples).flatten(2)

    def _attend_jointly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visual_k: Tensor,
        visual_v: Tensor,
        attention_mask: Tensor | None,
        visual: VisualInputs,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, L, C): one softmax over [visual keys; text keys]."""
        text_mask = text_visibility(attention_mask, q, k)
        samples, sample_weights = [], []
        for sample, blocks in enumerate(visual.blocks):
            parts, part_weights = [], []
            one = slice(sample, sample + 1)
            for block in blocks:
                keys = slice(block.first_frame * visual.tokens_per_frame, block.stop_frame * visual.tokens_per_frame)
                visible = visible_keys(visual, sample, block)
                mask_rows = None
                if text_mask is not None:
                    mask_rows = text_mask[sample % text_mask.shape[0], block.start : block.stop]
                mask = joint_mask(visible, keys.stop - keys.start, mask_rows, block.stop - block.start, k.shape[2])
                out, weights = self._attend(
                    q[one, :, block.start : block.stop],
                    torch.cat([visual_k[:, :, keys], k[one]], dim=2),
                    torch.cat([visual_v[:, :, keys], v[one]], dim=2),
                    mask,
                )
                parts.append(out)
                part_weights.append(None if weights is None else weights[..., keys.stop - keys.start :])
            samples.append(torch.cat(parts, dim=1))
            sample_weights.append(_joined(part_weights, dim=2))
        return torch.cat(samples).flatten(2), _joined(sample_weights, dim=0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(1, rows, H, D) of q (1, H, rows, D); mask (rows, keys), boolean (True: visible) or additive, or None."""
        if self.config._attn_implementation == "eager":
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            return eager_attention_forward(self, q, k, v, mask, scaling=self.scaling, dropout=self._dropout)
        if mask is not None and q.is_cuda:
            # With a mask and grouped heads torch has only its unfused path there; one block's keys are few enough.
            k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self._dropout, scale=self.scaling, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out.transpose(1, 2), None


class HyperDecoderLayer(Qwen2DecoderLayer):
    """Qwen2's decoder layer with hyper attention; its input norm serves the text and the frames' features."""

    def __init__(self, config: MPlugOwl3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = HyperAttention(config, layer_idx)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As Qwen2's; `visual` in the keyword arguments reaches the attention, together with the norm it needs."""
        return super().forward(hidden_states, *args, visual_norm=self.input_layernorm, **kwargs)


def _joined(weights: list[Tensor | None], dim: int) -> Tensor | None:
    present = [part for part in weights if part is not None]  # all of them, with eager attention, or none
    return torch.cat(present, dim) if present else None
