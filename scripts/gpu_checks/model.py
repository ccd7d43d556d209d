"""An mPLUG-Owl3 with the width of the 7B model, few layers and random weights, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import SiglipVisionConfig

from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration

IMAGE_TOKEN = 3
TEXT = {
    "cuda": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "cpu": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
VISION = {
    "cuda": {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "image_size": 378},
    "cpu": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 56},
}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def build(device: str, gate: str | None = None) -> MPlugOwl3ForConditionalGeneration:
    """Return a model of two layers, the first of them a hyper layer, and a vision tower of two layers."""
    torch.manual_seed(0)
    vision = SiglipVisionConfig(**VISION[device], num_hidden_layers=2, patch_size=14)
    options = {"num_hidden_layers": 2, "hyper_layers": [1], "vocab_size": 8192, "image_token_id": IMAGE_TOKEN}
    config = MPlugOwl3Config(**TEXT[device], **options, gate=gate, vision_config=vision)
    with torch.device(device):
        model = MPlugOwl3ForConditionalGeneration(config).to(DTYPE[device]).train()
    # As initialised, scores are close to 0 and every row averages all keys, which would hide errors of attention.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".gate"):
                weight.normal_()
            elif weight.dim() > 1:
                weight.normal_(0.0, 0.5 if "embed" in name else weight[0].numel() ** -0.5)
    return model


def text(frames: int, length: int, device: str) -> dict[str, Tensor]:
    """Return tokens (1, length) with evenly spaced placeholders of the frames, and labels after the last of them."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 8192, (1, length), generator=g)
    ids[0, torch.linspace(1, length // 2, frames).long()] = IMAGE_TOKEN
    assert int((ids == IMAGE_TOKEN).sum()) == frames
    labels = ids.clone()
    labels[:, : length // 2 + 1] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def pixels(frames: int, device: str) -> dict[str, Tensor]:
    """Return random pixel values (frames, 3, H, W)."""
    size = VISION[device]["image_size"]
    g = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(frames, 3, size, size, generator=g).to(device, DTYPE[device])}


def embeds(frames: int, device: str) -> dict[str, Tensor]:
    """Return random visual features (frames, tokens, hidden), the output of `encode_frames`."""
    tokens = (VISION[device]["image_size"] // 14) ** 2
    hidden = TEXT[device]["hidden_size"]
    return {"image_embeds": torch.randn(frames, tokens, hidden, device=device, dtype=DTYPE[device])}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
