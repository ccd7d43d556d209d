"""The language models under an OpenFlamingo: how each runs its layers, and where its positions come from.

MPT needs an attention of its own. It has linear biases (ALiBi, arXiv 2108.12409) and does not use transformers'
attention interface, and its model drops further arguments. The blocks are therefore run from this module.

The score of row i and key j has the bias slope * (j - i), up to a constant of the row, which does not change softmax.
The distributed attention has no bias, so the bias becomes part of the dot product, in additional dimensions:

    slope * (j - i) = (slope, -i) . (j, slope)

This is exact in every dtype. A slope is a sum of 3 bfloat16 numbers p (24 bits, all of its float32), and a position is
256 * high + low with both below 257. Every factor is then exact in bfloat16, and every product in float32. So is every
sum of the first part's products while positions stay below 65536: they are multiples of the last bit of p, which has 8
bits, below 2 ** 24 of them. A row and a key that are near each other thus have an exact small difference, not the
difference of two large rounded numbers. (The unpatched model counts the bias from the end of the text, and so rounds it
to 2 ** -11 for the first rows of 8192 tokens.) The rounding that remains comes from the other two parts, which are
2 ** 8 and 2 ** 16 times smaller. The additional dimensions come first, so that the sum of a score begins with them.

A row that attends to no key, such as padding before a text, gives the mean of all V, because its masked scores are all
equal. The label on the first real token is predicted from that row.

Shape legend: B samples, H heads, s rows of this rank, t keys of this rank, D head_dim.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from mllm_seqpar.adapting import (
    ConfigError,
    ForwardState,
    Patch,
    ShapeError,
    StarText,
    TokenwiseFunction,
    cache_argument,
    cache_state_of,
    cast_for_attention,
    causal_mask,
    copy_to_device,
    decoder_arguments,
    gather_shards,
    is_instance_by_name,
    merge_heads,
    refuse_dropout,
    run_in_chunks,
    takes_cache,
    use_seqpar_attention,
)
from mllm_seqpar.models.open_flamingo.language import mpt_projections


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


BIAS_DIMS = 16
"""Dimensions added to q and k: 4 for each of 3 parts of a slope, and 4 zeros, because kernels need multiples of 8."""
MAX_POSITIONS = 65536
"""Positions below are exact as two digits of base 256."""


def bias_dims(slopes: Tensor, scale: float, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the additional dimensions of q and k, whose dot product times `scale` is slope * (key - row).

    slopes (H,) float32; rows (s,) and keys (t,) int64 positions -> (H, s, BIAS_DIMS) and (H, t, BIAS_DIMS) float32,
    whose values are all bfloat16 numbers.
    """
    rest = slopes.double() / scale
    row_digits, key_digits = (torch.stack([x // 256, x % 256], -1).float() for x in (rows, keys))
    of_rows, of_keys = [], []
    for _ in range(3):
        part = rest.bfloat16().double()
        rest = rest - part
        weights = torch.stack([256 * part, part], -1).float()[:, None]  # (H, 1, 2)
        of_rows += [weights.expand(-1, len(rows), -1), row_digits.expand(len(slopes), -1, -1)]
        of_keys += [key_digits.expand(len(slopes), -1, -1), -weights.expand(-1, len(keys), -1)]
    padding = (0, BIAS_DIMS - 12)
    return F.pad(torch.cat(of_rows, -1), padding), F.pad(torch.cat(of_keys, -1), padding)


@dataclass
class ShardedBias:
    """Takes the place of the bias that MPT's blocks pass on, if text K and V are sharded. All layers share it."""

    state: ForwardState
    slopes: Tensor  # (H,) float32
    rows: Tensor  # positions of this rank's rows
    keys: Tensor  # positions of the keys that this rank stores
    blind: Tensor | None = None  # (B, s) bool, rows that attend to no key; None if there are none on any rank
    _dims: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from q (B, H, s, D) to k, v (B, H, t, D) of all ranks; return o (B, H, s, D)."""
        dtype = q.dtype
        q, k, v = cast_for_attention(q, k, v)
        if self._dims is None:
            self._dims = bias_dims(self.slopes, scale, self.rows, self.keys)
        q, k = (
            torch.cat([dims.to(x.dtype).expand(x.shape[0], -1, -1, -1), x], -1)
            for dims, x in zip(self._dims, (q, k), strict=True)
        )
        padded_v = F.pad(v, (BIAS_DIMS, 0))
        o = self.state.attend(q, [self.state.text_keys(q, k, padded_v)], scale)[..., BIAS_DIMS:].to(dtype)
        if self.blind is None:
            return o
        assert self.state.text is not None
        length = self.state.text.length
        total = v.float().masked_fill((self.keys >= length)[:, None], 0.0).sum(dim=2, keepdim=True)
        mean = torch.stack(gather_shards(total, self.state.context.comm)).sum(0) / length
        return torch.where(self.blind[:, None, :, None], mean.to(dtype), o)


class MptLM:
    """MPT: no positions but the biases. The methods are those of `RotaryLM`."""

    detects_packing = False

    def __init__(self, language_model: Any) -> None:
        self.model, self.stack = language_model, language_model.transformer

    def check(self) -> None:
        if self.stack.config.max_seq_len > MAX_POSITIONS:
            raise ConfigError(
                f"max_seq_len={self.stack.config.max_seq_len}: MPT's biases are exact to {MAX_POSITIONS} tokens; set a "
                "smaller model.lang_encoder.config.max_seq_len"
            )

    def install(self, patch: Patch) -> None:
        # Blocks are guarded rather than their attention, to which they pass the state within the bias.
        patch.guard(self.model, self.model.old_decoder_blocks)
        for module in self.stack.modules():
            if is_instance_by_name(module, "MptAttention"):
                patch.set(module, "forward", _attention_forward(module))
        patch.chunk_forwards(block.ffn for block in self.model.old_decoder_blocks)

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Return None: MPT ignores positions."""
        return None

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the mask unchanged: `run_decoder` makes the one that the blocks take."""
        return mask

    def called_modules(self) -> list[nn.Module]:
        """Return the modules that `run_decoder` calls."""
        return [*self.stack.blocks, self.stack.norm_f]

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Any, state: ForwardState, **kwargs: Any
    ) -> Any:
        """Run the blocks as `MptModel.forward` does."""
        stack, output_states = self.stack, kwargs.get("output_hidden_states")
        output_states = stack.config.output_hidden_states if output_states is None else output_states
        bias: Any = self._sharded_bias(embeds.shape[1], cache, state, embeds.device)
        causal = None
        if bias is None:
            bias = stack.build_mpt_alibi_tensor(stack.num_heads, stack.config.max_seq_len, device=embeds.device)
            causal = create_causal_mask(
                config=stack.config, inputs_embeds=embeds, attention_mask=mask, **cache_argument(cache)
            ).bool()
        hidden, states = embeds, []
        for block in stack.blocks:
            states.append(hidden)
            hidden = block(hidden, layer_past=cache, attention_mask=causal, position_bias=bias, seqpar=state)[0]
        hidden = stack.norm_f(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, hidden_states=(*states, hidden) if output_states else None
        )

    def _sharded_bias(self, rows: int, cache: Any, state: ForwardState, device: torch.device) -> ShardedBias | None:
        """Return the bias of a pass in which a rank has only some of the text's keys; None in other passes."""
        blind = None
        if state.shards_text:
            assert state.text is not None
            total = state.text.length
            row_positions = key_positions = state.text.positions(state.context.comm.rank)
            valid = state.text.valid
            # Not with Star Attention, whose prompts have no labels: those rows are zeros there, and nothing reads them.
            if valid is not None and not isinstance(state.text, StarText) and not bool(valid[:, 0].all()):
                blind = (state.text.pad(valid, 1).cumsum(dim=1) == 0)[:, row_positions]
        elif state.cached_text is not None:
            cache_state = cache_state_of(cache)
            assert cache_state is not None and cache_state.text_kv is not None
            total, key_positions = cache_state.text_kv.total, cache_state.text_kv.positions
            row_positions = torch.arange(total - rows, total)
        else:
            return None
        if total > self.stack.config.max_seq_len:
            raise ShapeError(
                f"{total} tokens, but this MPT has max_seq_len={self.stack.config.max_seq_len}; pass a shorter text"
            )
        slopes = -self.stack.build_mpt_alibi_tensor(self.stack.num_heads, 2, device=device)[:, 0, 0].float()
        blind = None if blind is None else copy_to_device(blind, device)
        both = copy_to_device(torch.cat([row_positions, key_positions]), device)
        rows_on_device, keys_on_device = both.split([len(row_positions), len(key_positions)])
        return ShardedBias(state, slopes, rows_on_device, keys_on_device, blind)


def _attention_forward(attention: Any) -> Any:
    unpatched = attention.forward

    @takes_cache
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Any,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_dropout(self.attn_dropout_p if self.training else 0.0)
        if not isinstance(position_bias, ShardedBias):
            return unpatched(hidden_states, position_bias, cache, attention_mask, **kwargs)
        o = position_bias.attend(*mpt_projections(self, hidden_states, cache), self.softmax_scale)
        return self.out_proj(merge_heads(o)), None

    return types.MethodType(forward, attention)


LANGUAGE_MODELS: dict[str, Any] = {"opt": OptLM, "llama": RotaryLM, "mpt": MptLM, "gpt_neox": RotaryLM}
"""By `model_type`."""


def language_model_of(language_model: Any) -> Any:
    """Return the object that runs this language model, whose `model_type` is one of `LANGUAGE_MODELS`."""
    return LANGUAGE_MODELS[language_model.config.model_type](language_model)
