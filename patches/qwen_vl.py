"""What the decoder-only Qwen2.5-VL and Qwen3-VL have in common: their pictures, positions, and sharded forward.

A frame is a temporal patch of an image or a video: the pixels of two pictures, as rows of patches. The vision tower
never attends across temporal patches, in its full layers, its windows and its merger, so each rank encodes temporal
patches of its own. All frames of a call are one list, those of `pixel_values` first and those of `pixel_values_videos`
after them. Every rank has the grids, which say how many rows of pixels and how many tokens each frame has.

Positions have three components (time, height, width), which the model's own `compute_3d_position_ids` computes from the
whole text and the grids. They are sharded with the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.adapting import ConfigError, ForwardState, FrameShard, Patch, SeqParContext, ShapeError
from mllm_seqpar.integrations.transformers.attention import causal_mask, use_seqpar_attention
from mllm_seqpar.integrations.transformers.family import DecoderOnlyFamily, decoder_arguments
from mllm_seqpar.integrations.transformers.generation import patch_generate
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs, as_compared_tensors, makes_cache
from mllm_seqpar.integrations.transformers.passes import as_forward, run_pass
from mllm_seqpar.patching.registry import is_instance_by_name
from mllm_seqpar.runtime.visual_features import sampled_bits
from mllm_seqpar.runtime.visual_tokens import TokenPlaces, VisualTokens
from mllm_seqpar.sharding import frame_bounds

PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
KINDS = ("image", "video")
_TOKENS = "kinds of visual tokens"
_VISUAL_ARGUMENTS = (*PIXELS, *GRIDS, "second_per_grid_ts", "visual_shard")


class QwenVLAdapter:
    """The adapter of one of the two families.

    Attributes:
        model_class, package: the class of its models, and where transformers defines it.
    """

    name: str
    model_class: str
    package: str

    def matches(self, model: nn.Module) -> bool:
        return is_instance_by_name(model, self.model_class, self.package)

    def family(self, model: Any, context: SeqParContext) -> QwenVLFamily:
        return QwenVLFamily(model, context)

    def check(self, model: Any, context: SeqParContext) -> None:
        strategy = context.config.strategy
        if strategy not in ("lv-xattn", "auto"):
            choice = "" if strategy == "replicate" else f', and pass self_attention="{strategy}" for the whole sequence'
            raise ConfigError(
                f'strategy="{strategy}": {self.name} has no cross-attention to frames, which this option is for; leave '
                f"it out{choice}"
            )

    def install(self, model: Any, context: SeqParContext, patch: Patch) -> None:
        if context.config.strategy == "auto" and context.config.self_attention == "ring":
            context = replace(context, config=replace(context.config, self_attention="auto"))
        layers = model.model.language_model.layers
        attention = [layer.self_attn for layer in layers]
        use_seqpar_attention(patch, attention)
        patch.chunk_forwards(layer.mlp for layer in layers)
        patch.guard(model, attention)
        patch.set(model, "forward", _model_forward(model, context, self.family(model, context)))
        unpatched = model._expand_inputs_for_generation
        patch.set(model, "_expand_inputs_for_generation", functools.partial(_expand_inputs, unpatched))
        patch_generate(model, patch)


def _expand_inputs(
    unpatched: Any,
    expand_size: int = 1,
    is_encoder_decoder: bool = False,
    input_ids: Tensor | None = None,
    **model_kwargs: Any,
) -> tuple[Tensor | None, dict[str, Any]]:
    """Repeat each sample for its beams, but not its frames, which are encoded once."""
    visual = {name: model_kwargs.pop(name) for name in _VISUAL_ARGUMENTS if name in model_kwargs}
    embeds = model_kwargs.get("inputs_embeds")
    prompt = input_ids if embeds is None else embeds
    if expand_size > 1 and prompt is not None:
        visual["visual_samples"] = prompt.shape[0]
    ids, others = unpatched(
        expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
    )
    return ids, others | visual


@dataclass(frozen=True, kw_only=True)
class QwenVLInputs(ForwardInputs):
    """The inputs of one pass. `frames` is whichever of the two tensors of pixels was given.

    Attributes:
        pixels: rows of patches of the images and of the videos, all of them or this rank's; or None.
        merge: patches of a token along height and width.
        samples: number of samples that the frames belong to; ``batch / samples`` rows are beams of one sample.
        given_positions: (B or 1, L), (3, B, L), (4, B, L) or None.
    """

    pixels: tuple[Tensor | None, Tensor | None]
    merge: int
    samples: int
    given_positions: Tensor | None
    packs_by_positions: bool
    rotary: Any = field(repr=False, default=None)

    @property
    def text_position_ids(self) -> Tensor | None:
        given = self.given_positions
        if given is None or (given.dim() == 2 and not self.packs_by_positions):
            return None
        return given if given.dim() == 2 else given[0] if given.shape[0] == 4 else None

    @cached_property
    def units(self) -> Tensor:
        """Return (F, 3) int64 on the CPU: kind (0 image, 1 video), height and width in patches of each frame."""
        found = []
        for kind, (name, pixels) in enumerate(zip(GRIDS, self.pixels, strict=True)):
            grid = self.on_host(name) if pixels is not None else None
            if grid is not None:
                sizes = torch.cat([torch.full_like(grid[:, :1], kind), grid[:, 1:]], 1).long()
                found.append(sizes.repeat_interleave(grid[:, 0].long(), 0))
        return torch.cat(found) if found else torch.zeros(0, 3, dtype=torch.long)

    @property
    def total_frames(self) -> int:
        return 0 if self.frames is None else self.units.shape[0]

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the number of rows of pixels of the frames ``start <= f < stop``, of images and of videos."""
        units = self.units[start:stop]
        rows = units[:, 1] * units[:, 2]
        images = int(rows[units[:, 0] == 0].sum())
        return images, int(rows.sum()) - images

    def check_shard(self, shard: FrameShard) -> None:
        found = tuple(0 if x is None else x.shape[0] for x in self.pixels)
        expected = self.rows_of(shard.start, shard.stop)
        if shard.total != self.total_frames or found != expected:
            raise ShapeError(
                f"visual_shard: {shard} means {expected} rows of {' and '.join(PIXELS)}, the temporal patches of this "
                f"rank, and {found} were passed; total counts the {self.total_frames} temporal patches of all images "
                "and then of all videos, and the grids are those of all of them"
            )

    def check(self) -> None:
        """Raise ShapeError if pixels and grids do not fit together."""
        for name, grid_name, pixels in zip(PIXELS, GRIDS, self.pixels, strict=True):
            grid = self.on_host(grid_name)
            if pixels is None:
                continue
            if grid is None or grid.dim() != 2 or grid.shape[1] != 3 or bool((grid[:, 1:] % self.merge).any()):
                found = None if grid is None else f"{tuple(grid.shape)}: {grid.tolist()}"
                raise ShapeError(
                    f"{grid_name}: found {found}; expected (n, 3) for {name}, time, height and width of each in "
                    f"patches, the last two multiples of {self.merge}"
                )
        if self.visual_shard is None and self.frames is not None:
            found_rows = tuple(0 if x is None else x.shape[0] for x in self.pixels)
            if found_rows != (expected := self.rows_of(0, self.total_frames)):
                raise ShapeError(
                    f"{' and '.join(PIXELS)}: {found_rows} rows were passed; the grids mean {expected}. A rank that "
                    "passes only its own frames says so by visual_shard"
                )
        given = self.given_positions
        if given is not None and not (
            given.dim() == 2
            or (given.dim() == 3 and given.shape[0] in (3, 4) and given.shape[1:] == (self.batch, self.length))
        ):
            raise ShapeError(
                f"position_ids: has shape {tuple(given.shape)}; expected (batch, tokens), (3, batch, tokens) or "
                f"(4, batch, tokens) with the positions in the text first, for {self.batch} samples of {self.length}"
            )
        if self.samples < 1 or self.batch % self.samples:
            raise ShapeError(f"visual_samples: {self.samples}; the batch of {self.batch} is no multiple of it")

    def positions(self) -> Tensor:
        """Return (4, B, L): positions in the text, and the rotary positions (time, height, width)."""
        text = self.text_position_ids
        if text is None:
            text = torch.arange(self.length, device=self.text.device)[None] + self.past_length
        given = self.given_positions if self.given_positions is not None else self.rotary(self)
        if given is None:
            given = torch.arange(self.length, device=self.text.device)[None] + self.past_length
        if given.dim() == 2:
            given = given[None].expand(3, -1, -1)
        shape = self.batch, self.length
        given = given[-3:, ..., -self.length :].expand(3, *shape)
        return torch.cat([text.to(given).expand(shape)[None], given])


class QwenVLFamily(DecoderOnlyFamily[QwenVLInputs]):
    """The model of both families; `deepstack` is how many further embeddings each visual token has."""

    deepstack = 0
    packs_by_positions = False
    """Whether positions (B, L) also count the tokens of the text; otherwise only positions (4, B, L) do."""
    position_arguments: tuple[str, ...] = ()
    """Further arguments that positions are computed from."""

    @property
    def merge(self) -> int:
        return int(self.model.config.vision_config.spatial_merge_size)

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode rows of patches (p, width) with their grids (n, 3) to embeddings (x, C), or (x, (1 + deepstack) C)."""
        visual = self.model.model.visual
        grid = copy_to_device(extras[0], frames.device)
        return self.embeddings_of(visual(frames.type(visual.dtype), grid_thw=grid, return_dict=True))

    def embeddings_of(self, out: Any) -> Tensor:
        """Return the embeddings of all visual tokens in the output of the vision tower."""
        return out.pooler_output

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return one black token."""
        config, weight = self.model.config.vision_config, self.embedding_weight()
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, self.merge, self.merge]])
        return torch.zeros(self.merge**2, width, device=weight.device, dtype=weight.dtype), grid

    def frames_between(self, inputs: QwenVLInputs, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return rows of patches and the grids (n, 3) of the frames; equal frames share one grid."""
        bounds = frame_bounds(inputs.total_frames, self.context.comm.size)[self.context.comm.rank]
        skipped = inputs.rows_of(bounds[0] if inputs.visual_shard is not None else 0, start)
        counts = inputs.rows_of(start, stop)
        parts = [
            pixels[first : first + count]
            for pixels, first, count in zip(inputs.pixels, skipped, counts, strict=True)
            if pixels is not None  # also without rows, so that the caller's tensor has a zero gradient rather than none
        ]
        units, times = inputs.units[start:stop].unique_consecutive(dim=0, return_counts=True)
        grid = torch.cat([times[:, None], units[:, 1:]], 1)
        return (parts[0] if len(parts) == 1 else torch.cat([x.to(parts[0]) for x in parts])), grid

    def placement(self, inputs: QwenVLInputs) -> TokenPlaces:
        kinds = inputs.on_host(_TOKENS)
        units, comm = inputs.units, self.context.comm
        if inputs.frames is None or kinds is None:
            none = torch.zeros(0, dtype=torch.long)
            return TokenPlaces(none, none, none, torch.zeros(comm.size + 1, dtype=torch.long))
        tokens = units[:, 1] * units[:, 2] // self.merge**2
        beams = inputs.batch // inputs.samples
        embeddings = torch.full(kinds.shape, -1)
        offset = 0
        for kind, name in enumerate(KINDS):
            found, here = int(tokens[units[:, 0] == kind].sum()), kinds == kind + 1
            if inputs.pixels[kind] is None:  # placeholders without frames stay text, as in the unpatched model
                continue
            by_sample = here.sum(1)[::beams]
            if int(here.sum()) != found * beams or int(by_sample.sum()) != found:
                raise ShapeError(
                    f"{PIXELS[kind]}: {name} features and {name} tokens do not match: the text has {int(here.sum())} "
                    f"{name} tokens ({here.sum(1).tolist()} by row), and {GRIDS[kind]} means {found * beams}; pass the "
                    "text and the grids as the processor returns them, not truncated"
                )
            first = (by_sample.cumsum(0) - by_sample + offset).repeat_interleave(beams)
            embeddings = torch.where(here, first[:, None] + here.long().cumsum(1) - 1, embeddings)
            offset += found
        samples, positions = (embeddings >= 0).nonzero().unbind(1)
        ends = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        bounds = frame_bounds(units.shape[0], comm.size)
        cuts = torch.tensor([first for first, _ in bounds] + [units.shape[0]])
        return TokenPlaces(samples, positions, embeddings[samples, positions], ends[cuts])

    def check(self, inputs: QwenVLInputs, kwargs: Mapping[str, Any]) -> None:
        super().check(inputs, kwargs)
        inputs.check()

    def rotary_positions(self, given: Mapping[str, Any], inputs: QwenVLInputs) -> Tensor | None:
        """Return the positions (3, B, L) that the model itself computes, or None if they count the tokens.

        They are computed on the CPU from what the host has read, because the model reads every run and every grid.
        """
        model, device, shape = self.model.model, inputs.text.device, (inputs.batch, inputs.length)
        names = (*GRIDS, "mm_token_type_ids", *self.position_arguments)
        read = {name: inputs.on_host(name) for name in names}
        host = {name: given[name] if read[name] is None else read[name] for name in names}
        found: Tensor | None = model.compute_3d_position_ids(
            input_ids=None
            if inputs.input_ids is None
            else torch.zeros(shape, dtype=torch.long),  # only its shape counts
            inputs_embeds=torch.empty(*shape, 0),
            attention_mask=inputs.on_host("attention_mask"),
            past_key_values=inputs.past_key_values,
            **{name: x.cpu() if isinstance(x, Tensor) else x for name, x in host.items()},
        )
        if model.rope_deltas is not None:
            model.rope_deltas = copy_to_device(model.rope_deltas, device)
        return None if found is None else copy_to_device(found, device)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        config = self.model.model.language_model.layers[0].self_attn.config  # names the patched attention
        return causal_mask(config, embeds, mask, positions[0], cache)

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        if state.visual_tokens is not None:
            first, *further = state.visual_tokens.chunk(1 + self.deepstack)
            kwargs |= self.further_embeddings(embeds, further)
            embeds, state = first.replace_rows(embeds), replace(state, visual_tokens=None)
        return self.model.model.language_model(**decoder_arguments(embeds, positions[1:], mask, cache, state), **kwargs)

    def further_embeddings(self, embeds: Tensor, further: list[VisualTokens]) -> dict[str, Any]:
        """Return the decoder's arguments that hold the embeddings of layers behind the first."""
        return {}


def _model_forward(model: Any, context: SeqParContext, family: QwenVLFamily) -> Any:
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        second_per_grid_ts: Any = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        visual_shard: FrameShard | None = None,
        visual_samples: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if second_per_grid_ts is not None and "second_per_grid_ts" not in family.position_arguments:
            kwargs["second_per_grid_ts"] = second_per_grid_ts  # refused, as an argument that nothing reads
        pixels = pixel_values, pixel_values_videos
        given = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        given |= {"mm_token_type_ids": mm_token_type_ids, "second_per_grid_ts": second_per_grid_ts}
        text = input_ids if input_ids is not None else inputs_embeds
        frames = next((x for x in pixels if x is not None), None)
        inputs = QwenVLInputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            shift_labels=shift_labels,
            frames=frames,
            frames_are_features=False,
            visual_shard=visual_shard,
            compared_tensors={} if frames is None else _compared(family, text, pixels, visual_shard, given),
            past_key_values=past_key_values,
            use_cache=makes_cache(context, self, family.text_config, use_cache, past_key_values, labels),
            detects_packing=not _unpatched_caches(self, past_key_values, use_cache),
            frame_names=PIXELS,
            pixels=pixels,
            merge=family.merge,
            samples=visual_samples or (1 if text is None else text.shape[0]),
            given_positions=position_ids,
            packs_by_positions=family.packs_by_positions,
            rotary=functools.partial(family.rotary_positions, given),
        )
        return run_pass(family, inputs, logits_to_keep, kwargs)

    return as_forward(model, forward, _VISUAL_SHARD_DOC)


_VISUAL_SHARD_DOC = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `pixel_values` and `pixel_values_videos`
        hold only the rows of this rank's temporal patches, of `visual_shard.total`: those of all images are counted
        first, those of all videos after them. The grids and the text are those of all ranks. A rank without rows of
        one of the two passes an empty tensor. `visual_samples` is passed by `generate` with beams: the number of
        samples that the frames belong to.
"""


def _compared(
    family: QwenVLFamily, text: Tensor | None, pixels: tuple[Any, ...], shard: Any, given: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return what the ranks compare of the frames of a pass, and what the host plans it by."""
    found = as_compared_tensors(**given)
    if text is not None:
        config = family.model.config
        ids = (config.image_token_id, config.video_token_id)
        if text.is_floating_point():  # embeddings: a placeholder is the embedding of its token
            rows = family.embed(torch.tensor(ids, device=text.device)).detach()
            kinds = [(text.detach() == row).all(-1) for row in rows]
        else:
            kinds = [text == token for token in ids]
        found[_TOKENS] = kinds[0].to(torch.uint8) + 2 * kinds[1].to(torch.uint8)
    found["pixels that need gradients"] = torch.tensor([x is not None and x.requires_grad for x in pixels])
    if shard is None and all(x is not None for x in pixels):
        found["pixels of videos"] = sampled_bits(pixels[1])
    return found


def _unpatched_caches(model: Any, past: Cache | None, use_cache: bool | None) -> bool:
    """Return whether the unpatched model would use a cache; it then does not detect packed sequences by positions."""
    decoder = model.model.language_model
    wanted = model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    return past is not None or (bool(wanted) and not (decoder.gradient_checkpointing and decoder.training))
