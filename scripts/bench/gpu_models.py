"""The models of `gpu.py`: published sizes, random weights, inputs on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tiny_models import SPECIAL_TOKENS, Sizes, random_model, tiny_model
from tiny_models.mplug_owl3 import tiny_text
from tiny_models.qwen2_5_vl import END, START, TOKENS, VIDEO

Timer = Callable[[dict[str, Callable[[], object]]], dict[str, float]]
TRAINED = "language_model"
"""The part of both models that a step trains."""


class Model:
    name: str
    model: Any
    forwards: Sequence[tuple[int, int]]  # frames and text tokens of the passes
    steps: Sequence[tuple[int, int]]
    growth: tuple[tuple[int, int], int]  # two numbers of frames and the text tokens, for the growth of memory
    unpatched_up_to: Mapping[str, int]  # by pass, the most frames of the unpatched model, whose masks are dense
    cross_attention = True

    def inputs(self, frames: int, text: int) -> dict[str, Any]:
        """Return the arguments of a forward pass without labels."""
        raise NotImplementedError

    def tower(self, medians_ms: Timer) -> dict[str, Any]:
        raise NotImplementedError

    def modes(self, run: str) -> Sequence[str]:
        stored = ("stored",) if run == "step" and self.cross_attention else ()
        return "patched", *stored, "unpatched"

    @torch.no_grad()
    def forward(self, given: dict[str, Any]) -> Tensor:
        return self.model(**given, use_cache=False, logits_to_keep=1).logits

    def train(self) -> None:
        self.model.train().gradient_checkpointing_enable({"use_reentrant": False})
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(TRAINED in name)

    def step(self, given: dict[str, Any]) -> Tensor:
        labels = torch.where(given.get("mm_token_type_ids", 0 * given["input_ids"]) > 0, -100, given["input_ids"])
        loss = self.model(**given, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def generate(self, given: dict[str, Any], tokens: int) -> Tensor:
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return self.model.generate(**given, **settings)[:, given["input_ids"].shape[1] :]


def build(make: Callable[[], Any], device: str, dtype: torch.dtype) -> Any:
    """Return what `make` returns, with weights made in `dtype` on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make().to(dtype)
    finally:
        torch.set_default_dtype(before)


class Owl(Model):
    """mPLUG-Owl3-7B. Features of the frames are given."""

    name = "mplug-owl3-7b"

    def __init__(self, device: str, dtype: torch.dtype, tiny: bool) -> None:
        text: dict[str, Any] = {"width": 3584, "mlp": 18944, "layers": 28, "heads": 28, "kv_heads": 4}
        text |= {"cross_layers": (0, 8, 16, 24), "vocabulary": 151851}
        vision = {"image": 378, "tower_width": 1152, "tower_mlp": 4304, "tower_layers": 27, "tower_heads": 16}
        if tiny:
            text |= {"width": 64, "mlp": 96, "layers": 4, "heads": 4, "kv_heads": 2, "cross_layers": (0, 2)}
            text, vision = text | {"vocabulary": 8192}, {"image": 56}
        sizes = Sizes(**text, **vision)
        self.model = build(partial(tiny_model, "mplug_owl3", sizes), device, dtype)
        self.forwards = [(256, 512), (1024, 1280), (4096, 4352)] if not tiny else [(8, 32)]
        self.steps = [(64, 512), (256, 1024), (1024, 2048)] if not tiny else [(8, 32)]
        self.growth = ((128, 384), 1024) if not tiny else ((4, 64), 80)
        self.unpatched_up_to, self.tower_frames = {"forward": 1024, "step": 256}, 64 if not tiny else 2

    def inputs(self, frames: int, text: int) -> dict[str, Any]:
        like, config = next(self.model.parameters()), self.model.config
        tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        embeds = torch.randn(frames, tokens, config.hidden_size, device=like.device, dtype=like.dtype)
        return {"input_ids": tiny_text(frames, length=text).to(like.device), "image_embeds": embeds}

    def tower(self, medians_ms: Timer) -> dict[str, Any]:
        like, vision = next(self.model.parameters()), self.model.config.vision_config
        size, count, chunk = vision.image_size, self.tower_frames, 32
        pixels = torch.randn(count, 3, size, size, device=like.device, dtype=like.dtype)

        @torch.no_grad()
        def encode() -> None:
            for part in pixels.split(chunk):
                self.model.vision_model(part)

        seconds = medians_ms({"tower": encode})["tower"] / 1e3
        tokens, width, layers = (size // vision.patch_size) ** 2, vision.hidden_size, vision.num_hidden_layers
        layer = 2 * (4 * width**2 + 2 * width * vision.intermediate_size) + 4 * tokens * width
        row = {"measure": "tower", "model": self.name, "frames": count, "chunk": chunk, "frames_per_s": count / seconds}
        return row | {"tflops": count * tokens * layers * layer / seconds / 1e12}


class Qwen(Model):
    """Qwen2.5-VL-7B on a video of 640 x 360 pixels; frames are temporal patches of 299 tokens, and pixels are given."""

    name = "qwen2_5_vl_7b"
    cross_attention = False

    def __init__(self, device: str, dtype: torch.dtype, tiny: bool) -> None:
        text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        text |= {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000}
        vision = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14}
        vision |= {"out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
        sections, self.grid = [16, 24, 24], (26, 46)
        if tiny:
            text |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
            text |= {"num_key_value_heads": 2, "vocab_size": 256}
            vision |= {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
            vision |= {"fullatt_block_indexes": [1]}
            sections, self.grid = [2, 3, 3], (4, 4)
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        config = Qwen2_5_VLConfig(
            vision_config=vision, text_config=text | SPECIAL_TOKENS | {"rope_parameters": rope}, **TOKENS
        )
        rules = {"norm.*weight$|ln_q": (1.0, 0.2), "bias$": (0.0, 0.2)}
        make = partial(random_model, Qwen2_5_VLForConditionalGeneration, config, rules, seed=0)
        self.model = build(make, device, dtype)
        self.forwards = [(32, 64), (128, 64)] if not tiny else [(4, 8)]
        self.steps = [(16, 64), (64, 64)] if not tiny else [(4, 8)]
        self.growth = ((16, 48), 64) if not tiny else ((4, 64), 8)
        self.unpatched_up_to = {"forward": 128, "step": 64}

    def inputs(self, frames: int, text: int) -> dict[str, Any]:
        like, vision = next(self.model.parameters()), self.model.config.vision_config
        height, width = self.grid
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(3, 90, (text,), generator=generator).tolist()
        visual = [START, *[VIDEO] * (frames * height * width // 4), END]
        ids = torch.tensor([words[: text // 2] + visual + words[text // 2 :]], device=like.device)
        channels = 3 * 2 * vision.patch_size**2
        pixels = torch.randn(frames * height * width, channels, device=like.device, dtype=like.dtype)
        return {
            "input_ids": ids,
            "mm_token_type_ids": 2 * (ids == VIDEO).long(),
            "pixel_values_videos": pixels,
            "video_grid_thw": torch.tensor([[frames, height, width]], device=like.device),
            "second_per_grid_ts": torch.tensor([1.0]),
        }

    def tower(self, medians_ms: Timer) -> dict[str, Any]:
        frames = self.steps[0][0]
        given = self.inputs(frames, self.steps[0][1])
        pixels, grid = given["pixel_values_videos"], given["video_grid_thw"]
        run = torch.no_grad()(lambda: self.model.model.visual(pixels, grid_thw=grid))
        seconds = medians_ms({"tower": run})["tower"] / 1e3
        return {"measure": "tower", "model": self.name, "frames": frames, "frames_per_s": frames / seconds}


def close(x: Tensor, y: Tensor, allowed: float) -> bool:
    return bool((x.float() - y.float()).norm() <= allowed * y.float().norm())


MODELS: dict[str, Callable[[str, torch.dtype, bool], Model]] = {model.name: model for model in (Owl, Qwen)}
