"""Tiny OpenFlamingo models: the real class over the supported language models, with random weights.

See `tiny_models`. Importing this module raises ImportError without the package open_flamingo. That package
imports open_clip, which needs torchvision; the class `Flamingo` needs neither, so an empty module replaces open_clip.
"""

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from mllm_seqpar.models.open_flamingo.language import QKNormMptForCausalLM

from . import Sizes, TinyCase, frame_shard

sys.modules.setdefault("open_clip", types.ModuleType("open_clip"))
from open_flamingo import Flamingo  # noqa: E402
from open_flamingo.src.flamingo_lm import FlamingoLMMixin  # noqa: E402
from open_flamingo.src.helpers import MaskedCrossAttention  # noqa: E402
from open_flamingo.src.utils import extend_instance  # noqa: E402

LANGUAGE_MODELS = ("opt", "llama", "mpt", "gpt_neox")
MPT_1B = "mpt with QK norm"
"""The language model of OpenFlamingo-3B: MPT with norms of queries and keys."""
LORA_TARGETS = ["to_q", "to_kv", "Wqkv"]
VOCABULARY = 64
MEDIA, END_OF_CHUNK, PAD = 60, 61, 1
IMAGE_SIZE = 12
WIDTH = 24  # of the vision tower and the perceiver
LAYERS = {
    "opt": "model.decoder.layers",
    "llama": "model.layers",
    "mpt": "transformer.blocks",
    MPT_1B: "transformer.blocks",
    "gpt_neox": "gpt_neox.layers",
}


class Tower(nn.Module):
    """Map pixels (n, 3, H, W) to pooled (n, width) and tokens (n, patches, width), as open_clip's towers do."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.mix = nn.Linear(width, width)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        tokens = self.patches(pixels).flatten(2).transpose(1, 2)
        tokens = tokens + torch.tanh(self.mix(tokens))
        return tokens.mean(1), tokens


def _language_model(name: str, **llama: Any) -> nn.Module:
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 96} | common
    mpt = {"d_model": 36, "n_layers": 2, "max_seq_len": 96} | common
    match name:
        case "opt":
            return OPTForCausalLM(OPTConfig(**size, ffn_dim=48, word_embed_proj_dim=24, dropout=0.0))
        case "llama":
            size |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "intermediate_size": 48} | llama
            return LlamaForCausalLM(LlamaConfig(**size))
        case "mpt":  # head_dim is no square, so ALiBi biases divided by the scale are no powers of two
            return MptForCausalLM(MptConfig(**mpt, n_heads=3))
        case "gpt_neox":
            return GPTNeoXForCausalLM(GPTNeoXConfig(**size, intermediate_size=48))
        case _:
            assert name == MPT_1B
            return QKNormMptForCausalLM(MptConfig(**mpt, n_heads=4, attn_config={"qk_ln": True}))


def arguments_of(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of `tiny_model` for these sizes: LLaMA, a linear tower, and the published resampler."""
    llama = sizes.text | {"num_key_value_heads": sizes.heads}
    cross = {"heads": sizes.cross_heads, "dim_head": sizes.cross_head_dim} if sizes.cross_heads else {}
    options = {"language_model": "llama", "every": sizes.interval, "resampler_layers": 6}
    return options | {"cross": cross, "width": sizes.tower_width, "patch": 14} | llama


def tiny_model(
    language_model: str = "mpt",
    *,
    every: int = 1,
    immediate: bool = True,
    seed: int = 0,
    width: int = WIDTH,
    patch: int = 4,
    resampler_layers: int = 2,
    cross: Mapping[str, Any] | None = None,
    **llama: Any,
) -> Any:
    """Return a `Flamingo` in eval mode, over one of `LANGUAGE_MODELS` or `MPT_1B`.

    Args:
        every: a gated cross-attention block precedes every `every`-th layer.
        immediate: `only_attend_immediate_media`.
        width, patch: channels of the vision tower, and the height and width of its patches.
        resampler_layers: 6 at most, as published; these dominate the float32 rounding error.
        cross: heads and head dim (`dim_head`) of cross-attention; the model class takes neither.
        llama: further fields of the config of "llama".
    """
    torch.manual_seed(seed)
    decoder: Any = _language_model(language_model, **llama)
    extend_instance(decoder, FlamingoLMMixin)
    decoder.set_decoder_layers_attr_name(LAYERS[language_model])
    tower = types.SimpleNamespace(visual=Tower(width, patch))
    model = Flamingo(tower, decoder, END_OF_CHUNK, MEDIA, width, cross_attn_every_n_layers=every).eval()
    del model.perceiver.layers[resampler_layers:]
    for block in filter(None, decoder.gated_cross_attn_layers if cross else ()):
        block.attn = MaskedCrossAttention(dim=decoder.config.hidden_size, dim_visual=width, **cross)
    generator, tied = torch.Generator().manual_seed(seed), ("decoder.embed_tokens.weight", "wte.weight")
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if path.endswith("_gate"):
                weight.copy_(0.5 + 0.3 * noise)
            elif weight.dim() == 1 and path.endswith("weight"):  # norms
                weight.copy_(1 + 0.2 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.2 * noise)
            elif path.endswith(tied):  # larger tied weights repeat the last token
                weight.copy_(noise * 0.15)
            elif "lang_encoder" in path and "gated" not in path:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif "to_q" in path or "to_kv" in path:  # attention is far from uniform
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
    for block in decoder.gated_cross_attn_layers:
        if block is not None:
            block.attn.only_attend_immediate_media = immediate
    return model


def pixels(samples: int, media: int, seed: int = 1) -> Tensor:
    """Return random media, (B, T, 1, 3, 12, 12)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, media, 1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


def text(*media: tuple[int, ...], length: int = 13, seed: int = 2) -> Tensor:
    """Return (B, length) token ids; `media` gives the positions of each sample's media tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, MEDIA, (len(media), length), generator=generator)
    for sample, places in enumerate(media):
        ids[sample, list(places)] = MEDIA
    return ids


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of OpenFlamingo, and the options of the tiny model that takes it."""

    frames: tuple[tuple[int, ...], ...] = ((1, 4, 7),)  # the positions of each sample's media tokens
    length: int = 13
    media: int = 3  # of each sample


def inputs_of(case: Case, model: Any = None) -> dict[str, Any]:
    ids, real = text(*case.frames, length=case.length), case.real()
    if real is not None:
        ids.masked_fill_(~real, PAD)
    mask = torch.ones_like(ids) if real is None else real.long()
    inputs = {"vision_x": pixels(len(case.frames), case.media), "lang_x": ids, "attention_mask": mask}
    return inputs | case.targets(ids, ids == MEDIA)


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    return frame_shard(inputs, {"vision_x": inputs["vision_x"].flatten(0, 1)}, group, layout)


def shard_units(model: Any) -> list[nn.Module]:
    """Return the blocks, decoder layers and towers, each of which has one place in the module tree."""
    blocks = [block for block in model.lang_encoder.gated_cross_attn_layers if block is not None]
    return [*blocks, *model.lang_encoder.old_decoder_blocks, model.perceiver, model.vision_encoder]


def unpatched_generate(model: Any, **inputs: Any) -> Tensor:
    """Return the tokens of the unpatched model, which receives a mask of ones where transformers 5 omits the mask."""
    decoder = model.lang_encoder
    unpatched = decoder.forward

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            cache = kwargs.get("past_key_values", kwargs.get("cache"))
            past = 0 if cache is None else cache.get_seq_length()
            attention_mask = input_ids.new_ones(input_ids.shape[0], past + input_ids.shape[1])
        return unpatched(input_ids, attention_mask, **kwargs)

    decoder.forward = forward
    try:
        return model.generate(**inputs)
    finally:
        del decoder.forward
