"""The authors' construction of an OpenFlamingo from published parts, with the package open-flamingo itself.

This module imports nothing from the package under test. `mosaic_gpt`, whose directories contain their own code, is
implemented here in plain torch.
"""

import json
import types
from pathlib import Path
from typing import Any

import torch
from published_flamingo import BLOCKS, CONFIGS, EVERY, VISION
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, CLIPModel


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, bias=False)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Wqkv, self.out_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.q_ln, self.k_ln = _norm(width), _norm(width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q_ln(q), self.k_ln(k), v))
        places = torch.arange(x.shape[1], dtype=x.dtype)
        slopes = 2.0 ** (-8.0 / self.heads * torch.arange(1, self.heads + 1, dtype=x.dtype))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + slopes[:, None, None] * (places - places[-1])
        return self.out_proj((scores.masked_fill(hidden, -1e30).softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = _norm(width), _Attention(width, heads), _norm(width)
        self.mlp = nn.Module()
        self.mlp.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp.mlp_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), attention_mask)
        return x + self.mlp.mlp_down(F.gelu(self.mlp.mlp_up(self.ln_2(x))))


class MosaicGPT(nn.Module):
    """The language model of OpenFlamingo-3B under its published names; no cache, no loss."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(**CONFIGS["mosaic_gpt"])
        width, heads = self.config.d_model, self.config.n_heads
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(rows, width)
        self.transformer.blocks = nn.ModuleList(_Block(width, heads) for _ in range(self.config.n_layers))
        self.transformer.ln_f = _norm(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        length = input_ids.shape[1]
        hidden = ~(attention_mask.bool()[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril())
        x = self.transformer.wte(input_ids)
        for block in self.transformer.blocks:
            x = block(x, attention_mask=hidden)
        return types.SimpleNamespace(logits=F.linear(self.transformer.ln_f(x), self.transformer.wte.weight))


class _Tower(nn.Module):
    """What open_clip's towers return with `output_tokens`: patches before the last norm, without the class token."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clip, report = CLIPModel.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        out = self.clip.vision_model(pixel_values=pixels)
        return out.pooler_output, out.last_hidden_state[:, 1:]


def authors_flamingo(parts: dict[str, Path], kind: str) -> Any:
    """Build the model in the steps of `create_model_and_transforms`, then load the checkpoint over it."""
    from open_flamingo import Flamingo
    from open_flamingo.src.flamingo_lm import FlamingoLMMixin
    from open_flamingo.src.utils import extend_instance

    folder = parts["language_model"]
    config = json.loads((folder / "config.json").read_text())
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    language_model: Any
    if kind == "mosaic_gpt":
        language_model = MosaicGPT(config["vocab_size"])
        language_model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
        language_model.transformer.wte = nn.Embedding(tokens + 3, config["d_model"])
    else:
        language_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        language_model.resize_token_embeddings(tokens + 3)
    extend_instance(language_model, FlamingoLMMixin)
    language_model.set_decoder_layers_attr_name(BLOCKS[kind])
    tower = types.SimpleNamespace(visual=_Tower(parts["vision_model"]))
    model = Flamingo(tower, language_model, tokens, tokens + 1, VISION, cross_attn_every_n_layers=EVERY[kind])
    state = torch.load(parts["checkpoint"], weights_only=True)
    state = {name.removeprefix("module."): x for name, x in state.get("model_state_dict", state).items()}
    if hasattr(language_model, "lm_head"):  # GPT-NeoX calls it so in later versions of transformers
        state = {name.replace("embed_out", "lm_head"): x for name, x in state.items()}
    report = model.load_state_dict(state, strict=False)
    assert all(name.endswith(("inv_freq", "attention.bias", "masked_bias")) for name in report.unexpected_keys)
    return model.eval()
