"""The one thing registered globally: an attention function of transformers' interface, under a name of our own.

It is selected for the attention modules of a patched instance only; `sdpa` and the others stay as they are. In a
sharded pass it is causal Ring Attention; over a cache whose K and V stay sharded, the merge of the ranks' results; in
every other pass (decoding, or text that is not sharded) it is transformers' own sdpa.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.forward_state import ForwardState, as_attended

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
    """query (B, H, s, D), key and value (B, G, s, D) of this rank's tokens -> o (B, s, H, D), no weights.

    The mask of a sharded pass is the call's own (`seqpar.text`); `attention_mask` is used in the other passes.
    """
    if seqpar is not None:
        refuse_dropout(dropout)  # in a replicated pass, too: each rank would drop other weights
    if seqpar is not None and seqpar.cached_text is not None:
        given = query.dtype
        query, key, value = as_attended(query, key, value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        o, _ = seqpar.attend_cached_text(query, key, value, scale, sliding_window)
        return o.transpose(1, 2).to(given), None
    if seqpar is None or not seqpar.shards_text:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    o = seqpar.attend(query, [seqpar.text_keys(key, value, sliding_window, query.shape[1])], scale)
    return o.transpose(1, 2), None


def refuse_dropout(dropout: float) -> None:
    """Raises ConfigError for dropout on attention weights, which would differ from the unpatched model's."""
    if dropout:
        raise ConfigError(
            f"attention_dropout={dropout}: dropout on attention weights is not supported in distributed attention; set "
            "model.config.attention_dropout = 0.0 before patching (dropout elsewhere is fine)"
        )


def register() -> None:
    """Makes the function, and the mask function of the same name, known to transformers; twice is fine."""
    AttentionInterface.register(NAME, seqpar_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without one, transformers would silently pass no mask at all


def select(patch: Patch, modules: list[nn.Module]) -> None:
    """Select the function for these attention modules of one instance, which read their config through a view.

    The config itself stays the model's own object and unchanged: other models may share it, and it is saved.
    """
    register()
    owners = {id(owner): owner for module in modules for owner in _with_config(module)}
    for owner in owners.values():
        patch.set(owner, "config", SelectedConfig(owner.config))


class SelectedConfig:
    """A config as the attention of a patched model reads it: its own attributes, and our attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def causal_mask(config: Any, embeds: Tensor, mask: Any, positions: Tensor, cache: Any, sliding: bool = False) -> Any:
    """Return the mask of a pass as transformers makes it for our function.

    Args:
        config: as an attention module of the patched model reads it.
        embeds, mask, positions, cache: the decoder's arguments; a four-dimensional mask is returned unchanged.
        sliding: for layers with a sliding window.
    """
    make = create_sliding_window_causal_mask if sliding else create_causal_mask
    return make(config=config, inputs_embeds=embeds, attention_mask=mask, past_key_values=cache, position_ids=positions)


def _with_config(module: nn.Module) -> list[nn.Module]:
    """The module; or, where something wraps it that only hands its attributes on (PEFT), all modules within it."""
    parts = [module] if "config" in vars(module) else module.modules()
    return [part for part in parts if hasattr(vars(part).get("config"), "_attn_implementation")]
