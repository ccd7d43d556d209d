"""The language model under an OpenFlamingo: its class, and how it is read from a published directory.

No code from the directory is executed. `mosaic_gpt`, whose directories bring their own code, is read as MPT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, MptConfig
from transformers.configuration_utils import PreTrainedConfig

from mllm_seqpar.errors import ConfigError

from .weights import load_complete

# What transformers' MPT computes. Any other value is read by its config and ignored by its model.
_MPT: dict[str, Any] = {"no_bias": True, "logit_scale": None, "expansion_ratio": 4, "embedding_fraction": 1}
_MPT |= {"emb_pdrop": 0, "resid_pdrop": 0, "norm_type": "low_precision_layernorm"}
_MPT_ATTENTION: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}
_MPT_ATTENTION |= {"prefix_lm": False, "attn_uses_sequence_id": False}

# Keys of a mosaic_gpt config with their defaults, and the names in an MptConfig where those differ.
_MOSAIC: dict[str, Any] = {
    "d_model": 2048,
    "n_heads": 16,
    "n_layers": 24,
    "mlp_ratio": 4,
    "max_seq_len": 2048,
    "vocab_size": 50368,
}
_MOSAIC |= {"emb_pdrop": 0, "resid_pdrop": 0, "embedding_fraction": 1, "logit_scale": None, "no_bias": False}
_MOSAIC_ATTENTION: dict[str, Any] = {"attn_qk_ln": False, "attn_clip_qkv": None, "attn_pdrop": 0, "softmax_scale": None}
_MOSAIC_ATTENTION |= {"alibi": False, "alibi_bias_max": 8, "prefix_lm": False, "attn_uses_sequence_id": False}
_AS_MPT = {"mlp_ratio": "expansion_ratio", "attn_qk_ln": "qk_ln", "attn_clip_qkv": "clip_qkv"}
_MOSAIC_TENSORS = {
    r"\.ln_([12])\.": r".norm_\1.",
    r"\.mlp\.mlp_(up|down)\.": r".ffn.\1_proj.",
    r"\.ln_f\.": ".norm_f.",
}

# Buffers that older versions of transformers wrote, and that are computed now.
_BUFFERS = r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$"


def language_model_class(config: PreTrainedConfig) -> Any:
    """Return the class of the language model: this package's own for an MPT with `qk_ln`, else that of transformers."""
    if config.model_type == "mpt" and config.attn_config.qk_ln:
        from .mpt import QKNormMptForCausalLM

        return QKNormMptForCausalLM
    return AutoModelForCausalLM._model_mapping[type(config)]


def load_language_model(directory: str | os.PathLike[str]) -> Any:
    """Return the language model of a published directory in float32.

    Raises:
        ConfigError: a configuration that no class here computes.
        DataError: weights that are missing, unexpected or of another shape.
    """
    file = Path(directory) / "config.json"
    try:
        kind = json.loads(file.read_text()).get("model_type")
        mosaic = kind == "mosaic_gpt"
        config = _from_mosaic(file) if mosaic else AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"language_model={directory}: {error}") from error
    if config.model_type == "mpt":
        _check_mpt(file, config)
    options: dict[str, Any] = {"key_mapping": _MOSAIC_TENSORS} if mosaic else {}
    return load_complete(language_model_class(config), directory, _BUFFERS, config=config, **options)


def _from_mosaic(file: Path) -> MptConfig:
    given = json.loads(file.read_text())
    fields = {_AS_MPT.get(key, key): given.get(key, default) for key, default in _MOSAIC.items()}
    attention = {_AS_MPT.get(key, key): given.get(key, default) for key, default in _MOSAIC_ATTENTION.items()}
    heads = fields["n_heads"]
    if heads & (heads - 1):
        raise ConfigError(
            f"{file}: n_heads is {heads}; mosaic_gpt and MPT have the same position biases for powers of two only"
        )
    return MptConfig(**fields, attn_config=attention)


def _check_mpt(file: Path, config: Any) -> None:
    """Raise ConfigError for a field whose value transformers' MPT would ignore."""
    for part, allowed in ((config, _MPT), (config.attn_config, _MPT_ATTENTION)):
        for name, value in allowed.items():
            found = getattr(part, name)
            if found != value:
                raise ConfigError(f"{file}: {name} is {found!r}; an MPT with {name}={value!r} is supported only")


def fit_vocabulary(language_model: Any, rows: int) -> None:
    """Give input and output embeddings `rows` rows; new ones are the mean of the old until a checkpoint fills them.

    The output rows of an untied LLaMA stay so: published checkpoints lack them, and the authors' loader draws them at
    random.
    """
    old = language_model.get_input_embeddings().weight.shape[0]
    language_model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for part in (language_model.get_input_embeddings(), language_model.get_output_embeddings()):
            if rows > old:
                part.weight[old:] = part.weight[:old].mean(dim=0)
