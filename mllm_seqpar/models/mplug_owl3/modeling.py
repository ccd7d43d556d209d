"""mPLUG-Owl3 for transformers 5: Qwen2 with hyper attention in a few layers, SigLIP, and a projector between.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, T tokens a frame.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.models.cache_rows import attach, detach
from mllm_seqpar.runtime.text_shards import rows_kept
from mllm_seqpar.runtime.visual_features import fingerprint_of

from .backbones import HyperQwen2ForCausalLM, MPlugOwl3VisionModel
from .configuration import AUTO, GATES, MPlugOwl3Config
from .generation import MPlugOwl3GenerationMixin
from .media import MediaLayout, MediaOffset, media_layout
from .pretrained import MPlugOwl3PreTrainedModel
from .visual_inputs import VisualCache, VisualInputs, visual_cache


class MPlugOwl3ForConditionalGeneration(MPlugOwl3PreTrainedModel, MPlugOwl3GenerationMixin):
    """Text that continues text and frames.

    Attributes:
        language_model: `HyperQwen2ForCausalLM`.
        vision_model: SigLIP's vision tower.
        vision2text_model: the tower's width to the text's: a linear layer, or two with an exact GELU between.
    """

    def __init__(self, config: MPlugOwl3Config) -> None:
        if config.gate == AUTO:
            raise ConfigError(
                f"config.gate is {AUTO!r}, which from_pretrained resolves from the weights; for a new model set it to "
                f"one of {GATES}"
            )
        if config.projector_layers is None:
            config.projector_layers = 2 if config.gate is None else 1
        super().__init__(config)
        self.language_model = HyperQwen2ForCausalLM(config)
        self.vision_model = MPlugOwl3VisionModel(config.vision_config)
        self.vision2text_model = _projector(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary's projection."""
        return self.language_model.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the vocabulary's projection."""
        self.language_model.lm_head = new_embeddings  # type: ignore[assignment]

    def get_decoder(self) -> nn.Module:
        """The language model without the vocabulary's projection."""
        return self.language_model.model

    def encode_frames(self, pixel_values: Tensor) -> Tensor:
        """(F, T, hidden) of frames (F, 3, H, W): the tower, then `vision2text_model`; what `image_embeds` takes."""
        size = self.config.vision_batch_size or pixel_values.shape[0]
        features = [self.vision_model.penultimate(chunk) for chunk in pixel_values.split(size)]
        return self.vision2text_model(features[0] if len(features) == 1 else torch.cat(features))

    def media_layout(
        self,
        total_frames: int,
        *,
        input_ids: Tensor | None = None,
        media_offset: MediaOffset | None = None,
        position_ids: Tensor | None = None,
    ) -> MediaLayout:
        """`media.media_layout` with this model's gate and placeholder."""
        return media_layout(
            self.config.gate,
            total_frames=total_frames,
            input_ids=input_ids,
            image_token_id=self.config.image_token_id,
            media_offset=media_offset,
            position_ids=position_ids,
        )

    def _frame_features(self, pixel_values: Tensor | None, image_embeds: Tensor | None) -> Tensor | None:
        """(F, T, hidden) of what was passed, or None without frames."""
        if pixel_values is not None and image_embeds is not None:
            raise ShapeError("pass either pixel_values or image_embeds, not both")
        if pixel_values is not None and pixel_values.shape[0]:
            return self.encode_frames(pixel_values)
        if image_embeds is None or not image_embeds.shape[0]:
            return None
        if image_embeds.dim() != 3 or image_embeds.shape[2] != self.config.hidden_size:
            raise ShapeError(
                f"image_embeds has shape {tuple(image_embeds.shape)}; expected (frames, tokens, "
                f"{self.config.hidden_size}), the frames of all samples one after another"
            )
        weight = cast(Tensor, self.get_input_embeddings().weight)
        dtype = image_embeds.dtype if torch.is_autocast_enabled(weight.device.type) else weight.dtype
        return image_embeds.to(device=weight.device, dtype=dtype)

    def _cache_for(self, past_key_values: Cache | None, use_cache: bool | None) -> tuple[Cache | None, bool]:
        """The cache of this call, made when it is missing, so that the visual K and V have a place beside it."""
        if use_cache is None:
            use_cache = self.config.use_cache
        if self.training and self.language_model.model.gradient_checkpointing:
            use_cache = False  # the layers would drop it, each with a warning
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        return past_key_values, use_cache

    def _remember_frames(self, cache: Cache | None, *frames: Tensor | None) -> None:
        """Completes what is kept with the cache: the generation's rule for placeholders, and which frames these are."""
        cached = visual_cache(cache)
        if cached is not None:
            cached.inclusive = self.config.gate is None
            cached.seen = {fingerprint_of(x) for x in frames if x is not None}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        media_offset: MediaOffset | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_layout: MediaLayout | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the text, and the loss when there are labels.

        Args:
            input_ids: (B, L).
            pixel_values: (F, 3, H, W), the frames of all samples, one sample after another.
            media_offset: which tokens see which frames, in either published form (`media.MediaOffset`). When None, the
                placeholders are the tokens that equal `config.image_token_id`.
            attention_mask: (B, L) text mask, 0 at padding, on either side.
            position_ids: (B, L); continues the cache, from 0, when None.
            past_key_values: cache of earlier tokens. The frames' K and V are kept with it, and later calls pass none.
            inputs_embeds: (B, L, hidden) in place of `input_ids`; then `media_offset` is needed with frames.
            labels: (B, L), not shifted; -100 is left out of the loss.
            shift_labels: (B, L), shifted already, in place of `labels`.
            image_embeds: (F, T, hidden) in place of `pixel_values`; what `encode_frames` returns.
            media_layout: which rows see which frames, counted from the cache's first token; in place of `media_offset`.
            use_cache: whether to return a cache; `config.use_cache` when None.
            logits_to_keep: the number of last positions to compute logits of, or which ones (`text.rows_kept`); 0: all.
            **kwargs: to the language model, its layers and its attention function, and the loss (`num_items_in_batch`).

        Raises:
            ShapeError: frames, placeholders and text that do not fit each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        past_key_values, use_cache = self._cache_for(past_key_values, use_cache)
        past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if position_ids is None:
            end = past_length + inputs_embeds.shape[1]
            position_ids = torch.arange(past_length, end, device=inputs_embeds.device)[None]
        embeds = self._frame_features(pixel_values, image_embeds)
        visual = _cached_visual(past_key_values, past_length, inputs_embeds, embeds)
        if visual is None and (embeds is not None or past_length == 0):
            row_offset = past_length if media_layout is None else 0
            if media_layout is None:
                total = 0 if embeds is None else embeds.shape[0]
                media_layout = self.media_layout(
                    total, input_ids=input_ids, media_offset=media_offset, position_ids=position_ids
                )
            layers = self.config.num_hidden_layers
            visual = _new_visual(media_layout, row_offset, embeds, past_key_values, past_length, inputs_embeds, layers)
            self._remember_frames(past_key_values, pixel_values, image_embeds)
        outputs = self.language_model.model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            visual=visual,
            **kwargs,
        )
        logits = self.language_model.lm_head(rows_kept(outputs.last_hidden_state, logits_to_keep))
        if shift_labels is not None:
            shift_labels = shift_labels.contiguous()  # transformers' loss takes a view of it
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, shift_labels=shift_labels, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _projector(config: MPlugOwl3Config) -> nn.Module:
    first = nn.Linear(config.vision.hidden_size, config.hidden_size)
    if config.projector_layers == 1:
        return first
    return nn.Sequential(first, nn.GELU(), nn.Linear(config.hidden_size, config.hidden_size))


def _cached_visual(cache: Any, past_length: int, inputs_embeds: Tensor, embeds: Tensor | None) -> VisualInputs | None:
    """What tokens that continue a cache see of the frames whose K and V are in it."""
    cached = visual_cache(cache)
    if cached is not None and past_length <= cached.row_offset:
        detach(cache, VisualCache)  # a cache that was reset, or cropped to before those frames' text
        cached = None
    if cached is None:
        return None
    if embeds is not None:
        raise ShapeError(
            f"{embeds.shape[0]} frames were passed with a cache that holds {cached.layout.total_frames} already; "
            "pass new frames with the whole conversation and without the cache"
        )
    return cached.inputs(past_length, inputs_embeds.shape[1], inputs_embeds.shape[0])


def _new_visual(
    layout: MediaLayout,
    row_offset: int,
    embeds: Tensor | None,
    cache: Any,
    past_length: int,
    inputs_embeds: Tensor,
    own_layers: int,
) -> VisualInputs | None:
    """What the tokens of this call see of the frames passed with it; with a cache, the place for their K and V."""
    total = 0 if embeds is None else embeds.shape[0]
    batch, length, _ = inputs_embeds.shape
    if layout.total_frames != total or layout.first.shape[0] != batch:
        raise ShapeError(
            f"media_layout is for {layout.first.shape[0]} samples and {layout.total_frames} frames; the call has "
            f"{batch} samples and {total} frames"
        )
    if embeds is None:
        return None
    visual = VisualCache(layout, row_offset=row_offset, tokens_per_frame=embeds.shape[1], inclusive=False)
    if cache is not None:
        attach(cache, visual, own_layers)
    return visual.inputs(past_length, length, batch, embeds)
