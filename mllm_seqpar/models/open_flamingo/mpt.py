"""MPT with LayerNorms on queries and keys (`attn_config.qk_ln`), which transformers' MPT reads and ignores.

MPT-1B, the language model of OpenFlamingo-3B, was trained with them. Each spans the full width, before the heads are
split, and has no bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MptConfig, MptForCausalLM
from transformers.models.mpt.modeling_mpt import MptAttention


class QKNormMptAttention(MptAttention):
    """Attention of MPT with normalised queries and keys. Shapes: hidden (B, s, C), q, k and v (B, H, s, D)."""

    def __init__(self, config: MptConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_ln = nn.LayerNorm(self.hidden_size, eps=config.layer_norm_epsilon, bias=False)
        self.k_ln = nn.LayerNorm(self.hidden_size, eps=config.layer_norm_epsilon, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, s, C) and the weights (B, H, s, t); `attention_mask` is True where a key is hidden."""
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.chunk(3, dim=2)
        q, k = self.q_ln(q).to(v.dtype), self.k_ln(k).to(v.dtype)
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scores = q @ k.mT * self.softmax_scale + position_bias[:, :, -k.shape[2] :]
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, torch.finfo(q.dtype).min)
        weights = scores.float().softmax(dim=-1).to(v.dtype)
        weights = nn.functional.dropout(weights, p=self.attn_dropout_p, training=self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class QKNormMptForCausalLM(MptForCausalLM):
    """`MptForCausalLM` for a config with `attn_config.qk_ln`."""

    def __init__(self, config: MptConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.transformer.blocks):
            block.attn = QKNormMptAttention(config, index)
        self.post_init()
