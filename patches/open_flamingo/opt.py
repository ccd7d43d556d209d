"""OPT under an OpenFlamingo. Its decoder layers have no MLP module that could be computed in chunks: their feed-forward
part stands in the layer's own forward, between two projections. So that forward is run from here, when it is needed.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.checkpointing.chunked_mlp import Tokenwise, run_in_chunks
from mllm_seqpar.patching import Patch


def chunk_feed_forwards(patch: Patch, stack: nn.Module) -> None:
    """Makes the feed-forward part of every OPT layer in `stack` blockwise, when there is `mlp_chunk_size`."""
    size = patch.context.config.mlp_chunk_size
    if size is None:
        return
    for module in stack.modules():
        if any(c.__name__ == "OPTDecoderLayer" for c in type(module).__mro__):
            patch.set(module, "forward", _layer_forward(module, size))


def _layer_forward(layer: Any, size: int) -> Any:
    @functools.wraps(layer.forward)
    def forward(self: Any, hidden_states: Tensor, *, use_cache: bool | None = False, **kwargs: Any) -> Tensor:
        """(B, s, C) -> (B, s, C): attention of all rows, then the feed-forward part of `size` rows at once."""
        before = self.do_layer_norm_before
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states) if before else hidden_states, **kwargs
        )
        hidden = hidden_states + F.dropout(attended, self.dropout, self.training)
        hidden = hidden if before else self.self_attn_layer_norm(hidden)
        parts = [self.final_layer_norm, self.fc1, self.activation_fn, self.fc2]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return run_in_chunks(Tokenwise(functools.partial(_feed_forward, self), modules, self), size, hidden)

    return types.MethodType(forward, layer)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    """Norm (before or behind), projections and residual of rows (..., C) -> (..., C)."""
    normed = layer.final_layer_norm(x) if layer.do_layer_norm_before else x
    out = x + F.dropout(layer.fc2(layer.activation_fn(layer.fc1(normed))), layer.dropout, layer.training)
    return out if layer.do_layer_norm_before else layer.final_layer_norm(out)
