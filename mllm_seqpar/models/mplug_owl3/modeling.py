"""mPLUG-Owl3 for transformers 5: Qwen2 with hyper attention in a few layers, SigLIP, and a projector between them.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, T tokens per frame.
"""

import copy
import os
from dataclasses import fields, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.utils import can_return_tuple

from mllm_seqpar._compat import cache_argument, cache_name, drops_cache, takes_cache
from mllm_seqpar.digests import fingerprint_of
from mllm_seqpar.errors import ConfigError, ShapeError, require_shape
from mllm_seqpar.models.adapters import refuse_arguments_of_samples
from mllm_seqpar.models.cache import SequenceParallelCacheState, attach, cache_state_of
from mllm_seqpar.models.causal_lm import NativeModelMixin, causal_lm_output, prompt_cache
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.sharding import FrameSizes

from .configuration import AUTO, GATES, MPlugOwl3Config
from .generation import MPlugOwl3GenerationMixin
from .hyper_attention import HyperAttention, HyperDecoderLayer, VisualInputs
from .media import MediaLayout, MediaOffset, brings_frames, check_layout, continue_layout, media_layout

_CONFIG_OVERRIDES = {field.name for field in fields(MPlugOwl3Config)} - {"dtype"} | {"output_attentions"}


class MPlugOwl3VisionModel(SiglipVisionModel):
    """SigLIP's vision tower; a separate class, so that transformers' renaming rules for SigLIP do not apply to it."""

    def penultimate(self, pixel_values: Tensor) -> Tensor:
        """Frames (F, 3, H, W) -> `hidden_states[-2]` (F, T, width), without computing the last layer."""
        config = self.config
        grid = config.image_size // config.patch_size
        if pixel_values.dim() != 4 or any([side // config.patch_size != grid for side in pixel_values.shape[2:]]):
            raise ShapeError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; expected "
                f"(frames, {config.num_channels}, {config.image_size}, {config.image_size})"
            )
        hidden_states = self.embeddings(pixel_values)
        for layer in self.encoder.layers[:-1]:
            hidden_states = layer(hidden_states, None)
        return hidden_states


class HyperQwen2Model(Qwen2Model):
    """Qwen2 with hyper attention in `config.hyper_layers`; the keyword argument `visual` is passed to every layer."""

    config: MPlugOwl3Config
    _no_split_modules = ["Qwen2DecoderLayer", "HyperDecoderLayer"]
    # Flash and flex attention cannot express the frame masks and the joint softmax.
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: MPlugOwl3Config) -> None:
        super().__init__(config)
        for number in config.hyper_layers or []:
            self.layers[number - 1] = HyperDecoderLayer(config, number - 1)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HyperAttention) and module.gate is not None:
            init.zeros_(module.gate)


class HyperQwen2ForCausalLM(Qwen2ForCausalLM):
    """The language model: `HyperQwen2Model` and the output projection."""

    config: MPlugOwl3Config
    _no_split_modules = HyperQwen2Model._no_split_modules
    _supports_flash_attn = _supports_flex_attn = _can_compile_fullgraph = False

    def __init__(self, config: MPlugOwl3Config) -> None:
        super(Qwen2ForCausalLM, self).__init__(config)  # Qwen2ForCausalLM.__init__ would build a second Qwen2Model.
        self.model = HyperQwen2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MPlugOwl3PreTrainedModel(NativeModelMixin, PreTrainedModel):
    config: MPlugOwl3Config
    base_model_prefix = ""
    input_modalities = ("image", "video", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen2DecoderLayer", "HyperDecoderLayer", "SiglipEncoderLayer", "SiglipVisionEmbeddings"]
    # The features are taken before this norm, so a checkpoint may lack it. The same holds for the head
    # (`complete_config`).
    _keys_to_ignore_on_load_missing = [r"^vision_model\.post_layernorm\."]
    _skip_keys_device_placement = [cache_name()]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *,
        config: MPlugOwl3Config | str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load the model like `PreTrainedModel.from_pretrained`; gate and projector follow from the tensor names.

        Raises:
            DataError: there are no safetensors, or weights are missing, unexpected or of another shape.
            ConfigError: config and weights disagree, or an option is not supported.
        """
        from mllm_seqpar.models.hub import hub_options
        from mllm_seqpar.models.loading import refuse_ignored_sizes  # a new model needs neither of these

        from .checkpoint import checkpoint_keys, complete_config

        if kwargs.get("use_safetensors") is False:
            raise ConfigError("use_safetensors is False; only safetensors are loaded: leave it out")
        refuse_ignored_sizes(kwargs)  # before the names of the weights are read, which may download them
        hub = hub_options(kwargs)
        if isinstance(config, MPlugOwl3Config):
            complete = copy.deepcopy(config)
        else:
            complete = MPlugOwl3Config.from_pretrained(config or pretrained_model_name_or_path, **hub)
        for name in _CONFIG_OVERRIDES & set(kwargs):
            setattr(complete, name, kwargs.pop(name))
        complete.check()
        if kwargs.get("state_dict") is not None:
            keys = set(kwargs["state_dict"])
        elif pretrained_model_name_or_path is not None:
            keys = checkpoint_keys(pretrained_model_name_or_path, kwargs.get("variant"), **hub)
        else:
            raise ConfigError("pass a directory or hub name, or a state_dict together with config")
        complete_config(complete, keys)
        name = f"mPLUG-Owl3 with gate={complete.gate!r} and projector_layers={complete.projector_layers}"
        options = kwargs | {"config": complete, "use_safetensors": True}
        return super().from_pretrained(pretrained_model_name_or_path, expected=name, **options)


class MPlugOwl3ForConditionalGeneration(MPlugOwl3PreTrainedModel, MPlugOwl3GenerationMixin):
    """A language model conditioned on text and frames.

    `vision2text_model` is the projector to the text's width: a linear layer, or two with an exact GELU between.
    """

    def __init__(self, config: MPlugOwl3Config) -> None:
        if config.gate == AUTO:
            raise ConfigError(
                f"config.gate is {AUTO!r}, which from_pretrained replaces by the gate of the weights; for a new model "
                f"set it to one of {GATES}"
            )
        if config.projector_layers is None:
            config.projector_layers = 2 if config.gate is None else 1
        super().__init__(config)
        self.language_model = HyperQwen2ForCausalLM(config)
        self.vision_model = MPlugOwl3VisionModel(config.vision_config)
        first, width = nn.Linear(config.vision.hidden_size, config.hidden_size), config.hidden_size
        more = [] if config.projector_layers == 1 else [nn.GELU(), nn.Linear(width, width)]
        self.vision2text_model: nn.Module = nn.Sequential(first, *more) if more else first
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language_model.lm_head = new_embeddings  # type: ignore[assignment]

    def get_decoder(self) -> nn.Module:
        return self.language_model.model

    @property
    def base_model(self) -> Any:
        """Return the model without its head, which gives `last_hidden_state`; TRL computes the loss from that."""
        return _Headless(self)

    def encode_frames(self, pixel_values: Tensor) -> Tensor:
        """Frames (F, 3, H, W) -> visual features (F, T, hidden), which can be passed as `image_embeds`."""
        size = self.config.vision_batch_size or pixel_values.shape[0]
        features = [self.vision_model.penultimate(chunk) for chunk in pixel_values.split(size)]
        return self.vision2text_model(features[0] if len(features) == 1 else torch.cat(features))

    def media_layout(self, total_frames: int, **placement: Any) -> MediaLayout:
        """Return `media.media_layout` with this model's gate and placeholder token."""
        token = self.config.image_token_id
        return media_layout(self.config.gate, total_frames=total_frames, image_token_id=token, **placement)

    @property
    def frame_modules(self) -> list[nn.Module | None]:
        """The modules that compute with frames: the tower, the projector, and the projections to visual K and V."""
        projections = [part for name, part in self.language_model.named_modules() if name.endswith("v_kv_proj")]
        return [self.vision_model, self.vision2text_model, *projections]

    def _frame_features(self, pixel_values: Tensor | None, image_embeds: Tensor | None) -> Tensor | None:
        if pixel_values is not None and image_embeds is not None:
            raise ShapeError("pass either pixel_values or image_embeds, not both")
        if pixel_values is not None and pixel_values.shape[0]:
            return self.encode_frames(pixel_values)
        if image_embeds is None or not image_embeds.shape[0]:
            return None
        require_shape("image_embeds", image_embeds.shape, frames=None, tokens=None, width=self.config.hidden_size)
        weight = cast(Tensor, self.get_input_embeddings().weight)
        dtype = image_embeds.dtype if torch.is_autocast_enabled(weight.device.type) else weight.dtype
        return image_embeds.to(device=weight.device, dtype=dtype)

    def _store_frames(
        self, cache: Cache, layout: MediaLayout, tokens_per_frame: int, frames: Tensor, past_length: int
    ) -> SequenceParallelCacheState:
        """Store the frames of a call with its cache, to which the hyper layers add their K and V."""
        state, total, batch = cache_state_of(cache), layout.total_frames, layout.first.shape[0]
        if state is None:
            state = SequenceParallelCacheState(batch)
            attach(cache, state, self.config.num_hidden_layers)
        visual = VisualKVCache(total, FrameSizes(total), tokens_per_frame, earlier=state.frames)
        state.store_frames(visual, batch, {fingerprint_of(frames)}, past_length)
        state.frame_facts = layout
        return state

    @takes_cache
    def _hidden_states(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        media_offset: MediaOffset | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_layout: MediaLayout | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output of the language model before its head; the arguments are those of `forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        cache, use_cache = prompt_cache(self.config, self.language_model.model, cache, use_cache)
        past_length = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            end = past_length + inputs_embeds.shape[1]
            position_ids = torch.arange(past_length, end, device=inputs_embeds.device)[None]
        if pixel_values is not None or image_embeds is not None:
            refuse_arguments_of_samples(self, self.frame_modules)
        (batch, length, _), device = inputs_embeds.shape, inputs_embeds.device
        state, frames = cache_state_of(cache), pixel_values if image_embeds is None else image_embeds
        if state is not None:
            continue_layout(state, past_length, inclusive=self.config.gate is None)
            state = state if state.frames is not None else None
        if state is not None and frames is not None:
            known = fingerprint_of(frames) in state.frame_fingerprints
            placed = media_layout is not None and media_layout.past_length == past_length
            if not placed and not brings_frames(known, input_ids, self.config.image_token_id):
                frames = pixel_values = image_embeds = None  # those of the cache
        embeds, visual = self._frame_features(pixel_values, image_embeds), None
        if state is not None and embeds is None:
            visual = VisualInputs.of_cache(state, past_length, length, batch, device)
        elif embeds is not None or past_length == 0:
            total = 0 if embeds is None else embeds.shape[0]
            layout = media_layout
            if layout is None:
                placement = {"input_ids": input_ids, "media_offset": media_offset, "position_ids": position_ids}
                layout = replace(self.media_layout(total, **placement), past_length=past_length)
            check_layout(layout, batch, total)
            if embeds is not None and frames is not None:
                layout = layout.to(embeds.device)
                if cache is None or drops_cache(self.language_model.model):
                    visual = VisualInputs(layout, layout.rows(past_length, length), embeds.shape[1], embeds)
                else:
                    state = self._store_frames(cache, layout, embeds.shape[1], frames, past_length)
                    visual = VisualInputs.of_cache(state, past_length, length, batch, embeds.device, embeds)
        text = {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask, "position_ids": position_ids}
        return self.language_model.model(**text, **cache_argument(cache), use_cache=use_cache, visual=visual, **kwargs)

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        media_offset: MediaOffset | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        image_embeds: Tensor | None = None,
        media_layout: MediaLayout | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the text, and the loss if labels are given.

        Args:
            input_ids: (B, L).
            pixel_values: (F, 3, H, W), the frames of all samples, one sample after another.
            media_offset: which tokens attend to which frames, in either published form (`media.MediaOffset`). If None,
                the placeholders are the tokens that equal `config.image_token_id`.
            attention_mask: (B, L) text mask, 0 at padding on either side.
            position_ids: (B, L); if None, consecutive positions that continue the cache.
            cache: cache of earlier tokens. It also keeps the visual K and V, so later calls pass no frames.
            inputs_embeds: (B, L, hidden) instead of `input_ids`; with frames it requires `media_offset`.
            labels: (B, L), not shifted; the loss ignores -100.
            image_embeds: (F, T, hidden), the result of `encode_frames`, instead of `pixel_values`.
            media_layout: the visibility from the cache's first token on, instead of `media_offset`.
            logits_to_keep: number of last positions, or the positions, to compute logits for; 0 for all.
            **kwargs: passed to the language model, its layers, its attention function, and the loss
                (`num_items_in_batch`). `shift_labels` (B, L) are labels that are already shifted, instead of `labels`;
                as a named argument, `Trainer` would evaluate batches only if they have both.

        Raises:
            ShapeError: frames, placeholders and text do not fit each other.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self._hidden_states(
            input_ids=input_ids,
            pixel_values=pixel_values,
            media_offset=media_offset,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            image_embeds=image_embeds,
            media_layout=media_layout,
            use_cache=use_cache,
            **kwargs,
        )
        return causal_lm_output(self, outputs, labels, shift_labels, logits_to_keep, **kwargs)


class _Headless:
    """A model without its head, as `base_model`; it is called like the model, but is not a module."""

    def __init__(self, model: MPlugOwl3ForConditionalGeneration) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model._hidden_states(*args, **kwargs)

    @property
    def _tp_plan(self) -> Any:
        return self._model._tp_plan

    @property
    def _pp_plan(self) -> Any:
        return self._model._pp_plan
