"""The forward pass of a patched transformers model, the same for all families: `Pass`.

A pass computes its rows of text in one part or two (`Rows`). The rows of a part are sharded, or every rank computes all
of them. The frames are sharded when they are encoded.

    training, evaluation        all rows, sharded
    a long prompt               all rows, sharded; K and V of text and frames stay on the ranks that computed them
    ... with Star Attention     the context, sharded in blocks; then the query on every rank
    other prompts, decoding     all rows on every rank, over the K and V in the cache

With `self_attention="local"`, a part with a sharding has all rows on every rank too, except in attention to frames.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, C channels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar._compat import cache_argument
from mllm_seqpar.comm.backends import require_transferable
from mllm_seqpar.digests import fingerprint_of
from mllm_seqpar.fsdp_units import call_within, refuse_other_sharding
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.adapters import refuse_arguments_of_samples
from mllm_seqpar.models.cache import (
    SequenceParallelCacheState,
    attach,
    begin_prompt,
    cache_state_of,
    shard_cached_text,
    supports_sharded_text,
)
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import KVSource, frames_of_shards
from mllm_seqpar.runtime.loss import loss_of_targets, require_tokens, sharded_causal_lm_loss
from mllm_seqpar.runtime.star import StarText, block_length
from mllm_seqpar.runtime.text import Rows, TextShards, packed_starts, requested_rows, select_logit_rows
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.runtime.visual_tokens import FrameTokens, VisualTokens
from mllm_seqpar.sharding import span_length

from .checks import (
    check_arguments,
    check_computed_loss,
    check_frames,
    check_star,
    check_text,
    check_tokens,
    custom_loss,
    refuse_reentrant_checkpointing,
    refuse_trained_cache,
    require_same_inputs,
)
from .facts import ModelFacts
from .generation import share_random_state
from .inputs import ForwardInputs
from .tower import Tower, with_accumulated_gradients

BROADCAST_ROWS = 64
"""Up to this number of rows, hidden states are broadcast from rank 0.

Ranks that choose tokens from logits with different last bits would generate different texts.
"""


class AttendedFrames(NamedTuple):
    """The frames that the rows of a pass attend to by cross-attention.

    Attributes:
        source: where their K and V come from.
        mask: which of them each row (B, L) attends to.
        facts: what `ModelFacts.row_facts` returned for all rows.
        features: the features that this rank has encoded in this pass; None if the frames are those of the cache.
    """

    source: KVSource
    mask: FrameMask
    facts: Mapping[str, Tensor]
    features: Tensor | None


class Pass:
    """One forward pass of a patched model.

    Args:
        family: what the pass reads of the model.
        inputs: the arguments of the model's forward.
        logits_to_keep: as in transformers.
        kwargs: further arguments of the forward, which the decoder and the loss receive.

    Attributes:
        inputs: the arguments; once the ranks have compared theirs, a copy with what they agreed on.
        cache: the transformers cache to continue or to fill; None for a pass without one.
        cache_state: what the patched model stores with the cache.
        attended: the frames that rows attend to; None without any, and in decoder-only models.
        tower: the vision tower, in a pass that encodes frames or that other ranks encode frames in.
    """

    def __init__(
        self, family: ModelFacts[Any], inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]
    ) -> None:
        self.family, self.inputs, self.logits_to_keep, self.kwargs = family, inputs, logits_to_keep, kwargs
        self.context, self.comm, self.config = family.context, family.context.comm, family.context.config
        self.cache = inputs.cache
        self.cache_state: SequenceParallelCacheState | None = None
        self.attended: AttendedFrames | None = None
        self.tower: Tower | None = None

    def run(self) -> Any:
        """Run the pass, and return what the model's `forward` returns."""
        self.context.require_same_world()
        fsdp_units = [module for module in self.family.bypassed_modules if isinstance(module, FSDPModule)]
        return call_within(fsdp_units, self._run)

    def _run(self) -> Any:
        if self.cache is None and self.inputs.use_cache:
            self.cache = DynamicCache(config=self.family.text_config)
        if (continued := self.inputs.cache_state) is not None:
            continued.crop_to(self.inputs.past_length)  # frames whose text was cropped are gone
        self._check()
        if self.cache is not None:
            self.cache_state = self._continued_cache_state()
            if self.inputs.past_length:
                self.inputs = self.inputs.changed(_state=self.cache_state)
        with self.cache_state.in_pass() if self.cache_state is not None else contextlib.nullcontext():
            parts = self._parts()
            visual_tokens: list[list[VisualTokens] | None] = [None] * len(parts)
            if self.family.has_cross_attention:
                self.attended = self._attended_frames()
            else:
                visual_tokens = self._embedded_frames(parts)
            if self.cache_state is not None and parts[0].text is not None:
                # Only now: a cache whose frames could not be encoded is still an ordinary one.
                layers = self.family.text_config.num_hidden_layers
                shard_cached_text(self.cache, self.cache_state, parts[0].text, layers)
            decoded = [
                self._run_rows(rows, self._state(rows, tokens))
                for rows, tokens in zip(parts, visual_tokens, strict=True)
            ]
            out = self._outputs(parts, decoded)
        return self.family.model_output(out, None if self.attended is None else self.attended.features, self.inputs)

    # The arguments and the cache.

    def _check(self) -> None:
        """Raise on every rank unless the pass is valid on all ranks, and their inputs are the same.

        The modes of the model are compared too, and in the first passes a sample of its weights and which are trained.
        """
        one_form = self.inputs.input_ids is None or self.inputs.inputs_embeds is None  # `check_text` refuses both
        if self.inputs.is_decoding_step and one_form:  # the ranks have compared the text before it
            if self.config.self_attention == "star":
                check_star(self.inputs)
            if self.kwargs:  # seldom: `generate` passes none
                check_arguments(self.inputs, self.kwargs, (self.family.model.config, self.family.text_config))
            return
        model = self.family.model
        weights = [*model.parameters()] if self.context.compares_weights(torch.is_grad_enabled()) else []
        compared = {**self.kwargs, "logits_to_keep": self.logits_to_keep}
        if self.cache is not None:  # its class decides whether the text of a prompt is sharded
            compared["class of the cache supports sharded text"] = supports_sharded_text(self.cache)
        check = functools.partial(self._check_rank, weights)
        self.inputs = require_same_inputs(self.comm, self.inputs, check, model=model, kwargs=compared, weights=weights)
        check_tokens(self.inputs, model.get_input_embeddings())

    def _check_rank(self, weights: Sequence[Tensor]) -> None:
        """Raise for what is invalid on this rank; `weights` are those of the model if this pass looks at it."""
        family, inputs, size = self.family, self.inputs, self.comm.size
        if inputs.error is not None:
            raise inputs.error
        if weights:
            refuse_other_sharding(family.model, tensor_parallel=size == 1 and not family.has_cross_attention)
            pixels = inputs.frames is not None and not inputs.frames_are_features
            # Without pixels, the vision tower may stay elsewhere.
            require_transferable(self.comm, family.model, weights if pixels else [family.embedding_weight()])
        if weights or family.has_adapters:
            family.has_adapters = refuse_arguments_of_samples(family.model, family.frame_modules, size)
        check_text(inputs)
        check_arguments(inputs, self.kwargs, (family.model.config, family.text_config))
        if self.config.self_attention == "star":
            check_star(inputs)
        check_frames(inputs, self.comm, family.frame_arguments)
        if torch.is_grad_enabled():
            if inputs.past_length and size > 1 and family.has_cross_attention:
                refuse_trained_cache(inputs.cache)
            if family.model.training and list(family.visual_attention()):
                refuse_reentrant_checkpointing(family.checkpointed_modules)
        if inputs.has_labels:
            shards_text = size > 1 and self.config.shards_text and not inputs.use_cache
            if shards_text or self._leaves_out_logits:
                check_computed_loss(family.model, inputs, self.logits_to_keep)
        family.check_inputs(inputs)

    def _continued_cache_state(self) -> SequenceParallelCacheState:
        """Return what the patched model stores with the cache; raise if this pass cannot continue it."""
        family, inputs, cache = self.family, self.inputs, self.cache
        group, model_layers = (self.comm.rank, self.comm.size), family.text_config.num_hidden_layers
        if not inputs.past_length:
            state = begin_prompt(cache, inputs.batch, group, model_layers)
            family.continue_cache(inputs, cache, state)
            return state
        attached = cache_state_of(cache)
        state = SequenceParallelCacheState(inputs.batch, group) if attached is None else attached
        family.continue_cache(inputs, cache, state)
        state.continue_in(group)
        if attached is None:
            attach(cache, state, model_layers)
        state.rows_of(inputs.batch)
        return state

    # The rows of the text.

    def _parts(self) -> list[Rows]:
        """Return the rows of each part of a pass, in the order in which they are computed; the same on all ranks.

        MaskError refuses an attention mask that is not (B, L) where the text is sharded, and for Star Attention samples
        that are all padding in the anchor.
        """
        inputs, config, comm, length = self.inputs, self.config, self.comm, self.inputs.length
        if self.cache_state is not None:
            shards_prompt = (
                not inputs.past_length
                and comm.size > 1
                and config.shards_text
                and config.shard_prompt_from is not None
                and length >= config.shard_prompt_from
                and (config.self_attention != "star" or block_length(length, comm.size) > 0)
                and not torch.is_grad_enabled()
                and supports_sharded_text(self.cache)
            )
            if not shards_prompt:
                return [Rows(0, length)]
            if config.self_attention == "star":
                star = StarText(inputs.batch, length, comm, inputs.padding_mask, inputs.packed_starts)
                star.require_text_in_anchor()
                if comm.size > 2:  # with two ranks, the anchor and the second rank's block are the whole context
                    self.context.report_approximation(star.block, length - star.length)
                return [Rows(0, star.length, star), Rows(star.length, length)]
        text = TextShards(inputs.batch, length, comm, config.text_layout, inputs.padding_mask, inputs.packed_starts)
        return [Rows(0, length, text)]

    # The frames. All ranks call these methods together. Frames reach the rows in one of two forms, or not at all in a
    # pass of text only: layers attend to them, to features of this pass or to K and V in the cache; or, in a
    # decoder-only model, their embeddings are among the rows, to which later tokens attend as to text.

    def _attended_frames(self) -> AttendedFrames | None:
        """Return the frames that rows attend to: encoded now, or those of the cache; None in a pass of text only.

        K and V of frames that are encoded in a pass with a cache are stored in the cache.
        """
        family, state, features, visual = self.family, self.cache_state, None, None
        encoded = self.inputs if state is None else self._encoded_inputs(state)
        if encoded is not None:
            self.inputs = encoded
            family.check_new_frames(encoded)
            tower = self.tower = Tower(family, encoded)
            features = tower.features()
            if features is None:
                return None
            visual = tower.visual_features(features)
            if state is not None:
                self._store_frames(state, visual, features)
                family.complete_cache(self.inputs, self.cache, state)
        cached = None if state is None else state.visual_kv
        source: KVSource | None = visual if cached is None else cached
        if source is None:
            return None
        inputs, tokens = self.inputs, source.tokens_per_unit
        if not (inputs.total_frames if cached is None else cached.total_frames):
            none = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
            mask = FrameMask.from_intervals(none, none, tokens, source.units)  # no row attends to the empty frame
        elif state is None or cached is None or cached.earlier is None:
            mask = family.visibility(inputs, source.units, tokens)
        else:  # of each pass that brought frames
            views = [*map(inputs.of_pass, state.by_pass()[:-1]), inputs]
            parts = zip(views, cached.parts, strict=True)
            mask = FrameMask.joined([family.visibility(view, part.own_units, tokens) for view, part in parts])
        return AttendedFrames(source, mask, family.row_facts(inputs, mask), features)

    def _encoded_inputs(self, state: SequenceParallelCacheState) -> ForwardInputs | None:
        """Return the inputs of a pass with a cache if it encodes frames: a prompt does, for FSDP also without any.

        Frames that the cache has already are not encoded again. Others follow them, or take their place: if `generate`
        repeats frames, every pass attends to its own, as unpatched (`ModelFacts.appends_frames`).
        """
        family, inputs = self.family, self.inputs
        if state.frames is None:
            return inputs if not inputs.past_length or inputs.total_frames > 0 else None
        if inputs.frames is None or not inputs.total_frames:
            return None
        known = self._fingerprint(inputs.frames) in state.frame_fingerprints
        # The frames of one rank may be the same while those of another are not.
        if not inputs.compares_values_of_frames:
            known = all(number for (number,) in self.comm.gather_ints([int(known)]))
        if family.appends_frames(inputs, known):
            return inputs.changed(appends_frames=True)
        return inputs if not known or (family.repeats_frames and torch.is_grad_enabled()) else None

    def _fingerprint(self, frames: Tensor) -> tuple[int, ...]:
        """Return the fingerprint of the frames that the caller passes."""
        return fingerprint_of(frames, self.inputs.on_host("sample_of_frames"))

    def _store_frames(self, state: SequenceParallelCacheState, visual: VisualFeatures, features: Tensor) -> None:
        """Store the frames of this pass in the cache, in place of others or after them."""
        inputs, fingerprints = self.inputs, {fingerprint_of(features)}
        if inputs.frames is not None:
            fingerprints.add(self._fingerprint(inputs.frames))
        earlier = state.frames if inputs.appends_frames else None
        source = VisualKVCache(inputs.total_frames, inputs.sizes, visual.tokens_per_unit, visual, earlier)
        state.store_frames(source, inputs.batch, fingerprints, inputs.past_length)

    def _embedded_frames(self, parts: Sequence[Rows]) -> list[list[VisualTokens] | None]:
        """Return the embeddings of frames among this rank's rows, for each part of the rows.

        Each rank encodes its frames, and sends their embeddings to the ranks of their rows: all of them here, so that
        the layers begin without those of other rows. Frames of an earlier pass are in the cache, as tokens of the text.
        """
        family, inputs, comm, past = self.family, self.inputs, self.comm, self.inputs.past_length
        if self.cache_state is not None and past and not inputs.total_frames:
            return [None] * len(parts)
        layout = family.visual_token_layout(inputs)
        self.tower = Tower(family, inputs)
        embeddings = self.tower.embeddings()
        if (state := self.cache_state) is not None and layout.tokens.total:
            tokens = layout.tokens
            if past:
                earlier = FrameTokens.none() if state.frame_tokens is None else state.frame_tokens
                state.frame_tokens = earlier.followed_by(tokens, past, state.rows_of(inputs.batch))
            else:
                state.frame_tokens = tokens
        if embeddings is None:
            return [None] * len(parts)
        width = family.text_config.hidden_size
        received: list[list[VisualTokens] | None] = []
        for rows in parts:
            by_rank = [torch.arange(rows.stop - rows.start)] * comm.size
            if rows.text is not None and self.config.shards_text:
                by_rank = [rows.text.positions(rank) for rank in range(comm.size)]
            routes = layout.between(rows.start, rows.stop).routes(by_rank, comm.rank)
            received.append(routes.exchange(embeddings, comm, embeddings.shape[1] // width))
        return received

    # The layers, which share a state while they compute a part of the rows.

    def _state(self, rows: Rows, visual_tokens: list[VisualTokens] | None) -> ForwardState:
        """Return the state that the layers share while they compute a part of the rows.

        Rows without a sharding are computed by every rank, over the K and V in the cache.
        """
        inputs, attended, cache_state, text = self.inputs, self.attended, self.cache_state, rows.text
        cached_text, frames, facts, recorder = None, None, None, None
        if text is None:
            assert cache_state is not None
            if cache_state.text_kv is not None:
                count = rows.stop - rows.start
                cache_state.text_kv.extend(count)
                cached_text = functools.partial(cache_state.text_kv.mask, count, inputs.padding_mask)
            if attended is not None:
                assert cache_state.visual_kv is not None
                mask, facts = attended.mask, attended.facts
                if rows.start:
                    mask = mask.take(torch.arange(rows.start, rows.stop))
                    facts = {name: x[:, rows.start :] for name, x in facts.items()}
                frames = cache_state.visual_kv.frames_of(mask, self.comm)
        elif attended is not None:
            source, facts = attended.source, attended.facts
            cached = None if cache_state is None else cache_state.visual_kv
            sizes = inputs.sizes if cached is None else cached.sizes
            index = functools.partial(self.family.unit_index, inputs, ((0, inputs.sizes.total),))
            shape = self.family.cross_attention_shape()
            frames = frames_of_shards(self.context, source, attended.mask, text, sizes, index, shape)
            if self.config.shards_text:
                facts = {name: text.shard(x, 1) for name, x in facts.items()}
        if cache_state is not None and not isinstance(text, StarText):
            recorder = self.context.recorder(self, rows)
        return ForwardState(
            self.context,
            text=text,
            frames=frames,
            row_facts=facts,
            cached_text=cached_text,
            visual_tokens=visual_tokens,
            text_length=inputs.past_length + rows.stop if text is None else None,
            recorder=recorder,
            whole_positions=inputs.positions,
        )

    def _run_rows(self, rows: Rows, state: ForwardState) -> Any:
        """Run the decoder on a part of the rows, this rank's or all of them; return its output."""
        family, inputs, text = self.family, self.inputs, rows.text
        tokens, positions = inputs.tokens, inputs.positions
        has_whole_text = state.text_mask_kind() == "decoder"
        has_frames = state.frames is not None or bool(state.visual_tokens)
        if text is None:
            if rows.start:
                tokens, positions = tokens[:, rows.start :], positions[..., rows.start :]
        else:
            own_tokens = text.local if state.shards_text else inputs.length
            own_frames = span_length(self.tower.own) if self.tower is not None and inputs.total_frames else 0
            self.context.count_shards((own_tokens, inputs.length), (own_frames, inputs.total_frames))
            # Without sharding, every rank computes all tokens, with the same dropout masks. The vision tower may have
            # drawn other random numbers on each rank.
            if not state.shards_text and family.model.training:
                share_random_state(self.comm, tokens.device)
            if not has_whole_text:
                tokens, positions = text.shard(tokens, 1), text.shard(positions, -1)
        embeds = family.model.get_input_embeddings()(tokens) if inputs.inputs_embeds is None else tokens
        if has_whole_text:
            mask = self._decoder_mask(rows, embeds, positions)
        else:  # the mask is in the state, and transformers passes on a mask of four dimensions
            mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=embeds.device)
        if state.visual_tokens:  # the embeddings of the text alone are freed
            embeds = state.visual_tokens.pop(0).replace_rows(embeds)
        if text is not None and not has_frames:
            embeds = with_accumulated_gradients(embeds, family.model)
        return family.run_decoder(embeds, positions, mask, self.cache, state, **self.kwargs)

    def _decoder_mask(self, rows: Rows, embeds: Tensor, positions: Tensor) -> Any:
        """Return the decoder's `attention_mask` for rows whose text this rank has whole."""
        inputs, mask = self.inputs, self.inputs.attention_mask
        if rows.text is not None and mask is None and not inputs.detects_packing:
            # A mask of ones keeps transformers from looking at positions.
            mask = torch.ones(inputs.batch, inputs.length, dtype=torch.long, device=embeds.device)
        decoder_mask = self.family.text_mask(embeds, mask, positions, self.cache)
        if decoder_mask is None and mask is not None and self.cache is None and inputs.text_position_ids is not None:
            if packed_starts(inputs.text_position_ids) is not None:
                # Without a mask, the decoder would separate sequences by their positions.
                shape = inputs.length, inputs.length
                return torch.ones(shape, dtype=torch.bool, device=embeds.device).tril()[None, None]
        return decoder_mask

    # The outputs.

    @property
    def _leaves_out_logits(self) -> bool:
        """Whether a pass returns a loss and no logits; the head then computes only the rows with a target."""
        wanted = self.config.logits != "none" or self.inputs.is_decoding_step
        return not wanted and self.inputs.has_labels and self._keeps_every_row

    @property
    def _keeps_every_row(self) -> bool:
        return isinstance(self.logits_to_keep, int) and self.logits_to_keep == 0

    @property
    def _has_loss_of_every_row(self) -> bool:
        """Whether the loss is that of the whole text, also if logits of some rows only are returned.

        Labels of another shape belong to the rows whose logits are returned, and so do all labels of a loss function of
        the user.
        """
        inputs = self.inputs
        if not inputs.has_labels or inputs.is_decoding_step or custom_loss(self.family.model) is not None:
            return False
        return inputs.given_labels.shape == (inputs.batch, inputs.length)

    def _outputs(self, parts: Sequence[Rows], decoded: Sequence[Any]) -> CausalLMOutputWithPast:
        """Return loss, logits and hidden states, given the decoder's output for each part of the rows."""
        hidden, states = decoded[0].last_hidden_state, decoded[0].hidden_states
        # None if this rank has the hidden states of all rows, so that there is nothing to gather
        sharded_text = parts[0].text if self.comm.size > 1 and self.config.shards_text else None
        if sharded_text is not None and states is not None:  # None for a layer stays None
            states = tuple(None if x is None else sharded_text.unshard(x, 1) for x in states)
        if sharded_text is not None and self.cache is None:
            loss, logits = self._loss_and_logits_of_shards(sharded_text, hidden)
        else:
            kept_rows = 0 if self._has_loss_of_every_row else self.logits_to_keep
            if sharded_text is None:
                hidden = select_logit_rows(hidden, kept_rows)
            elif len(parts) == 1:
                hidden = requested_rows(sharded_text, kept_rows, hidden)
            else:  # of Star Attention, the query after the context
                query, later = decoded[1].last_hidden_state, decoded[1].hidden_states
                hidden = requested_rows(sharded_text, kept_rows, hidden, query)
                if states is not None and later is not None:
                    pairs = zip(states, later, strict=True)
                    states = tuple(None if x is None else torch.cat([x, y], 1) for x, y in pairs)
            if parts[-1].text is None and hidden.shape[-2] <= BROADCAST_ROWS and not hidden.requires_grad:
                hidden = self.comm.broadcast(hidden, "hidden")  # so that all ranks have the same bits
            loss, logits = self._loss_and_logits(hidden)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states, **cache_argument(self.cache))

    def _loss(self, hidden: Tensor, logits: Tensor | None = None, text: TextShards | None = None) -> Tensor:
        """Return the loss of the whole text from logits, or from hidden states: the head then computes only targets.

        Both are of the rows that `text` shards, or of all rows.
        """
        targets = self.inputs.target_labels(self.kwargs.get("ignore_index"))
        options: dict[str, Any] = {name: self.kwargs.get(name) for name in ("num_items_in_batch", "ignore_index")}
        options |= {"target_weights": self.family.target_weights}
        if logits is None:
            return loss_of_targets(hidden, self.family.model.get_output_embeddings(), targets, text, **options)
        return sharded_causal_lm_loss(logits, targets, text, **options)

    def _loss_and_logits_of_shards(self, text: TextShards, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss and, as `config.logits` says, the logits, given this rank's last hidden states (B, s, C).

        If `logits_to_keep` asks for some rows of the whole text only, they are returned whatever `config.logits` says.
        """
        has_labels, head, option = self.inputs.has_labels, self.family.model.get_output_embeddings(), self.config.logits
        if has_labels and not self._has_loss_of_every_row:
            return self._loss_and_logits(select_logit_rows(text.unshard(hidden, 1), self.logits_to_keep))
        if self._leaves_out_logits:
            return self._loss(hidden, None, text), None
        logits = loss = None
        if has_labels:
            logits = head(hidden)
            loss = self._loss(hidden, logits, text)
        if option == "full" or not self._keeps_every_row or (option != "local" and not has_labels):
            # Hidden states are gathered rather than logits, because the vocabulary is wider than they are.
            logits = head(select_logit_rows(text.unshard(hidden, 1), self.logits_to_keep))
        elif logits is None:
            logits = head(hidden)
        return loss, logits

    def _loss_and_logits(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss and the logits of a pass in which every rank has all text.

        `hidden` (B, r, C) are the last hidden states of the rows whose logits are returned, or of all rows if the loss
        is that of the whole text.
        """
        inputs, kwargs, model = self.inputs, self.kwargs, self.family.model
        head = model.get_output_embeddings()
        if not inputs.has_labels:
            return None, head(hidden)
        if self._leaves_out_logits:
            return self._loss(hidden), None
        if self._has_loss_of_every_row:
            kept = select_logit_rows(hidden, self.logits_to_keep)
            if kept.shape != hidden.shape or isinstance(self.logits_to_keep, Tensor):
                return self._loss(hidden), head(kept)
        logits = head(hidden)
        if custom_loss(model) is None and not inputs.is_decoding_step:
            targets = inputs.target_labels(kwargs.get("ignore_index"))
            if self.family.target_weights(targets) is not None:
                return self._loss(hidden, logits), logits
            require_tokens(targets, logits.shape[-1], kwargs.get("ignore_index"))
        if inputs.shift_labels is not None:
            kwargs = {**kwargs, "shift_labels": inputs.shift_labels.contiguous()}  # the loss takes a view of it
        # Labels are passed unchanged, because a loss function of the user may take unshifted ones only. Logits may have
        # more columns than `config.vocab_size` (IDEFICS' `additional_vocab_size`).
        columns = logits.shape[-1]
        return model.loss_function(logits=logits, labels=inputs.labels, vocab_size=columns, **kwargs), logits
