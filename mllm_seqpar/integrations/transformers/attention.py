"""The attention function that is registered with transformers under its own name, and the check for dropout.

The registration is the only global change. The function is selected for the attention modules of a patched instance
only; `sdpa` and the others stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from mllm_seqpar._compat import cache_argument, eager
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.forward_state import ForwardState, ModelAttention

NAME = "mllm_seqpar"


def seqpar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    seqpar: ForwardState | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H, s, D), key and value (B, G, s, D) of this rank's tokens -> o (B, s, H, D), and no weights."""
    if seqpar is not None and dropout:
        refuse_dropout(dropout)  # even with all text on every rank, because each rank would drop different weights
    kind = "decoder" if seqpar is None else seqpar.text_mask_kind(sliding_window)
    if seqpar is None or (seqpar.recorder is None and kind != "intervals"):
        # What `attend` would do, in fewer steps.
        mask = attention_mask if kind == "decoder" else None
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    options: dict[str, Any] = {"window": sliding_window, "mask": attention_mask}
    if kind != "intervals":
        options["model_attention"] = model_attention(module, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend_text(seqpar, query, key, value, scale, options).transpose(1, 2), None


@eager
def _attend_text(
    seqpar: ForwardState, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any]
) -> Tensor:
    return seqpar.attend_each(q, [[seqpar.text_keys(q, k, v, **options)]], scale)[0]


def model_attention(module: nn.Module, **kwargs: Any) -> ModelAttention:
    """Return transformers' sdpa for an attention module, which computes the text that one rank has whole."""

    def attend(k: Tensor, v: Tensor, mask: Tensor | None, q: Tensor, scale: float) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scale, **kwargs)[0].transpose(1, 2)

    return attend


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, s, heads * head_dim) -> (B, heads, s, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(o: Tensor) -> Tensor:
    """(B, heads, s, head_dim) -> (B, s, heads * head_dim)."""
    return o.transpose(1, 2).flatten(2)


def refuse_dropout(dropout: float) -> None:
    """Raise ConfigError for dropout of attention weights, which would differ from that of the unpatched model."""
    if dropout:
        raise ConfigError(
            f"attention_dropout={dropout}: dropout on attention weights is not supported in distributed attention; set "
            "it to 0.0 in the model's config before patching (IDEFICS and Llama 3.2 Vision call it dropout, and MPT "
            "attn_pdrop). Dropout elsewhere is fine"
        )


def use_seqpar_attention(patch: Patch, modules: Iterable[nn.Module]) -> None:
    """Select `seqpar_attention` for attention modules of one instance; they then read their config through a view.

    The config itself is not changed, because other models may share it, and because it is saved.
    """
    AttentionInterface.register(NAME, seqpar_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without one, transformers would silently pass no mask
    owners: dict[nn.Module, None] = {}  # once each, in order
    for module in modules:
        # A wrapper that only passes on attributes (PEFT) contains the modules that have them.
        for owner in [module] if "config" in vars(module) else module.modules():
            if hasattr(vars(owner).get("config"), "_attn_implementation"):
                owners[owner] = None
    for owner in owners:
        patch.set(owner, "config", _ConfigView(owner.config))


class _ConfigView:
    """A config with all attributes of the model's own config, except that it names our attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def causal_mask(config: Any, embeds: Tensor, mask: Any, positions: Tensor, cache: Any, sliding: bool = False) -> Any:
    """Return the causal mask that transformers makes for `seqpar_attention`; `sliding`: for layers with a window.

    `config` is that of an attention module of the patched model. A four-dimensional mask is returned unchanged.
    """
    make = create_sliding_window_causal_mask if sliding else create_causal_mask
    text = {"config": config, "inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions}
    return make(**text, **cache_argument(cache))


def causal_masks(decoder: Any, config: Any, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
    """Return the `causal_mask` of a decoder, or one for each kind of layer of a decoder that takes them by kind.

    `config` is that of `causal_mask`. Masks by kind, as `generate` prepares them, are returned unchanged.
    """
    if isinstance(mask, dict):
        return mask
    if not hasattr(decoder, "has_sliding_layers"):
        return causal_mask(config, embeds, mask, positions, cache)
    masks = {"full_attention": causal_mask(config, embeds, mask, positions, cache)}
    if decoder.has_sliding_layers:
        masks["sliding_attention"] = causal_mask(config, embeds, mask, positions, cache, sliding=True)
    return masks
