"""Tiny OpenFlamingo models for tests: the real class over four language models, random weights, no gate at zero.

Importing open_flamingo imports open_clip, which needs torchvision. The class `Flamingo` needs neither, so an empty
module stands in for it here.
"""

import functools
import sys
import types
from typing import Any

import pytest
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

sys.modules.setdefault("open_clip", types.ModuleType("open_clip"))
_package = "installed with --no-deps by scripts/test.sh: it pins a torch that is too old"
Flamingo = pytest.importorskip("open_flamingo", reason=_package).Flamingo
_flamingo_lm = pytest.importorskip("open_flamingo.src.flamingo_lm", reason=_package)
_utils = pytest.importorskip("open_flamingo.src.utils", reason=_package)

LANGUAGE_MODELS = ("opt", "llama", "mpt", "gpt_neox")
MPT_1B = "mpt, q and k normalised"
"""The language model of OpenFlamingo-3B: MPT but for two norms, so it has fewer cases than `LANGUAGE_MODELS`."""
VOCABULARY = 64
MEDIA, END_OF_CHUNK, PAD = 60, 61, 1
IMAGE_SIZE = 12
WIDTH = 24  # of the vision tower and the perceiver
LAYERS = {
    "opt": "model.decoder.layers",
    "llama": "model.layers",
    "mpt": "transformer.blocks",
    MPT_1B: "transformer.blocks",
}
LAYERS["gpt_neox"] = "gpt_neox.layers"


class Tower(nn.Module):
    """Pixels (n, 3, 12, 12) -> pooled (n, 24), tokens (n, 9, 24), as open_clip's towers with `output_tokens`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.patches(pixels).flatten(2).transpose(1, 2)
        tokens = tokens + torch.tanh(self.mix(tokens))
        return tokens.mean(1), tokens


def _language_model(name: str) -> nn.Module:
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3}
    if name == "opt":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
        return OPTForCausalLM(
            OPTConfig(**common, **shape, word_embed_proj_dim=24, max_position_embeddings=96, dropout=0.0)
        )
    if name == "llama":
        shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**common, **shape, intermediate_size=48, max_position_embeddings=96))
    if name == MPT_1B:
        return QKNormMptForCausalLM(
            MptConfig(**common, d_model=36, n_heads=4, n_layers=2, max_seq_len=96, attn_config={"qk_ln": True})
        )
    if name == "mpt":  # a head dim that is no square: biases before the scale are no powers of two
        return MptForCausalLM(MptConfig(**common, d_model=36, n_heads=3, n_layers=2, max_seq_len=96))
    assert name == "gpt_neox"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**common, **shape, max_position_embeddings=96))


def tiny_flamingo(name: str, *, every: int = 1, immediate: bool = True, seed: int = 0) -> Any:
    """A `Flamingo` in eval mode over a language model of transformers.

    Args:
        name: one of `LANGUAGE_MODELS`, or `MPT_1B`.
        every: a gated cross-attention block before each `every`-th layer.
        immediate: `only_attend_immediate_media`.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    language_model: Any = _language_model(name)
    _utils.extend_instance(language_model, _flamingo_lm.FlamingoLMMixin)
    language_model.set_decoder_layers_attr_name(LAYERS[name])
    tower = types.SimpleNamespace(visual=Tower())
    model = Flamingo(tower, language_model, END_OF_CHUNK, MEDIA, WIDTH, cross_attn_every_n_layers=every).eval()
    del model.perceiver.layers[2:]  # of 6, whose float32 rounding would be most of what is compared
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
            elif path.endswith(tied):  # to the vocabulary: large ones would repeat the last token for ever
                weight.copy_(noise * 0.15)
            elif "lang_encoder" in path and "gated" not in path:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif "to_q" in path or "to_kv" in path:  # attention that is far from uniform
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
    for block in language_model.gated_cross_attn_layers:
        if block is not None:
            block.attn.only_attend_immediate_media = immediate
    return model


@functools.cache
def kept_flamingo(name: str, every: int, immediate: bool) -> Any:
    """One model for all cases of a process: patching it must leave no trace."""
    return tiny_flamingo(name, every=every, immediate=immediate)


def pixels(samples: int, media: int, seed: int = 1) -> Tensor:
    """(B, T, 1, 3, 12, 12)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, media, 1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


def text(*media: tuple[int, ...], length: int = 13, seed: int = 2) -> Tensor:
    """(B, length) token ids with a media token at each of the places given for a sample."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, MEDIA, (len(media), length), generator=generator)
    for sample, places in enumerate(media):
        ids[sample, list(places)] = MEDIA
    return ids


def accept_missing_mask(model: Any) -> None:
    """Makes the unpatched `generate` work on transformers 5, which leaves a mask of ones out: it is put back."""
    language_model = model.lang_encoder
    unpatched = language_model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            cache = kwargs.get("past_key_values")
            past = 0 if cache is None else cache.get_seq_length()
            attention_mask = torch.ones(input_ids.shape[0], past + input_ids.shape[1], dtype=torch.long)
        return unpatched(input_ids, attention_mask, **kwargs)

    language_model.forward = forward
