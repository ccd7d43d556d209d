"""Llama 3.2 Vision (transformers `MllamaForConditionalGeneration`): its sites, visibility, sharded forward and chats.

Images come in two forms. Pixels are sharded by whole images, because the vision tower attends across the tiles of an
image. The output of the tower and the projector is sharded by tiles, or by images if a rank passes its own. Masks are
made of tiles. `generate` passes images once, without a batch dimension, and beams share them.

A row without a visible tile attends to all tiles of its sample, and only its MLP part is skipped: transformers sets the
additive mask of such a row to zeros. It is decided for the whole row, before tiles are sharded.

The decoder skips its cross-attention layers without visual states, so a pass that has visual keys passes it the
`ForwardState` in their place. K and V of tiles never enter transformers' cache: each rank stores those of its tiles.

Without a mask every row attends to every tile of its sample, as in transformers' eager attention. Its sdpa attention
treats such a call as causal attention over text, and row i attends to the first i + 1 patches only. That mistake is not
reproduced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mllm_seqpar.adapting import (
    IMAGE_DIMS,
    MULTIMODAL_OUTPUT,
    AdapterError,
    ConfigError,
    Family,
    ForwardInputs,
    ForwardState,
    FrameMask,
    FrameShard,
    KVProjection,
    MaskError,
    SeqParContext,
    SequenceParallelCacheState,
    ShapeError,
    as_compared_tensors,
    cache_state_of,
    copy_to_device,
    decoder_arguments,
    get_logger,
    mark_visual_layers,
    merge_heads,
    refuse_dropout,
    require_shape,
    split_heads,
)

_log = get_logger(__name__)
_ASPECT_RATIOS = ("aspect_ratio_ids", "aspect_ratio_mask")
_MASK = "cross_attention_mask"


def _cross_attention(
    self: Any, hidden_states: Tensor, *args: Any, seqpar: ForwardState, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from this rank's rows (B, s, C) to the tiles of all ranks; return (B, s, C) and no weights."""
    refuse_dropout(self.dropout if self.training else 0.0)
    q = self.q_norm(split_heads(self.q_proj(hidden_states), self.head_dim))
    project = KVProjection((self.k_proj, self.v_proj), self.head_dim, key_norm=self.k_norm)
    o = seqpar.attend(q, [seqpar.frame_keys(q, self.layer_idx, project)], self.scaling)
    return self.o_proj(merge_heads(o)), None


def check_cross_layers(layers: Iterable[nn.Module], numbers: Iterable[int]) -> None:
    """Raise AdapterError unless these layers of a decoder, and no others, attend to frames."""
    for index, layer in enumerate(layers):
        if hasattr(layer, "cross_attn") is not (index in numbers):
            layer_name = f"layer {index} is {type(layer).__name__}"
            raise AdapterError(f"{layer_name}, but cross_attention_layers is {sorted(numbers)}")


def cross_attentions(decoder: Any) -> list[Any]:
    """Return the attention to frames of each layer that has one."""
    return [layer.cross_attn for layer in decoder.layers if hasattr(layer, "cross_attn")]


@dataclass(frozen=True, kw_only=True)
class MllamaInputs(ForwardInputs):
    """The inputs of one pass, with the mask and sizes of the images: tiles, patches of a tile, width of a patch.

    Attributes:
        cross_attention_mask: (B, L or all tokens so far, images, tiles) bool, True where a row attends to a tile; None:
            rows attend to all tiles of their sample.
        samples: number of samples that the images of this pass belong to; `B / samples` rows of the batch are beams of
            one sample.
    """

    cross_attention_mask: Tensor | None
    samples: int
    tiles: int
    patches: int
    width: int

    @property
    def units_per_frame(self) -> int:
        """Tiles of a frame, which one rank holds as a whole."""
        by_images = not self.frames_are_features or (self.frames is not None and self.frames.dim() == 4)
        return self.tiles if by_images else 1

    @property
    def samples_of_images(self) -> int:
        """`samples` of the images that this pass attends to, which may be those of its cache."""
        state = self.cache_state
        return self.samples if state is None or state.samples is None else state.samples

    def visible_tiles(self, per_sample: int) -> Tensor | None:
        """Return (B, L, per_sample) bool on the CPU, the mask of the rows of this pass; None without a mask."""
        return None if self.cross_attention_mask is None else self._rows_of_mask(self.on_host(_MASK), per_sample)

    @property
    def cached_tiles(self) -> int:
        """The number of tiles of each sample in the cache."""
        state = self.cache_state
        frames = None if state is None else state.frames
        return 0 if state is None or frames is None else frames.units // (state.samples or 1)

    def _rows_of_mask(self, given: Any, per_sample: int) -> Tensor:
        mask = given
        if mask.dim() == 4 and mask.shape[1] != self.length:  # of all tokens so far; this pass has its last rows
            mask = mask[:, self.past_length : self.past_length + self.length]
        fits = mask.dim() == 4 and mask.shape[0] in (1, self.batch) and mask.shape[1] in (1, self.length)
        if not fits or mask.shape[2] * mask.shape[3] != per_sample:
            raise MaskError(
                f"cross_attention_mask has shape {tuple(given.shape)}; expected (batch, tokens, images, tiles): "
                f"{self.batch} samples, {self.length} tokens after the {self.past_length} cached ones, {per_sample} "
                "tiles in all images of a sample, those of its cache included"
            )
        return mask.flatten(2).expand(self.batch, self.length, -1)

    def check(self) -> None:
        """Raise ShapeError or MaskError if the images do not fit together, or do not fit the text."""
        if self.frames is None:
            return
        shape = self.frames.shape
        if self.frames_are_features:
            by_tiles = {"tiles of all images": None} if len(shape) == 3 else {"images": None, "tiles": self.tiles}
            # Without a mask, which has a column for each tile, a caller may pass fewer patches.
            patches = None if self.cross_attention_mask is None else self.patches
            require_shape("cross_attention_states", shape, **by_tiles, patches=patches, width=self.width)
        else:
            note, images = ", the images of all samples one after another", shape[0]
            require_shape("pixel_values", shape, note, images=None, tiles=self.tiles, **IMAGE_DIMS)
            ids, tiles = (None if x is None else x.shape for x in self.extras)
            require_shape("aspect_ratio_ids", ids, note, images=images)
            require_shape("aspect_ratio_mask", tiles, note, images=images, tiles=self.tiles)
        units = self.total_frames * self.units_per_frame
        if self.samples < 1 or self.batch % self.samples or units % self.samples:
            raise ShapeError(
                f"{units} tiles of {self.samples} samples were passed with a batch of {self.batch}; every sample needs "
                "as many images as the others, padding images included"
            )
        if units and (mask := self.cross_attention_mask) is not None:
            # Images that the cache has already, which a caller may repeat, or further ones.
            repeated = mask.dim() == 4 and mask.shape[2] * mask.shape[3] == self.cached_tiles > 0
            self._rows_of_mask(mask, self.cached_tiles + (0 if repeated else units // self.samples))


class MllamaFamily(Family[MllamaInputs]):
    """Llama 3.2 Vision. A frame is an image of `max_num_tiles` tiles, and a unit is a tile."""

    name = "Llama 3.2 Vision"
    model_class = "MllamaForConditionalGeneration"
    output_class = MULTIMODAL_OUTPUT
    parts = {
        "vision": ("model.vision_model",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model", "lm_head"),
    }
    frame_arguments = ("pixel_values", "cross_attention_states")
    visual_arguments: tuple[str, ...] = (*frame_arguments, *_ASPECT_RATIOS, "visual_shard")
    frame_layout = "zigzag"
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that the images passed are only this rank's of
        `visual_shard.total`, all samples' images (padding images included) in one list: `pixel_values` (f, tiles,
        channels, height, width), `aspect_ratio_ids` (f,), `aspect_ratio_mask` (f, tiles). With
        `cross_attention_states` (f, tiles, patches, width) it counts images, with (t, patches, width) tiles.
        `visual_samples` is passed by `generate` with beams: the number of samples that the images belong to.
"""

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        decoder = model.model.language_model
        if 0 in decoder.cross_attention_layers:
            raise AdapterError(
                f"cross_attention_layers is {sorted(decoder.cross_attention_layers)}: transformers counts cached "
                "tokens by layer 0, which must be a self-attention layer"
            )
        check_cross_layers(decoder.layers, decoder.cross_attention_layers)

    @property
    def decoder(self) -> Any:
        return self.model.model.language_model

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        return ((module, _cross_attention) for module in cross_attentions(self.decoder))

    _warned_of_missing_mask = False

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        inner = self.model.model
        return [*super().called_modules, inner.vision_model, inner.multi_modal_projector]

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode (f, tiles, 3, height, width) to (f * tiles, patches, C).

        The extras are the aspect ratio ids (f,) and the aspect ratio mask (f, tiles).
        """
        arguments = zip(("pixel_values", *_ASPECT_RATIOS), (frames, *extras), strict=True)
        states = self.model.model.vision_model(**{name: x[None] for name, x in arguments}).last_hidden_state
        return self.model.model.multi_modal_projector(states).flatten(0, 2)

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return a black image of one tile, as the processor pads with."""
        vision, weight = self.model.config.vision_config, self.embedding_weight()
        shape = (1, vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        ratio_mask = torch.zeros(1, vision.max_num_tiles, dtype=torch.long, device=weight.device)
        ratio_mask[:, 0] = 1
        return torch.zeros(shape, device=weight.device, dtype=weight.dtype), ratio_mask.new_zeros(1), ratio_mask

    def appends_frames(self, inputs: MllamaInputs, known: bool) -> bool:
        """Return whether the mask has columns for images besides those of the cache; without a mask, if they differ."""
        mask = inputs.cross_attention_mask
        further = not known if mask is None else mask.shape[2] * mask.shape[3] > inputs.cached_tiles
        if not known and not further:
            raise ShapeError(
                f"{inputs.total_frames} images were passed with a cache that holds others already, and "
                f"cross_attention_mask has columns for {inputs.cached_tiles} tiles, those of the cache; give it the "
                "columns of the images in the cache and then those of the new ones, or leave the images out"
            )
        return further

    def visibility(self, inputs: MllamaInputs, units: int, tokens: int) -> FrameMask:
        samples = inputs.samples_of_images
        per_sample, sample = units // samples, inputs.prompt_rows // (inputs.prompt_batch // samples)
        in_mask = inputs.visible_tiles(self._tiles_of_mask(inputs, per_sample))
        if in_mask is None:
            first = (sample * per_sample)[:, None].expand(-1, inputs.length)
            return FrameMask.from_intervals(first, first + per_sample, tokens, units)
        visible = (in_mask | ~_any_tile(in_mask)[..., None])[..., inputs.unit_columns]
        if samples > 1:
            table = in_mask.new_zeros(inputs.batch, inputs.length, samples, per_sample)
            table[torch.arange(inputs.batch), :, sample] = visible
            visible = table.flatten(2)
        return FrameMask.from_dense(visible, tokens)

    def _tiles_of_mask(self, inputs: MllamaInputs, own: int) -> int:
        """Return the number of tiles of a sample in all passes, if `own` came with the pass of `inputs.cache_state`."""
        whole = cache_state_of(inputs.cache)
        if not inputs.past_length or whole is None or not whole.earlier:
            return own
        return sum(state.units_of_sample() for state in whole.by_pass())

    def row_facts(self, inputs: MllamaInputs, mask: FrameMask) -> dict[str, Tensor]:
        """Return the row tensor `full_text_row_masked_out_mask` is made of: False skips the MLP of the row.

        In a pass without images no row attends, and the layers give what the skipped layers of the unpatched model
        give.
        """
        attends = mask.any_frame_visible()
        if bool(attends.any()):
            in_mask = inputs.visible_tiles(self._tiles_of_mask(inputs, mask.total_frames // inputs.samples_of_images))
            if in_mask is None:
                return {}
            attends = _any_tile(in_mask)
        return {"mlp_gate": copy_to_device(attends, self.embedding_weight().device)}

    def continue_cache(self, inputs: MllamaInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Refuse a cache in which the unpatched model stored K and V of tiles, all of them on every rank."""
        if not inputs.past_length or cache_state.visual_kv is not None:
            return
        layers = {i: cache.layers[i] for i in self._cross_layers(cache)}
        filled = [i for i, layer in layers.items() if layer.is_initialized and bool(layer.keys.any())]
        if filled:
            raise ConfigError(
                f"the cache holds K and V of images that an unpatched model computed (layers {filled}); continue "
                "it with the unpatched model, or begin with a new cache"
            )

    def complete_cache(self, inputs: MllamaInputs, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Mark the cross-attention layers, which the unpatched model would skip because they hold nothing."""
        cache_state.samples = inputs.samples
        mark_visual_layers(cache, cache_state, self._cross_layers(cache))

    def _cross_layers(self, cache: Any) -> list[int]:
        return [i for i in self.text_config.cross_attention_layers if i < len(cache.layers)]

    def check_inputs(self, inputs: MllamaInputs) -> None:
        inputs.check()
        unmasked = inputs.total_frames and inputs.cross_attention_mask is None
        if unmasked and not self._warned_of_missing_mask and self.text_config._attn_implementation == "sdpa":
            self._warned_of_missing_mask = True
            _log.warning(
                "cross_attention_mask is missing: every token attends to every tile of its sample. transformers' sdpa "
                "attention would treat tiles as text and hide most of them; pass the processor's mask"
            )

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        gate = state.row_facts.get("mlp_gate")
        return self.decoder(
            **decoder_arguments(embeds, positions, mask, cache, state),
            cross_attention_states=None if state.frames is None else state,
            full_text_row_masked_out_mask=None if gate is None else gate[:, None, :, None].to(self.model.dtype),
            **kwargs,
        )

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        visual_samples: int | None = None,
    ) -> MllamaInputs:
        images = (pixel_values, (aspect_ratio_ids, aspect_ratio_mask), cross_attention_states)
        return MllamaInputs(**self.input_fields(text, *images, cross_attention_mask, visual_samples))

    def input_fields(
        self,
        text: dict[str, Any],
        pixels: Tensor | None,
        ratios: tuple[Tensor | None, Tensor | None],
        states: Tensor | None,
        cross_attention_mask: Tensor | None,
        visual_samples: int | None,
    ) -> dict[str, Any]:
        """Return the fields of `MllamaInputs`; `ratios` are the ids and the mask of the aspect ratios."""
        vision, shard = self.model.model.vision_model, text["visual_shard"]
        rows = text["inputs_embeds"] if text["input_ids"] is None else text["input_ids"]
        samples = visual_samples or (0 if rows is None else rows.shape[0])
        frames, extras = _flat_images(pixels, ratios, states, shard, samples, vision.num_patches)
        mask = None if cross_attention_mask is None else cross_attention_mask == 1
        compared = {} if shard is not None else dict(zip(_ASPECT_RATIOS, extras, strict=False))
        return text | {
            "frames": frames,
            "frames_are_features": states is not None,
            "pixels_and_features": pixels is not None and states is not None,
            "compared_tensors": as_compared_tensors(cross_attention_mask=mask, **compared),
            "extras": extras,
            "cross_attention_mask": mask,
            "samples": samples,
            "tiles": vision.max_num_tiles,
            "patches": vision.num_patches,
            "width": self.text_config.hidden_size,
        }


def _any_tile(visible: Tensor) -> Tensor:
    """(B, L, tiles) -> (B, L): whether a row attends to any tile."""
    return visible.view(torch.uint8).amax(-1).bool()  # `any` takes 30 times as long


def _flat_images(
    pixels: Tensor | None,
    ratios: tuple[Tensor | None, Tensor | None],
    states: Tensor | None,
    shard: FrameShard | None,
    samples: int,
    patches: int,
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the images of all samples in one list, and their aspect ratios. With `shard` they are flat lists already.

    Args:
        pixels: (B, images, tiles, channels, height, width).
        ratios: ids (B, images) and mask (B, images, tiles).
        states: (..., patches, width), or all of a sample in one: (B, images * tiles * patches, width); with `shard` by
            tiles (t, patches, width), or by images (f, tiles, patches, width).
    """
    if pixels is not None:
        if shard is not None:
            return pixels, ratios
        # (B, images, ...) -> (B * images, ...). A tensor with too few dimensions stays, for the check to report.
        merged = [x.flatten(0, 1) if x is not None and x.dim() > 1 else x for x in (pixels, *ratios)]
        return merged[0], tuple(merged[1:])
    if states is None:
        return None, ()
    if states.dim() > 3 and shard is None:
        states = states.flatten(0, -3)
    whole = shard is None and states.dim() == 3 and states.shape[1] != patches
    if whole and samples and states[..., 0].numel() % (samples * patches) == 0:
        states = states.reshape(-1, patches, states.shape[2])
    return states, ()
