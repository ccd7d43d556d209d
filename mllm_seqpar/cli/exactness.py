"""The exactness check of `mllm-seqpar doctor`, with random inputs and a tiny model; it takes seconds.

Every rank computes the same dense reference in float64, and compares its own shard or the average over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, SiglipVisionConfig

from mllm_seqpar.attention import lv_xattn, ring_attention
from mllm_seqpar.comm import Communicator
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patching import patch_model
from mllm_seqpar.sharding import frame_range

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative error, in the Euclidean norm of a tensor. A rank that is left out or a block in the wrong place
gives errors above 0.1."""

HEADS, KV_HEADS, DIM = 4, 2, 64
ROWS, FRAMES_PER_RANK, TOKENS = 16, 3, 8
IMAGE_TOKEN, IMAGE_SIZE, PATCH = 63, 28, 4


def attention_errors(comm: Communicator, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield (algorithm, largest relative error of o, dq, dk and dv over all ranks)."""
    generator = torch.Generator().manual_seed(0)
    frames = FRAMES_PER_RANK * comm.size + 1  # one rank has more frames than the others
    sizes = [(HEADS, ROWS * comm.size), *[(KV_HEADS, frames * TOKENS)] * 2, (HEADS, ROWS * comm.size)]
    q, k, v, do = (torch.randn(1, h, s, DIM, generator=generator).to(device, dtype) for h, s in sizes)
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    all_k, all_v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:])
    o = torch.softmax(leaves[0] @ all_k.mT * DIM**-0.5, -1) @ all_v
    exact = o.detach(), *torch.autograd.grad(o, leaves, do.double())
    span = frame_range(frames, comm)
    rows, keys = slice(ROWS * comm.rank, ROWS * (comm.rank + 1)), slice(span.start * TOKENS, span.stop * TOKENS)
    for name, attend in (("lv-xattn", lv_xattn), ("ring", ring_attention)):
        leaves = [x[:, :, part].detach().requires_grad_() for x, part in ((q, rows), (k, keys), (v, keys))]
        o = attend(*leaves, group=comm)
        results = [o.detach(), *torch.autograd.grad(o, leaves, do[:, :, rows])]
        parts = [x[:, :, part] for x, part in zip(exact, (rows, rows, keys, keys), strict=True)]
        yield name, _largest(comm, [relative(x, y) for x, y in zip(results, parts, strict=True)])


def model_errors(comm: Communicator, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield (model, largest relative error of the loss and the gradients over all ranks) of tiny patched models."""
    frames = 2 * comm.size + 1  # one rank has more frames than the others
    for name, make in (
        ("tiny model with cross-attention", _with_cross_attention),
        ("tiny decoder-only model", _decoder_only),
    ):
        model, inputs = make(frames)
        exact = copy.deepcopy(model).double()
        loss = exact(**{key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}).loss
        loss.backward()
        patch_model(model.to(device), group=comm)
        sharded = model(**{key: x.to(device) for key, x in inputs.items()}).loss
        sharded.backward()
        errors = [relative(sharded.detach(), loss.detach())]
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            if theirs.grad is not None:
                grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
                # The absolute term is for gradients that are 0 except for rounding, such as that of a bias of keys.
                difference = comm.all_reduce(grad).cpu().double() / comm.size - theirs.grad
                errors.append(float(difference.norm() / (theirs.grad.norm() + 1e-3)))
        yield name, _largest(comm, errors)


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    return float((x.double().to(exact.device) - exact).norm() / exact.norm())


def _largest(comm: Communicator, errors: list[float]) -> float:
    """Return the largest error of all ranks; infinity if one is not a number."""
    largest = max(error if error == error else float("inf") for error in errors)
    return max(map(float, comm.gather_texts(str(largest))))


def _with_cross_attention(frames: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a model of two layers, one of them with cross-attention, whose gates are open, and one sample.

    The sample has a placeholder for each frame, some text, and labels for all of it.
    """
    width = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    vision = SiglipVisionConfig(**width, num_attention_heads=2, image_size=IMAGE_SIZE, patch_size=14)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hyper_layers": [1], "gate": "vector"}
    config = MPlugOwl3Config(**width, **heads, vocab_size=64, image_token_id=IMAGE_TOKEN, vision_config=vision)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE_TOKEN, (1, 2 * frames + 8), generator=generator)
    ids[:, 1 : 2 * frames : 2] = IMAGE_TOKEN
    pixels = torch.randn(frames, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    inputs = {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}
    return _spread_weights(MPlugOwl3ForConditionalGeneration(config)), inputs


def _decoder_only(frames: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a Qwen3-VL of two layers, whose features of the tower's first layer go to the decoder's first layer.

    The sample has images of four placeholders each, some text, and labels for all of it.
    """
    width = {"hidden_size": 64, "intermediate_size": 96}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": PATCH, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=width | text | {"rope_parameters": rope, "vocab_size": 64, "pad_token_id": 0},
        vision_config=width | vision | {"num_position_embeddings": 16},
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 1,
        vision_start_token_id=1,
        vision_end_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE_TOKEN - 1, (1, 6 * frames + 8), generator=generator)
    ids[:, : 6 * frames] = torch.tensor([5, *[IMAGE_TOKEN] * 4, 7]).repeat(frames)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(frames * 16, 3 * 2 * PATCH**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * frames),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "labels": ids.clone(),
    }
    return _spread_weights(Qwen3VLForConditionalGeneration(config)), inputs


def _spread_weights(model: Any) -> Any:
    """Return the model in training mode, with weights that make attention far from uniform."""
    model.float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # as initialised, every row averages all keys, which would hide errors
        for weight in model.parameters():
            scale = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + (0.5 if weight.dim() == 1 else 0.0))
    return model.train()
