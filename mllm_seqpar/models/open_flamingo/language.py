"""The language model of an OpenFlamingo: its class, and loading it from a published directory.

No code of the directory is executed. `mosaic_gpt`, whose directories contain their own code, is loaded as MPT.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MptConfig, MptForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.mpt.modeling_mpt import MptAttention

from mllm_seqpar._compat import model_class_of, takes_cache
from mllm_seqpar.errors import ConfigError

from .configuration import LAYERS
from .weights import load_complete

# The values that transformers' MPT implements. Its config reads other values, but its model ignores them.
_MPT: dict[str, Any] = {"no_bias": True, "logit_scale": None, "expansion_ratio": 4, "embedding_fraction": 1}
_MPT |= {"emb_pdrop": 0, "resid_pdrop": 0, "norm_type": "low_precision_layernorm"}
_MPT_ATTENTION: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}
_MPT_ATTENTION |= {"prefix_lm": False, "attn_uses_sequence_id": False}

# Keys of a mosaic_gpt config with their defaults, and their names in an MptConfig if those differ.
_MOSAIC: dict[str, Any] = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "mlp_ratio": 4, "max_seq_len": 2048}
_MOSAIC |= {"vocab_size": 50368, "emb_pdrop": 0, "resid_pdrop": 0, "embedding_fraction": 1, "logit_scale": None}
_MOSAIC |= {"no_bias": False}
_MOSAIC_ATTENTION: dict[str, Any] = {"attn_qk_ln": False, "attn_clip_qkv": None, "attn_pdrop": 0, "softmax_scale": None}
_MOSAIC_ATTENTION |= {"alibi": False, "alibi_bias_max": 8, "prefix_lm": False, "attn_uses_sequence_id": False}
_AS_MPT = {"mlp_ratio": "expansion_ratio", "attn_qk_ln": "qk_ln", "attn_clip_qkv": "clip_qkv"}
_MOSAIC_TENSORS = {
    r"\.ln_([12])\.": r".norm_\1.",
    r"\.mlp\.mlp_(up|down)\.": r".ffn.\1_proj.",
    r"\.ln_f\.": ".norm_f.",
}

# Buffers that older versions of transformers saved, and that are computed now.
_BUFFERS = r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$"


class QKNormMptAttention(MptAttention):
    """MPT's attention with LayerNorms on queries and keys (`attn_config.qk_ln`), which transformers' MPT ignores.

    MPT-1B, the language model of OpenFlamingo-3B, was trained with them. Each norm spans the full width, before the
    heads are split, and has no bias. Shapes: hidden (B, s, C); q, k and v (B, H, s, D).
    """

    def __init__(self, config: MptConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_ln = nn.LayerNorm(self.hidden_size, eps=config.layer_norm_epsilon, bias=False)
        self.k_ln = nn.LayerNorm(self.hidden_size, eps=config.layer_norm_epsilon, bias=False)

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, s, C) and the weights (B, H, s, t); `attention_mask` is True where a key is hidden."""
        q, k, v = mpt_projections(self, hidden_states, cache)
        scores = (q @ k.mT * self.softmax_scale + position_bias[:, :, -k.shape[2] :]).float()
        if attention_mask is not None:  # with a number that is finite in float32, also for rows that see no key
            scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).to(v.dtype)
        weights = nn.functional.dropout(weights, p=self.attn_dropout_p, training=self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def mpt_projections(attention: Any, hidden_states: Tensor, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, H, s, D) of an MptAttention, and k and v appended to the K and V of the cache."""
    qkv = attention.Wqkv(hidden_states)
    if attention.clip_qkv:
        qkv = qkv.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
    q, k, v = qkv.chunk(3, dim=2)
    if hasattr(attention, "q_ln"):  # MPT-1B normalises over the full width, before the heads are split
        q, k = attention.q_ln(q).to(v.dtype), attention.k_ln(k).to(v.dtype)
    q, k, v = (x.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for x in (q, k, v))
    if cache is not None:
        k, v = cache.update(k, v, attention.layer_idx)
    return q, k, v


class QKNormMptForCausalLM(MptForCausalLM):
    """`MptForCausalLM` for a config with `attn_config.qk_ln`."""

    def __init__(self, config: MptConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.transformer.blocks):
            block.attn = QKNormMptAttention(config, index)
        self.post_init()


def language_model_class(config: PreTrainedConfig) -> Any:
    """Return the class of the language model: `QKNormMptForCausalLM` for an MPT with `qk_ln`, else transformers'."""
    if config.model_type == "mpt" and config.attn_config.qk_ln:
        return QKNormMptForCausalLM
    return model_class_of(AutoModelForCausalLM, config)


def load_language_model(directory: str | os.PathLike[str]) -> Any:
    """Load the language model of a published directory in float32; raise ConfigError if no class implements it."""
    file = Path(directory) / "config.json"
    try:
        stated = json.loads(file.read_text())
        is_mosaic = stated.get("model_type") == "mosaic_gpt"
        if is_mosaic or stated.get("model_type") == "mpt":
            stated = _mosaic_as_mpt(file, stated) if is_mosaic else stated
            # MptConfig refuses an int for a float, and a float for an int, such as `attn_pdrop: 0.0` and `clip_qkv: 8`.
            attention = _with_declared_numbers(MptConfig.sub_configs["attn_config"], stated.get("attn_config") or {})
            config = MptConfig.from_dict(_with_declared_numbers(MptConfig, {**stated, "attn_config": attention}))
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"language_model={directory}: {error}") from error
    if config.model_type not in LAYERS:
        raise ConfigError(
            f"language_model={directory}: model_type {config.model_type!r}; OpenFlamingo supports {', '.join(LAYERS)}"
        )
    if config.model_type == "mpt":
        for part, allowed in ((config, _MPT), (config.attn_config, _MPT_ATTENTION)):
            for name, value in allowed.items():
                if (stated := getattr(part, name)) != value:
                    raise ConfigError(f"{file}: {name} is {stated!r}; only an MPT with {name}={value!r} is supported")
    options: dict[str, Any] = {"key_mapping": _MOSAIC_TENSORS} if is_mosaic else {}
    return load_complete(language_model_class(config), directory, _BUFFERS, config=config, **options)


def _with_declared_numbers(config: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Return the values with ints and floats converted to the type of the config's field, if that changes no value."""
    values = dict(stated)
    for field in dataclasses.fields(config):
        value: Any = stated.get(field.name)
        types = get_args(field.type) or (field.type,)
        if type(value) in (int, float) and type(value) not in types:
            values[field.name] = next(
                (kind(value) for kind in types if kind in (int, float) and kind(value) == value), value
            )
    return values


def _mosaic_as_mpt(file: Path, stated: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of an MPT config file that correspond to those of a mosaic_gpt config file."""
    fields = {_AS_MPT.get(key, key): stated.get(key, default) for key, default in _MOSAIC.items()}
    attention = {_AS_MPT.get(key, key): stated.get(key, default) for key, default in _MOSAIC_ATTENTION.items()}
    heads = fields["n_heads"]
    if heads & (heads - 1):
        raise ConfigError(
            f"{file}: n_heads is {heads}; mosaic_gpt and MPT have the same position biases only for powers of two"
        )
    return {**fields, "attn_config": attention}


def fit_vocabulary(language_model: Any, rows: int) -> None:
    """Resize input and output embeddings to `rows` rows; new rows are the mean of the others.

    A checkpoint then overwrites them, except the output rows of an untied LLaMA: published checkpoints lack them, and
    the authors' loader initialises them randomly.
    """
    old = language_model.get_input_embeddings().weight.shape[0]
    language_model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for part in (language_model.get_input_embeddings(), language_model.get_output_embeddings()):
            if rows > old:
                part.weight[old:] = part.weight[:old].mean(dim=0)
