"""Models of benchmarks: the real class of each family, with the sizes of `configs/models` scaled down.

All widths are divided by one number. The numbers of heads, of tokens per frame and of cross-attention layers stay, so
the visual features, K and V of a frame keep their published proportions. There are fewer decoder layers without
cross-attention and a smaller vocabulary; no byte that grows with the video depends on these. A step starts at visual
features that require a gradient, as the output of a trained projector or resampler does. The vision tower is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from small_models import MEDIA, TEXT, WORDS, make_flamingo, make_idefics, make_mllama, make_owl, random_weights
from torch import Tensor, nn

from mllm_seqpar import FrameShard
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
TOWER = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1}
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    sizes: ModelSizes
    model: Any
    # ids (1, L), this rank's features (f, tokens, width), its frame shard -> arguments of forward without labels
    inputs: Callable[[Tensor, Tensor, FrameShard], Inputs]

    def arguments(self, text: int, features: Tensor, shard: FrameShard) -> Inputs:
        """Return the arguments of forward: one placeholder per frame, then words; the second half has labels."""
        ids = torch.randint(3, WORDS - 2, (1, text), generator=torch.Generator().manual_seed(1))
        ids[:, : shard.total] = MEDIA
        labels = ids.clone()
        labels[:, : max(text // 2, shard.total)] = -100
        return self.inputs(ids.to(features.device), features, shard) | {"labels": labels.to(features.device)}


def scaled(name: str, scale: int, layers: int) -> ModelSizes:
    """Return the sizes of `configs/models/<name>.yaml` with all widths divided by `scale` and `layers` layers."""

    def divided(part: Any, *widths: str) -> Any:
        return part and replace(part, **{width: getattr(part, width) // scale for width in widths})

    model = read_model(CONFIGS / f"{name}.yaml")
    return replace(
        model,
        text=replace(divided(model.text, "hidden", "head_dim", "mlp_inner"), layers=layers, vocabulary=WORDS),
        cross=divided(model.cross, "head_dim", "visual_dim", "mlp_inner"),
        vision=divided(model.vision, "width", "mlp_inner"),
        resampler=divided(model.resampler, "head_dim", "mlp_inner"),
        projector=model.projector and tuple(channels // scale for channels in model.projector),
    )


def mplug_owl3(scale: int, name: str = "mplug-owl3-7b", layers: int = 8) -> Subject:
    """Build mPLUG-Owl3, gated: every second layer is a hyper layer. 7B has 28 query heads, 4 KV heads, 28 layers."""
    sizes = scaled(name, scale, layers)
    tower = TOWER | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    hyper_layers = list(range(1, layers, 2))
    model = make_owl(_text(sizes), kv_heads=sizes.text.kv_heads, hyper_layers=hyper_layers, tower=tower)

    def inputs(ids: Tensor, features: Tensor, shard: FrameShard) -> Inputs:
        return {"input_ids": ids, "image_embeds": features, "visual_shard": shard}

    return Subject(sizes, model, inputs)


def open_flamingo(scale: int, name: str = "open-flamingo-3b", layers: int = 24, every: int = 1) -> Subject:
    """Build OpenFlamingo over LLaMA: 8 heads, cross-attention to all frames before every `every`-th layer."""
    sizes = scaled(name, scale, layers)
    # The MLPs of LLaMA are gated; those of MPT, which the published model uses, are not.
    sizes = replace(sizes, text=replace(sizes.text, mlp_matrices=3))
    cross = sizes.cross
    model = make_flamingo(_text(sizes), nn.Identity(), cross.visual_dim, every=every)
    from open_flamingo.src.helpers import MaskedCrossAttention  # after make_flamingo, which works without open_clip

    shape = {"dim": sizes.text.hidden, "dim_visual": cross.visual_dim, "dim_head": cross.head_dim, "heads": cross.heads}
    for block in filter(
        None, model.lang_encoder.gated_cross_attn_layers
    ):  # the model class takes neither heads nor head_dim
        block.attn = MaskedCrossAttention(**shape, only_attend_immediate_media=False)

    def inputs(ids: Tensor, features: Tensor, shard: FrameShard) -> Inputs:
        return {"lang_x": ids, "attention_mask": torch.ones_like(ids), "vision_x": features, "visual_shard": shard}

    return Subject(sizes, random_weights(model), inputs)


def idefics(scale: int) -> Subject:
    """Build IDEFICS-9B: 64 keys per frame, 32 heads, 8 cross-attention blocks; 8 of 32 decoder layers."""
    sizes = scaled("idefics-9b", scale, layers=8)
    resampler = sizes.resampler
    assert resampler is not None
    tower = TOWER | {"embed_dim": sizes.cross.visual_dim, "intermediate_size": 64, "num_attention_heads": 4}
    model = make_idefics(_text(sizes), interval=1, tower=tower, heads=resampler.heads, head_dim=resampler.head_dim)

    def inputs(ids: Tensor, features: Tensor, shard: FrameShard) -> Inputs:
        visible = torch.ones(1, ids.shape[1], shard.total, dtype=torch.long, device=ids.device)
        arguments = {"input_ids": ids, "image_attention_mask": visible}
        return arguments | {"perceiver_embeddings": features, "visual_shard": shard}

    return Subject(sizes, model, inputs)


def mllama(scale: int, name: str = "llama-3.2-11b-vision", layers: int = 4) -> Subject:
    """Build Llama 3.2 Vision: each self-attention layer precedes one with cross-attention. 11B has 32 and 8 heads."""
    sizes = scaled(name, scale, layers)
    tower = {"hidden_size": 32, "attention_heads": 2, "intermediate_size": 48, "vision_output_dim": 64}
    tower |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    text = _text(sizes) | {"num_hidden_layers": 2 * layers}
    cross_layers = list(range(1, 2 * layers, 2))
    model = make_mllama(text, kv_heads=sizes.cross.kv_heads, cross_layers=cross_layers, tower=tower)

    def inputs(ids: Tensor, features: Tensor, shard: FrameShard) -> Inputs:
        return {"input_ids": ids, "cross_attention_states": features, "visual_shard": shard}

    return Subject(sizes, model, inputs)


def _text(sizes: ModelSizes) -> dict[str, int]:
    text = sizes.text
    widths = {"hidden_size": text.hidden, "intermediate_size": text.mlp_inner}
    return TEXT | widths | {"num_hidden_layers": text.layers, "num_attention_heads": text.heads}


FAMILIES = {"mplug_owl3": mplug_owl3, "open_flamingo": open_flamingo, "idefics": idefics}
