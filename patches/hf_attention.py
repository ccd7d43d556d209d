"""The one thing registered globally: an attention function of transformers' interface, under a name of our own.

It is selected on the text config of a patched instance only; `sdpa` and the others stay as they are. In a sharded pass
it is causal Ring Attention; over a cache whose K and V stay dealt to the ranks, each rank's part merged; in every other
pass (decoding, or text that is not sharded) it is transformers' own sdpa.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mllm_seqpar.call import SeqParCall, as_attended
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch

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
    seqpar: SeqParCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H, s, D), key and value (B, G, s, D) of this rank's tokens -> o (B, s, H, D), no weights.

    The mask of a sharded pass is the call's own (`seqpar.text`); `attention_mask` is used in the other passes.
    """
    if seqpar is not None:
        refuse_dropout(dropout)  # in a replicated pass, too: each rank would drop other weights
    if seqpar is not None and seqpar.cached is not None:
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
    """Selects the function for these modules of one instance, through a copy of their config.

    A copy, because other models may have been built from the same config object.
    """
    register()
    copies: dict[int, Any] = {}
    owners = {id(owner): owner for module in modules for owner in _with_config(module)}
    for owner in owners.values():
        config: Any = owner.config
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = NAME  # the public setter would reach into sub-configs
        patch.set(owner, "config", copies[id(config)])


def _with_config(module: nn.Module) -> list[nn.Module]:
    """The module; or, where something wraps it that only hands its attributes on (PEFT), all modules within it."""
    parts = [module] if "config" in vars(module) else module.modules()
    return [part for part in parts if hasattr(vars(part).get("config"), "_attn_implementation")]
