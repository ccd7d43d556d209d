"""MOSS-VL by dense attention, one sample and one frame at a time, from the description of the published model.

Positions are counted token by token, every frame goes through the tower alone, and a row's attention is over all visual
tokens of its sample with the hidden ones masked. Weights are those of the native model; its layers are not called, but
for the self-attention of the text and the blocks of the tower, which are transformers' own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_vl import modeling_qwen3_vl


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms and the tower's rotation compute in float64, which transformers' compute in float32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def rotated(*states: Tensor) -> tuple[Tensor, ...]:
        *states, cos, sin = states
        half = modeling_qwen3_vl.rotate_half
        return tuple(x * cos.unsqueeze(-2).double() + half(x) * sin.unsqueeze(-2).double() for x in states)

    monkeypatch.setattr(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", forward)
    monkeypatch.setattr(modeling_qwen3_vl, "apply_rotary_pos_emb_vision", rotated)


def positions_of(ids: list[int], image: int, sizes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the positions (3, L) of the text and (3, V) of the visual tokens; `sizes` are in merged patches."""
    counter, text, visual, frames = 0, [], [], iter(sizes)
    for token in ids:
        if token == image and (size := next(frames, None)) is not None:
            height, width = size
            visual += [(counter, counter + y, counter + x) for y in range(height) for x in range(width)]
            counter += max(height, width)
            visual.append((counter,) * 3)
        text.append((counter,) * 3)
        counter += 1
    return torch.tensor(text).T, torch.tensor(visual).reshape(-1, 3).T


def rotated(x: Tensor, positions: Tensor, config: Any) -> Tensor:
    """Rotate (heads, tokens, D) by positions (3, tokens): frequency j turns by the axis that the sections give it."""
    half, sections = config.head_dim // 2, config.rope_parameters["mrope_section"]
    theta = config.rope_parameters["rope_theta"]
    axes = [next((axis for axis in (1, 2) if j % 3 == axis and j < 3 * sections[axis]), 0) for j in range(half)]
    frequencies = 1.0 / theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim)
    angles = torch.stack([positions[axis].float() * frequencies[j] for j, axis in enumerate(axes)], -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rms(x: Tensor, norm: Any) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * y.to(x.dtype)


def features_of(model: Any, patches: Tensor, height: int, width: int) -> Tensor:
    """Return the visual tokens of one frame, and the separator."""
    tower, states = model.model.visual, []
    hooks = [block.register_forward_hook(lambda _, __, out: states.append(out)) for block in tower.blocks]
    tower(patches, torch.tensor([[1, height, width]]))
    for hook in hooks:
        hook.remove()
    merger, chosen = tower.merger, [len(states) - 1, *sorted(tower.config.deepstack_visual_indexes)]
    normed = [
        F.layer_norm(states[block], states[block].shape[-1:], norm.weight, norm.bias, 1e-6)
        for block, norm in zip(chosen, merger.norms, strict=True)
    ]
    merged = torch.cat(normed, -1).reshape(len(patches) // 4, -1)
    hidden = F.gelu(F.linear(merged, merger.linear_fc1.weight, merger.linear_fc1.bias))
    tokens = F.linear(hidden, merger.linear_fc2.weight, merger.linear_fc2.bias)
    return torch.cat([tokens, model.model.separator_token[None]])


def _cross_layer(layer: Any, x: Tensor, y: Tensor, at: Tensor, visual_at: Tensor, visible: Tensor) -> Tensor:
    """x (L, C), y (V, C), visible (L, V) bool."""
    attention, config = layer.cross_attn, layer.cross_attn.config
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def split(z: Tensor, linear: Any, count: int) -> Tensor:
        return F.linear(z, linear.weight).view(-1, count, dim).transpose(0, 1)

    q = rotated(rms(split(rms(x, layer.input_layernorm), attention.q_proj, heads), attention.q_norm), at, config)
    k = rotated(rms(split(y, attention.k_proj, groups), attention.k_norm), visual_at, config)
    k, v = (z.repeat_interleave(heads // groups, 0) for z in (k, split(y, attention.v_proj, groups)))
    scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~visible, torch.finfo(q.dtype).min)
    attended = F.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), attention.o_proj.weight)
    rows = visible.any(1)[:, None].to(x.dtype)
    x = x + layer.cross_attn_attn_gate.tanh() * rows * attended
    return x + layer.cross_attn_mlp_gate.tanh() * rows * layer.mlp(rms(x, layer.post_attention_layernorm))


def sample_logits(model: Any, ids: Tensor, patches: Tensor, grids: list[tuple[int, int]]) -> Tensor:
    """Return the logits (L, vocabulary) of one text without padding; `grids` are of its frames, in patches."""
    image, parts = model.config.image_token_id, patches.split([h * w for h, w in grids])
    text, visual = positions_of(ids.tolist(), image, [(h // 2, w // 2) for h, w in grids])
    x = model.get_input_embeddings().weight[ids]
    decoder = model.model.language_model
    frames = [features_of(model, part, *grid) for part, grid in zip(parts, grids, strict=True)]
    owner = torch.tensor([n for n, frame in enumerate(frames) for _ in frame], dtype=torch.long)
    visible = (ids == image).long().cumsum(0)[:, None] > owner
    rotary = decoder.rotary_emb(x[None], text[:, None])
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
    for layer in decoder.layers:
        if hasattr(layer, "self_attn"):
            x = layer(x[None], position_embeddings=rotary, attention_mask=mask)[0]
        elif frames:
            x = _cross_layer(layer, x, torch.cat(frames), text, visual, visible)
    return F.linear(rms(x, decoder.norm), model.lm_head.weight)
