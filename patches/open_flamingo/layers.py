"""The layers of an OpenFlamingo: cross-attention to the media, then a layer of the language model."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mllm_seqpar.runtime.forward_state import ForwardState


def cross_attentions(language_model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its MaskedCrossAttention), also inside the wrappers of activation checkpointing."""
    for index, block in enumerate(language_model.gated_cross_attn_layers):
        for module in [] if block is None else block.modules():
            if any(c.__name__ == "MaskedCrossAttention" for c in type(module).__mro__):
                yield index, module


def layer_forward(layer: Any) -> Any:
    """A FlamingoLayer's forward: hands `seqpar` to its cross-attention and to the decoder layer."""
    unpatched = layer.forward

    @functools.wraps(unpatched)
    def forward(
        self: Any, lang_x: Tensor, attention_mask: Any = None, seqpar: ForwardState | None = None, **kwargs: Any
    ) -> Any:
        if seqpar is None:
            return unpatched(lang_x, attention_mask, **kwargs)
        if self.gated_cross_attn_layer is not None:
            lang_x = self.gated_cross_attn_layer(lang_x, seqpar)  # in the place of the media: they are in the call
        return self.decoder_layer(lang_x, attention_mask=attention_mask, seqpar=seqpar, **kwargs)

    return types.MethodType(forward, layer)


def cross_forward(attention: Any, index: int) -> Any:
    """A MaskedCrossAttention's forward, of the layer with that index: over the media of all ranks."""
    unpatched = attention.forward

    def project(features: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """(f, tokens, width) -> k, v (1, heads, f * tokens, dim)."""
        k, v = attention.to_kv(features).flatten(0, 1).chunk(2, dim=-1)
        k, v = (x.unflatten(-1, (attention.heads, -1)).transpose(0, 1)[None] for x in (k, v))
        return k, v

    @functools.wraps(unpatched)
    def forward(self: Any, x: Tensor, media: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(media, ForwardState):
            return unpatched(x, media, *args, **kwargs)
        q = self.to_q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        uniform = media.rows.get("uniform")
        if uniform is not None:  # the mean of all V of the sample, and no gradient for q: what equal scores give
            q = q.masked_fill(uniform[:, None, :, None], 0.0)
        o = media.cross_attend(q, index, project, [self.to_kv], self.scale)
        return self.to_out(o.transpose(1, 2).flatten(2))

    return types.MethodType(forward, attention)
