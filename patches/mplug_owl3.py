"""mPLUG-Owl3 (`mllm_seqpar.models.mplug_owl3`): where its sites are, what its tokens see, and its sharded forward.

Sites: the model's forward; the attention of every decoder layer, of which the hyper layers also look at the frames.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar.attention.block import BlockMath, Partial
from mllm_seqpar.call import SeqParCall, VisualShards
from mllm_seqpar.context import SeqParContext
from mllm_seqpar.errors import AdapterError, ShapeError
from mllm_seqpar.loss import sharded_causal_lm_loss
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.mplug_owl3.visual_inputs import VisualCache, visual_cache
from mllm_seqpar.patching import Patch
from mllm_seqpar.sharding import FrameShard, frame_bounds
from mllm_seqpar.text import TextShards
from mllm_seqpar.visual import SharedVisual

from . import hf_attention
from .hf_generation import patch_generate
from .hf_inputs import Inputs, agree_on_inputs, local_features
from .text_masks import causal_tiles, text_shards


class MPlugOwl3Adapter:
    """The adapter of the native mPLUG-Owl3, both variants."""

    name = "mPLUG-Owl3"

    def matches(self, model: nn.Module) -> bool:
        """Whether it is `MPlugOwl3ForConditionalGeneration`, also after `fully_shard` made it a class of its own."""
        return any(c.__name__ == "MPlugOwl3ForConditionalGeneration" for c in type(model).__mro__)

    def check(self, model: Any, context: SeqParContext) -> None:
        """Every decoder layer must be one that the patch knows, and every hyper layer a hyper attention."""
        from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention

        hyper = {number - 1 for number in model.config.hyper_layers}
        for index, layer in enumerate(model.language_model.model.layers):
            if isinstance(layer.self_attn, HyperAttention) is not (index in hyper):
                raise AdapterError(
                    f"layer {index} has {type(layer.self_attn).__name__}, but config.hyper_layers is "
                    f"{model.config.hyper_layers} (counted from 1)"
                )

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replaces the forward of the model and of its hyper layers, and selects the text's attention function."""
        decoder = model.language_model.model
        hf_attention.select(patch, [decoder, *(layer.self_attn for layer in decoder.layers)])
        for number in model.config.hyper_layers:
            attention = decoder.layers[number - 1].self_attn
            patch.set(attention, "forward", _hyper_forward(attention))
        patch.set(model, "forward", _model_forward(model, context))
        patch.set(model, "count_frames", functools.partial(_count_frames, model.count_frames))
        patch_generate(model, context, patch)


def adapter() -> MPlugOwl3Adapter:
    """The adapter of this family."""
    return MPlugOwl3Adapter()


def _count_frames(unpatched: Any, *args: Any, visual_shard: FrameShard | None = None, **kwargs: Any) -> int:
    return visual_shard.total if visual_shard is not None else unpatched(*args, **kwargs)


def _hyper_forward(attention: Any) -> Any:
    unpatched = attention.forward

    @functools.wraps(unpatched)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        visual: Any = None,
        visual_norm: nn.Module | None = None,
        seqpar: SeqParCall | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Hyper attention of this rank's tokens (sharded pass) or of all tokens (replicated) over all ranks' frames."""
        if seqpar is None:
            return unpatched(
                hidden_states, position_embeddings, attention_mask, past_key_values, visual, visual_norm, **kwargs
            )
        q, k, v = self.project_text(hidden_states, position_embeddings)
        if seqpar.text is not None:
            return self.output(_sharded(self, q, k, v, visual_norm, seqpar)), None
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.output(
            _replicated(self, q, k, v, attention_mask, past_key_values, visual, visual_norm, seqpar)
        ), None

    return types.MethodType(forward, attention)


def _sharded(self: Any, q: Tensor, k: Tensor, v: Tensor, visual_norm: Any, seqpar: SeqParCall) -> Tensor:
    """(B, s, C) before the output projection; text keys go by the self-attention's schedule, visual ones by strategy."""
    hf_attention.refuse_dropout(self._dropout)
    assert seqpar.text is not None
    if not seqpar.shards_text:  # the text lives whole on every rank: its rows are shared out for this attention only
        q, k, v = (seqpar.text.shard(x, 2) for x in (q, k, v))
    text = seqpar.text_keys(k, v, self.sliding_window)
    if seqpar.frames is None:
        o = _channels(seqpar.attend(q, [text], self.scaling))
    else:

        def project(features: Tensor, frame_position: Tensor) -> tuple[Tensor, Tensor]:
            return self.project_visual(visual_norm(features), frame_position)

        visual = seqpar.visual_keys(project, [visual_norm, self.v_kv_proj], q.dtype)
        if self.fused:
            o = _channels(seqpar.attend(q, [text, visual], self.scaling))
        else:
            text_out = _channels(seqpar.attend(q, [text], self.scaling))
            visual_out = _channels(seqpar.attend(q, [visual], self.scaling))
            o = self.mix(text_out, visual_out, seqpar.frames.sees.to(q.device))
    return o if seqpar.shards_text else seqpar.text.unshard(o, 1)


def _replicated(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    visual: Any,
    visual_norm: Any,
    seqpar: SeqParCall,
) -> Tensor:
    """(B, L, C) before the output projection, the same on every rank; the frames' K and V stay where they are."""
    if visual is None:
        return self._attend_text(q, k, v, attention_mask)[0]
    visual_k, visual_v = self.visual_states(visual, visual_norm, past_key_values)
    o_visual, lse_visual = seqpar.attend_replicated(q, visual_k, visual_v, self.scaling)
    if not self.fused:
        text_out, _ = self._attend_text(q, k, v, attention_mask)
        return self.mix(text_out, _channels(o_visual), visual.sees)
    partial = Partial(q, torch.promote_types(torch.float32, q.dtype))
    math = BlockMath(seqpar.context.config.kernel, self.scaling)
    math.forward(q, k, v, causal_tiles(attention_mask, q, k), partial)
    partial.add(o_visual, lse_visual)
    return _channels(partial.value[0].to(q.dtype))


def _channels(o: Tensor) -> Tensor:
    """(B, H, s, D) -> (B, s, H * D)."""
    return o.transpose(1, 2).flatten(2)


def _model_forward(model: Any, context: SeqParContext) -> Any:
    unpatched = model.forward

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        media_offset: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_layout: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        visual_shard: FrameShard | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        inputs = Inputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            frames=pixel_values if pixel_values is not None else image_embeds,
            frames_are_features=image_embeds is not None,
            both_kinds=pixel_values is not None and image_embeds is not None,
            visual_shard=visual_shard,
            past_key_values=past_key_values,
        )
        if past_key_values is None and not use_cache:
            return _sharded_pass(self, context, inputs, media_offset, media_layout, logits_to_keep, kwargs)
        return _replicated_pass(self, context, inputs, media_offset, media_layout, logits_to_keep, kwargs)

    forward.__doc__ = (unpatched.__doc__ or "") + _VISUAL_SHARD
    return types.MethodType(can_return_tuple(forward), model)


_VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `pixel_values` or `image_embeds` hold only this
        rank's frames of `visual_shard.total`. Without `use_cache=True` or a cache no cache is returned.
"""


def _sharded_pass(
    self: Any, context: SeqParContext, inputs: Inputs, media_offset: Any, layout: Any, logits_to_keep: Any, kwargs: Any
) -> CausalLMOutputWithPast:
    """Text and frames dealt to the ranks."""
    agree_on_inputs(context.comm, inputs)
    text = text_shards(context, inputs)
    positions = inputs.positions()
    if layout is None:
        layout = self.media_layout(
            inputs.total_frames, input_ids=inputs.input_ids, media_offset=media_offset, position_ids=positions
        )
    features = local_features(self, context, inputs, self.encode_frames)
    frames = None if features is None else _visual_shards(context, inputs, layout, text, features)
    call = SeqParCall(context, text=text, frames=frames)
    if call.shards_text:
        positions = text.shard(positions, 1)
    embeds = inputs.inputs_embeds
    if embeds is None:
        ids = inputs.text
        embeds = self.get_input_embeddings()(text.shard(ids, 1) if call.shards_text else ids)
    elif call.shards_text:
        embeds = text.shard(embeds, 1)
    outputs = self.language_model.model(
        inputs_embeds=embeds,
        position_ids=positions,
        # a mapping is taken as it is: the masks of a sharded pass are the call's own
        attention_mask=dict.fromkeys(self.config.layer_types) if call.shards_text else inputs.attention_mask,
        use_cache=False,
        seqpar=call,
        **kwargs,
    )
    return _outputs(self, call, inputs, outputs, logits_to_keep, kwargs.get("num_items_in_batch"))


def _visual_shards(
    context: SeqParContext, inputs: Inputs, layout: Any, text: TextShards, features: Tensor
) -> VisualShards:
    total, tokens = inputs.total_frames, features.shape[1]
    if total == 0:  # the one frame that is encoded only to keep the ranks in step, and that nobody sees
        nobody = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
        index = torch.zeros(features.shape[0], dtype=torch.long, device=features.device)
        return VisualShards.of(
            SharedVisual(features, index, 1), FrameMask.from_intervals(nobody, nobody, tokens, 1), text
        )
    start, stop = frame_bounds(total, context.comm.size)[context.comm.rank]
    visual = SharedVisual(features, layout.frame_position[start:stop].to(features.device), total)
    first, last = layout.rows(0, inputs.length)
    return VisualShards.of(visual, FrameMask.from_intervals(first, last, tokens, total), text)


def _outputs(
    self: Any, call: SeqParCall, inputs: Inputs, outputs: Any, logits_to_keep: int | Tensor, num_items: Any
) -> CausalLMOutputWithPast:
    """Loss, and logits as `config.logits` says, of a sharded pass."""
    config, text, hidden = call.context.config, call.text, outputs.last_hidden_state
    assert text is not None
    targets, loss, logits = inputs.target_labels(), None, None
    whole = config.logits == "full" or (config.logits == "auto" and targets is None)
    if targets is not None and call.shards_text:
        logits = self.language_model.lm_head(hidden)
        loss = sharded_causal_lm_loss(logits, targets, text, num_items)
    if whole or not call.shards_text:
        # hidden states are gathered rather than logits: they are a vocabulary's width narrower
        states = text.unshard(hidden, 1) if call.shards_text else hidden
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.language_model.lm_head(states[:, rows])
        if targets is not None and loss is None:
            loss = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.config.vocab_size,
                shift_labels=targets,
                num_items_in_batch=num_items,
            )
    elif logits is None:
        logits = self.language_model.lm_head(hidden)
    states = outputs.hidden_states
    if states is not None and call.shards_text:
        states = tuple(text.unshard(state, 1) for state in states)
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states)


def _replicated_pass(
    self: Any, context: SeqParContext, inputs: Inputs, media_offset: Any, layout: Any, logits_to_keep: Any, kwargs: Any
) -> CausalLMOutputWithPast:
    """All text on every rank, frames dealt out; the first pass of a prompt, and every step of decoding."""
    cache, past, length = inputs.past_key_values, inputs.past_length, inputs.length
    if cache is None:
        cache = DynamicCache(config=self.config)
    if past == 0:
        cache.visual = None  # of an earlier text, when the cache was reset
        agree_on_inputs(context.comm, inputs)
    positions = inputs.positions()
    kept: VisualCache | None = visual_cache(cache)
    visual = None
    if inputs.total_frames and kept is not None:
        raise ShapeError(
            f"{inputs.total_frames} frames were passed with a cache that holds {kept.layout.total_frames} already; pass new "
            "frames with the whole conversation and without the cache"
        )
    if inputs.total_frames:
        offset = past if layout is None else 0
        if layout is None:
            layout = self.media_layout(
                inputs.total_frames, input_ids=inputs.input_ids, media_offset=media_offset, position_ids=positions
            )
        features = local_features(self, context, inputs, self.encode_frames)
        assert features is not None
        kept = cache.visual = VisualCache(layout, row_offset=offset, tokens_per_frame=features.shape[1])
        visual = kept.inputs(past, length, features)
        start, stop = frame_bounds(inputs.total_frames, context.comm.size)[context.comm.rank]
        visual.frame_position = layout.frame_position[start:stop]  # K and V are those of this rank's frames
    elif kept is not None:
        visual = kept.inputs(past, length)
    mask = None
    if visual is not None and kept is not None:
        mask = FrameMask.from_intervals(visual.first, visual.stop, kept.tokens_per_frame, kept.layout.total_frames)
    embeds = inputs.inputs_embeds
    outputs = self.language_model.model(
        inputs_embeds=self.get_input_embeddings()(inputs.input_ids) if embeds is None else embeds,
        position_ids=positions,
        attention_mask=inputs.attention_mask,
        past_key_values=cache,
        use_cache=True,
        visual=visual,
        seqpar=SeqParCall(context, frame_mask=mask),
        **kwargs,
    )
    rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = outputs.last_hidden_state[:, rows]
    if hidden.shape[1] == 1 and not hidden.requires_grad:
        # ranks that pick tokens from different bits would drift apart and then hang: all take rank 0's
        hidden = context.comm.broadcast(hidden, "hidden")
    logits = self.language_model.lm_head(hidden)
    targets, loss = inputs.target_labels(), None
    if targets is not None:
        loss = self.loss_function(
            logits=logits, labels=None, vocab_size=self.config.vocab_size, shift_labels=targets, **kwargs
        )
    return CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
    )
