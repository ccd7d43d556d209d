"""MOSS-VL for transformers 5: Qwen3-VL's tower and decoder layers, and layers that attend to frames.

Blocks of the tower, self-attention layers and the rotary embedding are transformers' own, of Qwen3-VL. The merger, the
separator after each frame, the cross-attention layers and the positions (`layout`) are those of MOSS-VL.

Without frames, the cross-attention layers are left out.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, V visual tokens of all frames, P
patches, C channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextAttention,
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextModel,
    Qwen3VLVisionModel,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from mllm_seqpar._compat import cache_argument, cache_name, takes_cache
from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.digests import fingerprint_of
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.models.cache import ONE_PROCESS, SequenceParallelCacheState, attach, begin_prompt, cache_state_of
from mllm_seqpar.models.causal_lm import NativeModelMixin, causal_lm_output, prompt_cache
from mllm_seqpar.models.mplug_owl3.media import brings_frames, continue_layout
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.sharding import FrameSizes

from .configuration import MossVLConfig, MossVLTextConfig, MossVLVisionConfig
from .cross_attention import MossVLCrossAttentionDecoderLayer, MossVLVisual
from .layout import MossVLLayout, count_positions, frame_grids, moss_vl_layout, real_tokens

FRAMES = ("pixel_values", "visual_embeds")
OF_FRAMES = (*FRAMES, "grid_thw", "media_nums_per_sample", "vision_chunked_length", "visual_shard")
MASK = "cross_attention_mask"


class MossVLPatchMerger(nn.Module):
    """Merge the 2 x 2 patches of a visual token, and the states of several blocks of the tower."""

    def __init__(self, config: MossVLVisionConfig) -> None:
        super().__init__()
        states = 1 + len(config.deepstack_visual_indexes)
        self.width = states * config.hidden_size * config.spatial_merge_size**2
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden_size, eps=1e-6) for _ in range(states))
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.act_fn = nn.GELU()
        self.linear_fc2 = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, last: Tensor, earlier: Sequence[Tensor] | None = None) -> Tensor:
        """(P, width) of the last block, and those of the earlier ones -> (P / 4, out_hidden_size).

        Qwen3-VL's forward calls it with the last states alone, and gets them back: `MossVLVisionModel` merges them once
        it has the others.
        """
        if earlier is None:
            return last
        states = [norm(x) for norm, x in zip(self.norms, (last, *earlier), strict=True)]
        x: Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(torch.cat(states, -1).view(-1, self.width))))
        return x


class MossVLVisionModel(Qwen3VLVisionModel):
    """Qwen3-VL's vision tower; its merger takes the states of several blocks at once."""

    config: MossVLVisionConfig

    def __init__(self, config: MossVLVisionConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        self.merger = MossVLPatchMerger(config)
        self.deepstack_merger_list = nn.ModuleList(nn.Identity() for _ in config.deepstack_visual_indexes)
        self.post_init()

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Tensor:
        """Patches (P, values) and their grids (media, 3) -> visual tokens (P / 4, out_hidden_size)."""
        last, *earlier = self.states(hidden_states, grid_thw, **kwargs)
        merged: Tensor = self.merger(last, earlier)
        return merged

    def states(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Sequence[Tensor]:
        """Return the states (P, width) of the last block, and of the other blocks that the merger takes.

        The frames of a video do not attend to each other. If the grids are on the host, the device is not read.
        """
        grid, merge, device = grid_thw.cpu(), self.spatial_merge_size, hidden_states.device
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=self.num_grid_per_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=merge,
        )
        ends = get_vision_cu_seqlens(grid)  # split on the host, except by flash attention
        made = {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grid, merge),
        }
        made = {name: copy_to_device(x, device) for name, x in made.items()}
        made["cu_seqlens"] = copy_to_device(ends, device) if is_flash_attention_requested(self.config) else ends
        out = super().forward(hidden_states, grid_thw=grid_thw, return_dict=True, **made, **kwargs)
        return out.last_hidden_state, *out.deepstack_features


class MossVLTextModel(Qwen3VLTextModel):
    """Qwen3-VL's decoder with cross-attention in `config.cross_attention_layers`."""

    config: MossVLTextConfig
    _no_split_modules = ["Qwen3VLTextDecoderLayer", "MossVLCrossAttentionDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": [Qwen3VLTextDecoderLayer, MossVLCrossAttentionDecoderLayer],
        "attentions": Qwen3VLTextAttention,
    }
    _can_compile_fullgraph = False

    def __init__(self, config: MossVLTextConfig) -> None:
        super().__init__(config)
        for number in config.cross_attention_layers or []:
            self.layers[number] = MossVLCrossAttentionDecoderLayer(config, number)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MossVLCrossAttentionDecoderLayer):
            init.zeros_(module.cross_attn_attn_gate)
            init.zeros_(module.cross_attn_mlp_gate)

    @capture_outputs
    @takes_cache
    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        visual: MossVLVisual | None = None,
        attends_to_frames: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the layers on embeddings (B, L, C) with positions (3, B, L).

        Args:
            attention_mask: of the text, (B, tokens so far), or as transformers makes it for the attention.
            visual: the frames, for the unpatched layers.
            attends_to_frames: (B, L) bool; None without frames, which leaves the cross-attention layers out.
            **kwargs: passed to the layers and their attention.
        """
        text = {"config": self.config, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        mask = create_causal_mask(**text, **cache_argument(cache), position_ids=None)
        kwargs["position_embeddings"] = self.rotary_emb(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            if not hasattr(layer, "cross_attn"):  # the class may be that of a wrapper, such as a CheckpointWrapper
                hidden_states = layer(
                    hidden_states, attention_mask=mask, use_cache=use_cache, **cache_argument(cache), **kwargs
                )
            elif attends_to_frames is not None:
                hidden_states = layer(hidden_states, attends_to_frames, visual=visual, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **cache_argument(cache))


class MossVLPreTrainedModel(NativeModelMixin, PreTrainedModel):
    config: MossVLConfig
    published_name = "MOSS-VL"
    base_model_prefix = "model"
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = [*MossVLTextModel._no_split_modules, "Qwen3VLVisionBlock"]
    _skip_keys_device_placement = [cache_name()]
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    _supports_flex_attn = _can_compile_fullgraph = False
    # The published models do not take the number of items of the loss, so a trainer averages over micro-batches.
    accepts_loss_kwargs = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MossVLModel):
            init.zeros_(module.separator_token)


class MossVLModel(MossVLPreTrainedModel):
    """Tower, separator and decoder; without the output projection.

    `separator_token` (C,) follows the visual tokens of each frame.
    """

    def __init__(self, config: MossVLConfig) -> None:
        super().__init__(config)
        self.visual = MossVLVisionModel._from_config(config.vision)
        self.language_model = MossVLTextModel._from_config(config.text)
        self.separator_token = nn.Parameter(torch.zeros(config.vision.out_hidden_size))
        self.post_init()

    def encode_frames(self, pixel_values: Tensor, grid_thw: Tensor, media_at_once: int | None = None) -> Tensor:
        """Patches (P, values) and their grids (media, 3) -> features (V, C), with the separator after each frame.

        Args:
            media_at_once: the number of media that the tower encodes at once; None: all.
        """
        merge, parts = self.config.vision.spatial_merge_size**2, []
        pixel_values = pixel_values.to(self.visual.dtype)
        for grids in grid_thw.split(media_at_once or max(1, len(grid_thw))):
            patches = grids.prod(1).tolist()
            pixels, pixel_values = pixel_values[: sum(patches)], pixel_values[sum(patches) :]
            encoded = self.visual(pixels, grids).split([count // merge for count in patches])
            for tokens, (frames, _, _) in zip(encoded, grids.tolist(), strict=True):
                separators = self.separator_token.to(tokens.dtype).expand(frames, 1, -1)
                parts.append(torch.cat([tokens.unflatten(0, (frames, -1)), separators], 1).flatten(0, 1))
        return torch.cat(parts)

    def layout(self, tokens: Tensor, grids: Tensor | None, frames: Sequence[int], **placement: Any) -> MossVLLayout:
        """Return the layout of token ids (B, L), or of embeddings (B, L, C); see `moss_vl_layout`.

        `grids` (F, 2) has height and width of each frame in patches.
        """
        if grids is None:
            grids = torch.zeros(0, 2, dtype=torch.long, device=tokens.device)
        return moss_vl_layout(
            batch=tokens.shape[0],
            length=tokens.shape[1],
            sizes=grids.to(tokens.device) // self.config.vision.spatial_merge_size,
            frames=frames,
            placeholders=tokens == self.config.image_token_id if tokens.dim() == 2 else None,
            **placement,
        )

    def _features(
        self, pixel_values: Tensor | None, visual_embeds: Tensor | None, grid_thw: Tensor | None, at_once: int | None
    ) -> Tensor | None:
        given = [x for x in (pixel_values, visual_embeds) if x is not None]
        if len(given) > 1:
            raise ShapeError("pass either pixel_values or visual_embeds, not both")
        if not given or not len(given[0]):
            return None
        if grid_thw is None:
            raise ShapeError("frames were passed without grid_thw; pass what the processor returns")
        if visual_embeds is None:
            return self.encode_frames(given[0], grid_thw, at_once)
        return visual_embeds.to(self.separator_token)

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thw: Tensor | None = None,
        media_nums_per_sample: Sequence[int] | None = None,
        cross_attention_mask: Tensor | None = None,
        vision_chunked_length: int | None = None,
        visual_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states of the text; the arguments are those of `MossVLForConditionalGeneration.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("pass either input_ids or inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        batch, length = tokens.shape[:2]
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache, use_cache = prompt_cache(self.config.text, self.language_model, cache, use_cache)
        past_length = 0 if cache is None else int(cache.get_seq_length())
        state = _cache_state(cache, past_length, batch, self.config.text.num_hidden_layers)
        given, appends = given_frames(pixel_values, visual_embeds), False
        if given is not None and len(given) and state is not None and state.frames is not None:
            known = fingerprint_of(given) in state.frame_fingerprints
            appends = brings_frames(known, input_ids, self.config.image_token_id)
            if not appends:
                given = pixel_values = visual_embeds = None  # those of the cache
        features = self._features(pixel_values, visual_embeds, grid_thw, vision_chunked_length)
        if past_length and features is None:
            assert state is not None
            positions, visual = position_ids, None
            if positions is None:
                positions = later_positions(state, attention_mask, past_length, length, batch, tokens.device)
            positions = positions.expand(3, batch, length)
            if state.frames is not None:
                visual = MossVLVisual.of_cache(state, past_length, length, batch, tokens.device)
        else:
            grids, frames = None, list[int]()
            if features is not None and grid_thw is not None:
                grids, frames = frame_grids(grid_thw, media_nums_per_sample, batch)
            layout = self.layout(
                tokens,
                grids,
                frames,
                attention_mask=attention_mask,
                cross_attention_mask=None if features is None else cross_attention_mask,
                position_ids=position_ids,
                past_length=past_length,
                begin=next_positions(state, attention_mask, past_length, batch, tokens.device),
            )
            positions, visual = layout.positions, None
            if features is not None and len(features) != (expected := int(layout.tokens.sum())):
                raise ShapeError(
                    f"{len(features)} visual tokens were passed, and grid_thw means {expected}, with the separator of "
                    "each frame"
                )
            if appends and features is not None:
                check_appended(layout, input_ids, self.config.image_token_id)
            if state is not None:
                visual = _store(state, layout, attention_mask, length, features, given)
            elif features is not None:
                visual = MossVLVisual.of(layout, layout.rows(past_length, length), features)
        return self.language_model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=attention_mask,
            **cache_argument(cache if use_cache or past_length else None),
            use_cache=use_cache,
            visual=visual,
            attends_to_frames=None if visual is None else visual.has_frames,
            **kwargs,
        )


def check_appended(layout: MossVLLayout, input_ids: Tensor | None, image_token_id: int) -> None:
    """Raise ShapeError unless the frames that follow those of a cache, if they are not hidden, are in the new text."""
    if input_ids is None:
        return
    placed, (start, stop) = (input_ids == image_token_id).sum(1), layout.sample_range.to(input_ids.device).unbind(1)
    if bool((stop - start > placed).any()):
        raise ShapeError(
            f"frames {(stop - start).tolist()} were passed with a cache that holds others already, and the text after "
            f"that of the cache has {placed.tolist()} placeholders <|image_pad|>; pass only the frames of these, or "
            "pass all frames with the whole conversation and without the cache"
        )


def next_positions(
    state: SequenceParallelCacheState | None, attention_mask: Any, past_length: int, batch: int, device: torch.device
) -> Tensor:
    """Return (B, 1), the position of the first token of a pass that is not padding.

    The layout of a cache may end before the cache does: the later tokens, which brought no frames, are counted.
    """
    end, begin = 0, torch.zeros(1, dtype=torch.long, device=device)
    if state is not None and state.frame_facts is not None:
        layout: MossVLLayout = state.frame_facts
        rows = state.rows_of(batch).to(layout.first.device)
        end, begin = layout.end, copy_to_device(layout.following()[rows], device)
    return begin + real_tokens(attention_mask, batch, end, past_length, device).sum(1, keepdim=True)


def later_positions(
    state: SequenceParallelCacheState | None,
    attention_mask: Any,
    past_length: int,
    length: int,
    batch: int,
    device: torch.device,
) -> Tensor:
    """Return the positions (B, L) of tokens without frames that continue a cache."""
    begin = next_positions(state, attention_mask, past_length, batch, device)
    return count_positions(begin, real_tokens(attention_mask, batch, past_length, past_length + length, device))


def after_text(
    layout: MossVLLayout, state: SequenceParallelCacheState | None, attention_mask: Any, batch: int
) -> MossVLLayout:
    """Return the layout of a pass; of the text before it too, if no frames came with that.

    If frames did, their layout stays among those of their own passes.
    """
    if state is None or state.frame_facts is None or state.frames is not None or not layout.past_length:
        return layout
    device = layout.first.device
    earlier: MossVLLayout = state.frame_facts.to(device)
    between = real_tokens(attention_mask, batch, earlier.end, layout.past_length, device)
    return earlier.followed_by(layout, state.rows_of(batch).to(device), between)


def _cache_state(cache: Any, past_length: int, batch: int, layers: int) -> SequenceParallelCacheState | None:
    """Return what is stored with the cache of this pass."""
    if cache is None:
        return None
    if not past_length:
        return begin_prompt(cache, batch, ONE_PROCESS, layers)
    state = cache_state_of(cache)
    if state is None:
        state = SequenceParallelCacheState(batch)
        attach(cache, state, layers)
    continue_layout(state, past_length, inclusive=True)
    return state


def _store(
    state: SequenceParallelCacheState,
    layout: MossVLLayout,
    attention_mask: Any,
    length: int,
    features: Tensor | None,
    given: Tensor | None,
) -> MossVLVisual | None:
    """Store the layout of a pass with its cache, and the frames, whose K and V the layers add; return the frames."""
    batch, past_length = layout.first.shape[0], layout.past_length
    whole = after_text(layout, state, attention_mask, batch)
    if features is None or given is None:
        state.frame_facts = whole
        return None
    features, sizes = features.unsqueeze(1), FrameSizes(layout.total_frames, layout.tokens)
    kept = VisualKVCache(layout.total_frames, sizes, 1, earlier=state.frames)
    state.store_frames(kept, batch, {fingerprint_of(x) for x in (features, given)}, past_length)
    state.frame_facts = whole
    return MossVLVisual.of_cache(state, past_length, length, batch, features.device, features)


class MossVLForConditionalGeneration(MossVLPreTrainedModel, GenerationMixin):
    """A language model conditioned on text, images and videos."""

    _keys_to_ignore_on_load_missing: list[str] = []

    def __init__(self, config: MossVLConfig) -> None:
        super().__init__(config)
        self.model = MossVLModel(config)
        self.lm_head = nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thw: Tensor | None = None,
        media_nums_per_sample: Sequence[int] | None = None,
        cross_attention_mask: Tensor | None = None,
        vision_chunked_length: int | None = None,
        visual_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the text, and the loss if labels are given.

        Args:
            input_ids: (B, L); one `<|image_pad|>` for each frame.
            attention_mask: (B, tokens so far) text mask, 0 at padding on either side.
            position_ids: (3, B, L) or (B, L), the rotary positions of the text; None: `moss_vl_layout` counts them.
            cache: cache of earlier tokens. It also has the K and V of frames, so later calls pass no frames.
            inputs_embeds: (B, L, C) instead of `input_ids`; with frames it requires `cross_attention_mask`.
            labels: (B, L), not shifted; the loss ignores -100.
            pixel_values: (P, values), the patches of all media of all samples, one after another.
            grid_thw: (media, 3), the frames, height and width of each image or video in patches.
            media_nums_per_sample: the number of images and videos of each sample; optional for one sample.
            cross_attention_mask: (B, 1, L, frames of a sample) bool, True where a frame is hidden, or (B, L) integers,
                the number of frames that each row attends to, from the first one on. Without it, every row attends to
                all frames of its sample, as in the published model; the processor returns one.
            vision_chunked_length: the number of media that the tower encodes at once; None: all.
            visual_embeds: (V, C), the result of `MossVLModel.encode_frames`, instead of `pixel_values`.
            logits_to_keep: number of last positions, or the positions, to compute logits for; 0 for all.
            **kwargs: passed to the language model, its attention, and the loss. `shift_labels` (B, L) are labels that
                are already shifted, instead of `labels`.

        Raises:
            ShapeError, MaskError: frames, placeholders and text do not fit each other.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_argument(cache),
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            grid_thw=grid_thw,
            media_nums_per_sample=media_nums_per_sample,
            cross_attention_mask=cross_attention_mask,
            vision_chunked_length=vision_chunked_length,
            visual_embeds=visual_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return causal_lm_output(self, outputs, labels, shift_labels, logits_to_keep, **kwargs)

    @takes_cache
    def generate(self, *args: Any, cache: Cache | None = None, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs, **({} if cache is None else cache_argument(cache)))

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Return None: the forward counts positions, those of later tokens from what the cache has."""

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat each sample for its beams, which share the sample's frames in the flat list."""
        frames = {name: model_kwargs.pop(name) for name in OF_FRAMES if name in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )
        if frames.get("grid_thw") is not None and frames.get("media_nums_per_sample") is None:
            frames["media_nums_per_sample"] = [frames["grid_thw"].shape[0]]
        return input_ids, model_kwargs | frames

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs like transformers; frames are passed only until their K and V are in the cache."""
        kwargs |= {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **cache_argument(cache), **kwargs)
        state, given = cache_state_of(cache), given_frames(kwargs.get("pixel_values"), kwargs.get("visual_embeds"))
        brings = True
        if cache is not None and cache.get_seq_length() and state is not None and state.frames is not None:
            ids, image = inputs.get("input_ids"), self.config.image_token_id
            if brings := bool(is_first_iteration) and given is not None:
                brings = brings_frames(fingerprint_of(given) in state.frame_fingerprints, ids, image)
        if not brings:
            return {name: value for name, value in inputs.items() if name not in (*OF_FRAMES, MASK)}
        # transformers leaves frames out of all passes of an assistant model, also of the first.
        return inputs | {name: kwargs[name] for name in (*OF_FRAMES, MASK) if kwargs.get(name) is not None}


def given_frames(pixel_values: Tensor | None, visual_embeds: Tensor | None) -> Tensor | None:
    """Return the patches, or the features in the form (V, 1, C); None if there are none."""
    return pixel_values if visual_embeds is None else visual_embeds.reshape(-1, 1, visual_embeds.shape[-1])
