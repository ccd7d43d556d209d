"""MPT under an OpenFlamingo. It brings its own attention with linear biases (ALiBi, arXiv 2108.12409), outside of
transformers' attention interface, and drops further arguments: so its blocks are run from here.

The score of row i and key j has the bias slope * (j - i), up to a constant of the row, which softmax does not see. The
distributed attention knows no bias, so the bias becomes part of the dot product, in dimensions of its own:

    slope * (j - i) = (slope, -i) . (j, slope)

Exactly so in every dtype: a slope is a sum of 3 bfloat16 numbers p (24 bits, all of its float32), a position is
256 * high + low with both below 257. Then every factor is exact even in bfloat16 and every product in float32. So is
every sum of the first part's products while positions stay below 65536: they are multiples of the last bit of p, which
has 8 bits, below 2 ** 24 of them. A row and a key that are near each other thus get their small difference, not that
of two large rounded numbers, wherever in the text they stand. (With the bias taken from the text's end, as unpatched, a
row at the beginning of 8192 tokens has it rounded to 2 ** -11.) What rounding there is comes from the other two parts,
which are 2 ** 8 and 2 ** 16 times smaller. The dimensions stand first, so that the sum over a row of scores begins with
them.

A row that sees no key, as padding before a text does, is the mean of all V here: its masked scores are all the same
number. That row is the one that a label on the first real token is predicted from.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from mllm_seqpar.checkpointing.chunked_mlp import chunk_forwards
from mllm_seqpar.comm.autograd import gather_shards
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.integrations.transformers.attention import refuse_dropout
from mllm_seqpar.integrations.transformers.cache import cache_state
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.forward_state import ForwardState, as_attended
from mllm_seqpar.runtime.star import StarText

BIAS_DIMS = 16
"""4 for each of 3 parts of a slope, and 4 of zeros: kernels like head dims that are multiples of 8."""
LONGEST = 65536
"""Positions up to here are exact, as two digits of base 256."""


def bias_dims(slopes: Tensor, scale: float, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first dimensions of q and k: their dot product times `scale` is slope * (key - row).

    Args:
        slopes: (H,) float32.
        scale: factor of q k^T.
        rows, keys: (s,) and (t,) int64 positions, on the device of `slopes`.

    Returns:
        (H, s, BIAS_DIMS) and (H, t, BIAS_DIMS) float32, all of them bfloat16 numbers.
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
class DealtBias:
    """Goes to MPT's attention in the place of its bias when text K and V are dealt to ranks; one for all layers.

    Attributes:
        call: the pass.
        slopes: (H,) float32.
        rows, keys: positions of this rank's rows, and of the keys that it has.
        blind: (B, s) bool, rows that see no key; None when there are none on any rank.
    """

    call: ForwardState
    slopes: Tensor
    rows: Tensor
    keys: Tensor
    blind: Tensor | None = None
    _dims: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (B, H, s, D) over k, v (B, H, t, D), this rank's and those of the others -> o (B, H, s, D)."""
        given = q.dtype
        q, k, v = as_attended(q, k, v)
        if self._dims is None:
            self._dims = bias_dims(self.slopes, scale, self.rows, self.keys)
        q, k = (
            torch.cat([dims.to(x.dtype).expand(x.shape[0], -1, -1, -1), x], -1)
            for dims, x in zip(self._dims, (q, k), strict=True)
        )
        wide = F.pad(v, (BIAS_DIMS, 0))
        if self.call.cached_text is not None:
            o = self.call.attend_cached_text(q, k, wide, scale)[0]
        else:
            o = self.call.attend(q, [self.call.text_keys(k, wide)], scale)
        o = o[..., BIAS_DIMS:].to(given)
        return o if self.blind is None else torch.where(self.blind[:, None, :, None], self._mean(v).to(given), o)

    def _mean(self, v: Tensor) -> Tensor:
        """v (B, H, s, D), this rank's -> its mean over all tokens of all ranks, padding to be dealt left out."""
        assert self.call.text is not None
        length = self.call.text.length
        own = v.float().masked_fill((self.keys >= length)[:, None], 0.0).sum(dim=2, keepdim=True)
        return torch.stack(gather_shards(own, self.call.context.comm)).sum(0) / length


class MptLM:
    """MPT: no positions but the biases."""

    packs = False

    def __init__(self, language_model: Any) -> None:
        self.model, self.stack = language_model, language_model.transformer

    def check(self) -> None:
        """Raises ConfigError for texts whose positions would not be exact."""
        if self.stack.config.max_seq_len > LONGEST:
            raise ConfigError(
                f"max_seq_len={self.stack.config.max_seq_len}: MPT's biases are exact to {LONGEST} tokens; set a "
                "smaller model.lang_encoder.config.max_seq_len"
            )

    def install(self, patch: Patch) -> None:
        """Replaces the forward of every block's attention, and of its MLP, which adds the residual by itself."""
        patch.guard(self.model, self.model.old_decoder_blocks)  # a block hands the call to its attention in the bias
        for block in self.stack.modules():
            if any(c.__name__ == "MptAttention" for c in type(block).__mro__):
                patch.set(block, "forward", _attention_forward(block))
        chunk_forwards(patch, (block.ffn for block in self.model.old_decoder_blocks))

    def positions(self, given: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor | None:
        """MPT ignores those that are given."""
        return None

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the mask unchanged: `decode` makes what the blocks take."""
        return mask

    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Any, call: ForwardState, **kwargs: Any
    ) -> Any:
        """Runs the blocks as `MptModel.forward` does; see `Family.decode`."""
        stack, wants_states = self.stack, kwargs.get("output_hidden_states")
        wants_states = stack.config.output_hidden_states if wants_states is None else wants_states
        bias: Any = self._dealt_bias(embeds.shape[1], cache, call, embeds.device)
        causal = None
        if bias is None:
            bias = stack.build_mpt_alibi_tensor(stack.num_heads, stack.config.max_seq_len, device=embeds.device)
            causal = create_causal_mask(
                config=stack.config, inputs_embeds=embeds, attention_mask=mask, past_key_values=cache
            ).bool()
        hidden, states = embeds, []
        for block in stack.blocks:
            states.append(hidden)
            hidden = block(hidden, layer_past=cache, attention_mask=causal, position_bias=bias, seqpar=call)[0]
        hidden = stack.norm_f(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, hidden_states=(*states, hidden) if wants_states else None
        )

    def _blind(self, call: ForwardState, rows: Tensor) -> Tensor | None:
        """(B, s) bool, the rows of a dealt text before the first token that the attention mask shows.

        Not with Star Attention, whose prompts have no labels: there those rows get zeros, and nothing reads them.
        """
        assert call.text is not None
        valid = call.text.blocks().valid
        if valid is None or isinstance(call.text, StarText) or bool(valid[:, 0].all()):
            return None
        return (valid.cumsum(dim=1) == 0)[:, rows]

    def _dealt_bias(self, rows: int, cache: Any, call: ForwardState, device: torch.device) -> DealtBias | None:
        """For passes in which a rank has some of the text's keys only; None in the others."""
        blind = None
        if call.shards_text:
            assert call.text is not None
            total = call.text.length
            row_positions = key_positions = call.text.positions(call.context.comm.rank)
            blind = self._blind(call, row_positions)
        elif call.cached_text is not None:
            beside = cache_state(cache)
            assert beside is not None and beside.text is not None
            kept = beside.text
            total, key_positions = kept.total, kept.positions
            row_positions = torch.arange(total - rows, total)
        else:
            return None
        if total > self.stack.config.max_seq_len:
            raise ShapeError(f"{total} tokens, but this MPT has max_seq_len={self.stack.config.max_seq_len}")
        slopes = -self.stack.build_mpt_alibi_tensor(self.stack.num_heads, 2, device=device)[:, 0, 0].float()
        blind = None if blind is None else blind.to(device)
        return DealtBias(call, slopes, row_positions.to(device), key_positions.to(device), blind)


def _attention_forward(attention: Any) -> Any:
    unpatched = attention.forward

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_dropout(self.attn_dropout_p if self.training else 0.0)
        if not isinstance(position_bias, DealtBias):
            return unpatched(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.chunk(3, dim=2)
        if hasattr(self, "q_ln"):  # MPT-1B normalises over the full width, before the heads are split
            q, k = self.q_ln(q).to(v.dtype), self.k_ln(k).to(v.dtype)
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        o = position_bias.attend(q, k, v, self.softmax_scale)
        return self.out_proj(o.transpose(1, 2).flatten(2)), None

    return types.MethodType(forward, attention)
