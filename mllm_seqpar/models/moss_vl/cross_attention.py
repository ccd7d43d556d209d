"""The decoder layers of MOSS-VL that attend to frames.

Such a layer stands in place of a self-attention layer. Its gates are the tanh of learned numbers. A row that attends to
no frame passes through it unchanged.

Shape legend: B samples, L text tokens, V visual tokens of all frames, H heads, G KV heads, D head dim, C channels.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextMLP,
    Qwen3VLTextRMSNorm,
    Qwen3VLTextRotaryEmbedding,
)

from mllm_seqpar.models.causal_lm import rotate
from mllm_seqpar.models.mplug_owl3.hyper_attention import VisualInputs, attend_frames, attend_rows
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.runtime.projections import KVProjection

from .configuration import MossVLTextConfig
from .layout import MossVLLayout


class MossVLVisual(VisualInputs):
    """The visual features of a pass, and what each row attends to; see `VisualInputs`.

    Each visual token is a unit, because frames differ in size.

    Attributes:
        index: (V, 1, 3), the positions of the visual tokens; None while decoding, when K and V are cached.
    """

    index: Tensor | None = None

    def __init__(self, layout: MossVLLayout, *args: Any, **kwargs: Any) -> None:
        super().__init__(layout, *args, **kwargs)
        if self.embeds is not None:
            self.index = layout.visual_positions().unsqueeze(1).to(self.embeds.device)

    @classmethod
    def of(cls, layout: MossVLLayout, rows: tuple[Tensor, Tensor], features: Tensor) -> "MossVLVisual":
        """Return the inputs of rows that attend to frames first <= f < stop; `features` are (V, C)."""
        first, stop = rows
        units = cls.units_of(layout, first), cls.units_of(layout, torch.maximum(first, stop))
        return cls(layout, units, 1, features.unsqueeze(1))

    @staticmethod
    def units_of(layout: MediaLayout, frames: Tensor) -> Tensor:
        """Return the visual tokens before these frames."""
        assert isinstance(layout, MossVLLayout)
        return torch.nn.functional.pad(layout.tokens.cumsum(0), (1, 0))[frames]


class MossVLCrossAttention(nn.Module):
    """Attention of the text to frames. Queries and keys are normalised, then rotated by their positions."""

    is_causal = False

    def __init__(self, config: MossVLTextConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling, self.attention_dropout = self.head_dim**-0.5, config.attention_dropout
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.attention_bias)
        self.q_norm = Qwen3VLTextRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3VLTextRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3VLTextRotaryEmbedding(config)  # has no parameters and no entry in the state dict

    def queries(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Normalised text (B, L, C) -> q (B, H, L, D), rotated."""
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(q, (x[:, None] for x in position_embeddings))

    @property
    def dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def visual_projection(self) -> KVProjection:
        """Return the projection of features (units, tokens, C) to K and V; it takes positions (units, tokens, 3)."""
        return KVProjection((self.k_proj, self.v_proj), self.head_dim, key_norm=self.k_norm, rotate=self.rotate_visual)

    def rotate_visual(self, k: Tensor, index: Tensor, transposed: bool = False) -> Tensor:
        """Rotate keys (units, tokens, G, D) by their positions, or apply the transpose of this linear map."""
        return rotate(k, (x[:, :, None] for x in self.rotary_emb(k, index.permute(2, 0, 1))), transposed)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        visual: MossVLVisual,
        **kwargs: Any,
    ) -> Tensor:
        """Normalised text (B, L, C) -> (B, L, C); 0 for rows that attend to no frame, before the output projection."""
        q = self.queries(hidden_states, position_embeddings)

        def project() -> tuple[Tensor, Tensor]:
            assert visual.embeds is not None and visual.index is not None
            return self.visual_projection()(visual.embeds, visual.index)

        states = visual.states(self.layer_idx, project)
        attend = functools.partial(attend_rows, scaling=self.scaling, dropout=self.dropout)
        attended: Tensor = self.o_proj(attend_frames(q, states, visual, attend))
        return attended


class MossVLCrossAttentionDecoderLayer(GradientCheckpointingLayer):
    """A gated decoder layer that attends to frames in place of the text."""

    def __init__(self, config: MossVLTextConfig, layer_idx: int) -> None:
        super().__init__()
        self.cross_attn = MossVLCrossAttention(config, layer_idx)
        self.mlp = Qwen3VLTextMLP(config)
        self.input_layernorm = Qwen3VLTextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3VLTextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_states: Tensor, attends_to_frames: Tensor, **kwargs: Any) -> Tensor:
        """(B, L, C) -> (B, L, C). `attends_to_frames` (B, L) bool: other rows are returned unchanged."""
        rows = attends_to_frames[..., None].to(hidden_states.dtype)
        attended = self.cross_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.cross_attn_attn_gate.tanh() * (rows * attended)
        inner = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.cross_attn_mlp_gate.tanh() * (rows * inner)
