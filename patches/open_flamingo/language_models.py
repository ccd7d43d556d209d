"""The language models under an OpenFlamingo: how each runs its layers, and where its positions come from.

MPT is in a module of its own, because it needs an attention of its own.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mllm_seqpar.adapting import ConfigError, ForwardState, Patch, TokenwiseFunction, is_instance_by_name, run_in_chunks
from mllm_seqpar.adapting.transformers import causal_mask, decoder_arguments, use_seqpar_attention

from .mpt import MptLM


class RotaryLM:
    """LLaMA and GPT-NeoX: rotary positions that count every token, attention through transformers' interface.

    `stack` is the module within the Flamingo language model that holds the decoder layers.
    """

    detects_packing = True
    """Whether positions separate packed sequences if there is no attention mask and no cache."""

    def __init__(self, language_model: Any) -> None:
        self.model = self.stack = language_model
        for name in language_model.decoder_layers_attr_name.split(".")[:-1]:
            self.stack = getattr(self.stack, name)

    def check(self) -> None:
        """Raise ConfigError if the ranks would compute different things."""

    def install(self, patch: Patch) -> None:
        attention = [m for m in self.stack.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
        patch.guard(self.model, attention)
        use_seqpar_attention(patch, attention)
        self._attention_config = attention[0].config
        self._chunk_mlps(patch)

    def _chunk_mlps(self, patch: Patch) -> None:
        # Activation checkpointing may have wrapped the layers; `old_decoder_blocks` are the layers themselves.
        patch.chunk_forwards(block.mlp for block in self.model.old_decoder_blocks)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        return causal_mask(self._attention_config, embeds, mask, positions, cache)

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Return (B or 1, L) positions of the whole text, before it is sharded; None: 0, 1, 2, ..."""
        return given

    def called_modules(self) -> list[nn.Module]:
        """Return the modules that `run_decoder` calls."""
        return [self.stack]

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Any, state: ForwardState, **kwargs: Any
    ) -> Any:
        return self.stack(**decoder_arguments(embeds, positions, mask, cache, state), **kwargs)


class OptLM(RotaryLM):
    """OPT: learned positions that count the tokens which are not padding."""

    detects_packing = False

    def check(self) -> None:
        if self.stack.layerdrop:
            raise ConfigError(
                f"layerdrop={self.stack.layerdrop}: every rank would leave out other layers; set "
                "model.lang_encoder.model.decoder.layerdrop = 0.0 before patching"
            )

    def _chunk_mlps(self, patch: Patch) -> None:
        size = patch.context.config.mlp_chunk_size
        if size is not None:
            for module in self.stack.modules():
                if is_instance_by_name(module, "OPTDecoderLayer"):
                    patch.set(module, "forward", _opt_layer_forward(module, size))

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        if given is not None or mask is None or mask.dim() != 2:
            return given
        return (mask.cumsum(dim=1) * mask - 1).long()[:, 0 if cache is None else cache.get_seq_length() :]


def _opt_layer_forward(layer: Any, size: int) -> Any:
    """Return a forward of an OPT layer that computes its feed-forward part `size` tokens at a time.

    OPT has no MLP module: the feed-forward part is written out in the layer's own forward.
    """

    @functools.wraps(layer.forward)
    def forward(self: Any, hidden_states: Tensor, *, use_cache: bool | None = False, **kwargs: Any) -> Tensor:
        norm_first = self.do_layer_norm_before
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states) if norm_first else hidden_states, **kwargs
        )
        hidden = hidden_states + F.dropout(attended, self.dropout, self.training)
        hidden = hidden if norm_first else self.self_attn_layer_norm(hidden)
        parts = [self.final_layer_norm, self.fc1, self.activation_fn, self.fc2]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        function = TokenwiseFunction(functools.partial(_opt_feed_forward, self), modules, self)
        return run_in_chunks(function, size, hidden)

    return types.MethodType(forward, layer)


def _opt_feed_forward(layer: Any, x: Tensor) -> Tensor:
    """Compute norm (before or after), projections and residual of rows (..., C)."""
    normed = layer.final_layer_norm(x) if layer.do_layer_norm_before else x
    out = x + F.dropout(layer.fc2(layer.activation_fn(layer.fc1(normed))), layer.dropout, layer.training)
    return out if layer.do_layer_norm_before else layer.final_layer_norm(out)


LANGUAGE_MODELS: dict[str, Any] = {"opt": OptLM, "llama": RotaryLM, "mpt": MptLM, "gpt_neox": RotaryLM}
"""By `model_type`."""


def language_model_of(language_model: Any) -> Any:
    """Return the object that runs this language model, whose `model_type` is one of `LANGUAGE_MODELS`."""
    return LANGUAGE_MODELS[language_model.config.model_type](language_model)
