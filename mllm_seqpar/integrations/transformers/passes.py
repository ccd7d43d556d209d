"""The forward pass of a patched transformers model, the same for all families.

`Family` describes the model. This module first compares the inputs of the ranks, decides which tokens and frames each
rank computes, and returns loss and logits as the unpatched model does.

Without a cache, text and frames are sharded. In a pass that fills or continues a cache (a prompt, or a decoding step),
every rank has all text, and the frames are sharded. A long prompt is prefilled with its text sharded too; K and V of
text and frames then stay on the ranks that computed them. Star Attention shards the prompt's context in that way, and
computes the query after it on every rank.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, r requested rows, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache

from mllm_seqpar.models.cache_rows import attach
from mllm_seqpar.runtime.attention_record import AnyRecorder
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.fsdp_units import call_within
from mllm_seqpar.runtime.star import block_length
from mllm_seqpar.runtime.text import TextShards, select_logit_rows

from .cache import SequenceParallelCacheState, begin_prompt, cache_state_of, shard_cached_text, supports_sharded_text
from .data_parallel import with_accumulated_gradients
from .family import Family, require_same_pass
from .frames import PassFrames, frames_of_pass, log_shard_sizes
from .generation import share_random_state
from .inputs import ForwardInputs, check_star
from .text import (
    dummy_mask,
    embeddings,
    gather_hidden_states,
    rows_of_pass,
    star_text_shards,
    text_shards,
    uncached_outputs,
    whole_text_outputs,
)


def run_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run one forward pass of a patched model, and return what the model's `forward` returns."""
    family.context.require_same_world()
    run = _cached_pass if inputs.use_cache else _uncached_pass
    units = [module for module in family.bypassed_modules if isinstance(module, FSDPModule)]
    return call_within(units, functools.partial(run, family, inputs, logits_to_keep, kwargs))


def _uncached_pass(
    family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]
) -> Any:
    """Run a pass with text and frames sharded: training, evaluation, generation without a cache."""
    require_same_pass(family, inputs, logits_to_keep, kwargs)
    text = text_shards(family.context, inputs)
    frames = frames_of_pass(family, inputs)
    state, decoded = _run_sharded_rows(family, inputs, text, frames, kwargs)
    out = uncached_outputs(family, inputs, state, decoded, logits_to_keep, kwargs)
    return family.model_output(out, frames.features, inputs)


def _run_sharded_rows(
    family: Family,
    inputs: ForwardInputs,
    text: TextShards,
    frames: PassFrames,
    kwargs: Mapping[str, Any],
    cache: Any = None,
    recorder: AnyRecorder | None = None,
) -> tuple[ForwardState, Any]:
    """Run the decoder on this rank's rows of sharded text; return the state of the pass, and the decoder's output."""
    given = frames.of_shards(text)
    state = ForwardState(family.context, text=text, recorder=recorder, **given)
    log_shard_sizes(family, inputs, text.local if state.shards_text else inputs.length)
    # Without sharding, every rank computes all text, with the same dropout masks. The vision tower may have drawn other
    # random numbers on each rank.
    if not state.shards_text and family.model.training:
        share_random_state(family.context.comm, inputs.text.device)
    embeds, positions, mask = rows_of_pass(family, inputs, state)
    if not given:
        embeds = with_accumulated_gradients(embeds, family.model)
    return state, family.run_decoder(embeds, positions, mask, cache, state, **kwargs)


BROADCAST_ROWS = 64
"""Up to this number of rows, hidden states are broadcast from rank 0.

Ranks that choose tokens from logits with different last bits would generate different texts.
"""


def _cached_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run a pass that fills or continues a cache, and return the model's output."""
    cache = inputs.past_key_values
    if cache is None:
        cache = DynamicCache(config=family.text_config)
    if inputs.is_decoding_step:
        check_star(family.context.config, inputs)
    else:
        require_same_pass(family, inputs, logits_to_keep, kwargs, cache)
    return _CachedPass(family, inputs, cache, logits_to_keep, kwargs).run()


@dataclass
class _CachedPass:
    """One pass with a cache.

    Attributes:
        cache_state: what the patched model stores with the transformers cache.
        frames: the frames of this pass, and those in the cache.
    """

    family: Family
    inputs: ForwardInputs
    cache: Any
    logits_to_keep: int | Tensor
    kwargs: Mapping[str, Any]
    cache_state: SequenceParallelCacheState = field(init=False)
    frames: PassFrames = field(init=False)

    def __post_init__(self) -> None:
        self.context, self.model_layers = self.family.context, self.family.text_config.num_hidden_layers
        if self.inputs.past_length:
            self.cache_state = self._continue_cache()
        else:
            self.cache_state = begin_prompt(self.cache, self.inputs.batch, self.context.comm, self.model_layers)
            self.family.continue_cache(self.cache, self.cache_state, 0)

    def run(self) -> Any:
        state = self.cache_state
        state.active = True
        try:
            self.frames = frames_of_pass(self.family, self.inputs, state)
            if self.frames.features is not None:
                self.family.mark_cache(self.cache, state)
            hidden, hidden_states = self._sharded_prompt() if self._shards_prompt() else self._replicated()
            out = whole_text_outputs(self.family, self.inputs, hidden, hidden_states, self.kwargs, self.cache)
        finally:
            state.active = False
        if state.visual is not None:
            state.visual.close()
        return self.family.model_output(out, self.frames.features, self.inputs)

    def _continue_cache(self) -> SequenceParallelCacheState:
        """Return the state of a cache that holds some text; raise if this pass cannot continue it."""
        found, comm = cache_state_of(self.cache), self.context.comm
        state = SequenceParallelCacheState(self.inputs.batch, comm) if found is None else found
        state.continue_in(comm)
        self.family.continue_cache(self.cache, state, self.inputs.past_length)
        if found is None:
            attach(self.cache, state, self.model_layers)
        state.rows_of(self.inputs.batch)
        return state

    def _shards_prompt(self) -> bool:
        """Return whether this is a prompt whose text is sharded; the same on all ranks."""
        config, inputs, size = self.context.config, self.inputs, self.context.comm.size
        return (
            inputs.past_length == 0
            and size > 1
            and config.self_attention != "local"
            and config.shard_prompt_from is not None
            and inputs.length >= config.shard_prompt_from
            and (config.self_attention != "star" or block_length(inputs.length, size) > 0)
            and not torch.is_grad_enabled()
            and supports_sharded_text(self.cache)
        )

    def _replicated(self) -> tuple[Tensor, Any]:
        """Run a pass with all text on every rank and the frames sharded.

        Returns:
            The last hidden states (..., r, C) of the requested rows, and the hidden states of every layer or None.
        """
        decoded = self._run_replicated_rows()
        return self._broadcast(select_logit_rows(decoded.last_hidden_state, self.logits_to_keep)), decoded.hidden_states

    def _sharded_prompt(self) -> tuple[Tensor, Any]:
        """Run a long prompt with text and frames sharded; K and V of both stay on the ranks that computed them.

        Star Attention shards only the context. The rows of the query are computed after it, like all later rows. The
        result is that of `_replicated`.
        """
        family, inputs, state = self.family, self.inputs, self.cache_state
        star = self.context.config.self_attention == "star"
        text = (star_text_shards if star else text_shards)(self.context, inputs)
        shard_cached_text(self.cache, state, text, self.model_layers)
        recorder = None if star else self._recorder(inputs.length, text)
        _, decoded = _run_sharded_rows(family, inputs, text, self.frames, self.kwargs, self.cache, recorder)
        states = gather_hidden_states(text, decoded.hidden_states)
        if not star:
            return self._requested_rows(text, decoded.last_hidden_state), states
        query = self._run_replicated_rows(start=text.length)
        hidden = self._requested_rows(text, decoded.last_hidden_state, query.last_hidden_state)
        later = query.hidden_states
        if states is not None:
            pairs = None if later is None else zip(states, later, strict=True)
            states = None if pairs is None else tuple(None if x is None else torch.cat([x, y], 1) for x, y in pairs)
        return self._broadcast(hidden), states

    def _run_replicated_rows(self, start: int = 0) -> Any:
        """Run the decoder on every rank on the rows from `start`, over the K and V in the cache."""
        family, state = self.family, self.cache_state
        positions = self.inputs.positions[..., start:]
        embeds = embeddings(family, self.inputs, lambda text: text[:, start:])
        length, mask, cached_text = embeds.shape[1], self.inputs.attention_mask, None
        if state.text is not None:
            state.text.extend(length)
            on_host = self.inputs.on_host("attention_mask")
            valid = mask if on_host is None else on_host
            cached_text = functools.partial(state.text.rectangles, length, valid)
            mask = dummy_mask(embeds)
        mask = family.text_mask(embeds, mask, positions, self.cache)
        frames = self.frames.of_rows(start, length)
        tokens = int(self.cache.get_seq_length()) + length
        recorder = self._recorder(tokens)
        forward_state = ForwardState(self.context, cached_text=cached_text, tokens=tokens, recorder=recorder, **frames)
        embeds = forward_state.embedded(embeds)
        return family.run_decoder(embeds, positions, mask, self.cache, forward_state, **self.kwargs)

    def _recorder(self, tokens: int, shards: TextShards | None = None) -> AnyRecorder | None:
        """Return what records the attention of the last row to the frames, if it is recorded; None without frames.

        `tokens` is the number of tokens so far, those of this pass included; `shards` is the sharding of the rows.
        """
        records = self.context.records
        positions = None if shards is None else shards.positions(shards.comm.rank)
        return self.frames.begin_record(records[-1], tokens, positions) if records else None

    def _requested_rows(self, text: TextShards, local: Tensor, query: Tensor | None = None) -> Tensor:
        """Return, on every rank, the hidden states of the rows that `logits_to_keep` asks for.

        `local` (B, s, C) is the shard of the first rows; `query` (B, r, C) are those after, on every rank.
        """
        wanted = self.logits_to_keep
        every_row = isinstance(wanted, int) and wanted == 0
        if every_row or (isinstance(wanted, Tensor) and wanted.dim() == 2):
            whole = text.unshard(local, 1)
            return select_logit_rows(whole if query is None else torch.cat([whole, query], dim=1), wanted)
        rows = select_logit_rows(torch.arange(self.inputs.length)[None], wanted)[0]
        sharded = rows < text.length
        if query is None or bool(sharded.all()):
            return text.gather_rows(local, rows)
        out = query[:, (rows - text.length).clamp(min=0).to(query.device)]
        if bool(sharded.any()):
            out[:, sharded.to(out.device)] = text.gather_rows(local, rows[sharded])
        return out

    def _broadcast(self, hidden: Tensor) -> Tensor:
        """Make hidden states (..., r, C) that every rank computed bitwise equal on all ranks, if there are few rows."""
        if hidden.shape[-2] <= BROADCAST_ROWS and not hidden.requires_grad:
            return self.context.comm.broadcast(hidden, "hidden")
        return hidden
