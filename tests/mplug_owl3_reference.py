"""mPLUG-Owl3 once more, dense, from the description of the checkpoints and a state dict alone; no model code.

One sample at a time and without padding, masks filled by loops over rows and frames, every score materialised. The
dtype is that of the state dict: give it float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The sizes that do not follow from a state dict."""

    gate: str | None
    heads: int
    kv_heads: int
    head_dim: int
    hyper_layers: tuple[int, ...]
    vision_heads: int
    vision_layers: int
    layers: int
    patch: int = 14
    theta: float = 10000.0
    eps: float = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, state: State, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)
    return centred / deviation * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(x: Tensor, state: State, name: str) -> Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def rotate(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """x (heads, tokens, head_dim): the pair (i, i + half) turned by position / theta^(i / half)."""
    half = x.shape[-1] // 2
    position = torch.tensor(positions, dtype=x.dtype)[:, None]
    angle = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat(
        [left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()],
        dim=-1,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """(rows, heads x head_dim); q (heads, rows, d), k and v (kv heads, keys, d), visible (rows, keys)."""
    per_group = q.shape[0] // k.shape[0]
    outputs = []
    for head in range(q.shape[0]):
        scores = q[head] @ k[head // per_group].T / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible, -math.inf)
        outputs.append(torch.softmax(scores, dim=-1) @ v[head // per_group])
    return torch.cat(outputs, dim=-1)


def split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], heads, -1).transpose(0, 1)


def encode(state: State, numbers: Numbers, frames: Tensor) -> Tensor:
    """(frames, tokens, hidden): SigLIP without its last layer, then one linear layer or two to the text's width."""
    kernel = state["vision_model.embeddings.patch_embedding.weight"]
    size = numbers.patch
    encoded = []
    for frame in frames:
        patches = [
            frame[:, y : y + size, x : x + size].reshape(-1)
            for y in range(0, frame.shape[1], size)
            for x in range(0, frame.shape[2], size)
        ]
        h = torch.stack(patches) @ kernel.reshape(kernel.shape[0], -1).T
        h = h + state["vision_model.embeddings.patch_embedding.bias"]
        h = h + state["vision_model.embeddings.position_embedding.weight"]
        for index in range(numbers.vision_layers - 1):
            name = f"vision_model.encoder.layers.{index}"
            x = layer_norm(h, state, f"{name}.layer_norm1")
            q, k, v = (split(linear(x, state, f"{name}.self_attn.{part}_proj"), numbers.vision_heads) for part in "qkv")
            everything = torch.ones(len(x), len(x), dtype=torch.bool)
            h = h + linear(attend(q, k, v, everything), state, f"{name}.self_attn.out_proj")
            x = linear(layer_norm(h, state, f"{name}.layer_norm2"), state, f"{name}.mlp.fc1")
            h = h + linear(F.gelu(x, approximate="tanh"), state, f"{name}.mlp.fc2")
        if "vision2text_model.weight" in state:
            encoded.append(linear(h, state, "vision2text_model"))
        else:
            x = linear(h, state, "vision2text_model.0")
            x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
            encoded.append(linear(x, state, "vision2text_model.2"))
    return torch.stack(encoded)


def hyper_attention(
    state: State, numbers: Numbers, name: str, x: Tensor, y: Tensor | None, placeholders: list[int], norm: Tensor
) -> Tensor:
    """Attention of one layer: x (rows, hidden), normalised; y (frames, tokens, hidden), not normalised, or None."""
    rows = len(x)
    q = rotate(split(linear(x, state, f"{name}.q_proj"), numbers.heads), range(rows), numbers.theta)
    k = rotate(split(linear(x, state, f"{name}.k_proj"), numbers.kv_heads), range(rows), numbers.theta)
    v = split(linear(x, state, f"{name}.v_proj"), numbers.kv_heads)
    causal = torch.zeros(rows, rows, dtype=torch.bool)
    for row in range(rows):
        for key in range(row + 1):
            causal[row, key] = True
    if y is None or not placeholders:
        return linear(attend(q, k, v, causal), state, f"{name}.o_proj")

    tokens = y.shape[1]
    gated = numbers.gate is not None
    sees = torch.zeros(rows, len(placeholders), dtype=torch.bool)
    for row in range(rows):
        for frame, placeholder in enumerate(placeholders):
            sees[row, frame] = row > placeholder if gated else row >= placeholder
    visible = sees.repeat_interleave(tokens, dim=1)
    kv = linear(rms_norm(y, norm, numbers.eps), state, f"{name}.v_kv_proj")
    kv = kv.reshape(-1, numbers.kv_heads, 2, numbers.head_dim)
    positions = [p + 1 if gated else p for p in placeholders for _ in range(tokens)]
    visual_k = rotate(kv[:, :, 0].transpose(0, 1), positions, numbers.theta)
    visual_v = kv[:, :, 1].transpose(0, 1)
    if not gated:
        keys, values = torch.cat([visual_k, k], dim=1), torch.cat([visual_v, v], dim=1)
        return linear(attend(q, keys, values, torch.cat([visible, causal], dim=1)), state, f"{name}.o_proj")

    text = attend(q, k, v, causal)
    mixed = []
    for row in range(rows):
        if not sees[row].any():
            mixed.append(text[row])
            continue
        one = slice(row, row + 1)
        visual = attend(q[:, one], visual_k, visual_v, visible[one])[0]
        if numbers.gate == "vector":
            share = 1 / (1 + torch.exp(-state[f"{name}.gate"]))
        else:
            heads = [linear(head, state, f"{name}.gate_proj.0") for head in text[row].split(numbers.head_dim)]
            share = 1 / (1 + torch.exp(-torch.cat(heads)))
        mixed.append(text[row] * (1 - share) + visual * share)
    return linear(torch.stack(mixed), state, f"{name}.o_proj")


def reference_logits(
    state: State, numbers: Numbers, input_ids: list[int], placeholders: list[int], frames: Tensor | None
) -> Tensor:
    """(tokens, vocabulary) of one sample. `frames` (n, 3, H, W), one for each of the `placeholders`' positions."""
    y = None if frames is None or not len(frames) else encode(state, numbers, frames)
    h = state["language_model.model.embed_tokens.weight"][torch.tensor(input_ids)]
    for index in range(numbers.layers):
        name = f"language_model.model.layers.{index}"
        norm = state[f"{name}.input_layernorm.weight"]
        is_hyper = index + 1 in numbers.hyper_layers
        x = rms_norm(h, norm, numbers.eps)
        h = h + hyper_attention(state, numbers, f"{name}.self_attn", x, y if is_hyper else None, placeholders, norm)
        x = rms_norm(h, state[f"{name}.post_attention_layernorm.weight"], numbers.eps)
        inner = F.silu(linear(x, state, f"{name}.mlp.gate_proj")) * linear(x, state, f"{name}.mlp.up_proj")
        h = h + linear(inner, state, f"{name}.mlp.down_proj")
    h = rms_norm(h, state["language_model.model.norm.weight"], numbers.eps)
    return linear(h, state, "language_model.lm_head")


def reference_loss(logits: list[Tensor], labels: list[list[int]]) -> Tensor:
    """Mean over all targets of all samples of -log p(next token); a label of -100 is no target."""
    losses = [
        -torch.log_softmax(rows[position - 1], dim=-1)[label]
        for rows, sample in zip(logits, labels, strict=True)
        for position, label in enumerate(sample)
        if position > 0 and label != -100
    ]
    return torch.stack(losses).mean()
