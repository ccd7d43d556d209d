"""Qwen2.5-VL and Qwen3-VL (transformers, decoder-only): their images, positions, and sharded forward.

A frame is a temporal patch of an image or a video: the pixels of two images, as rows of patches. The vision tower
never attends across temporal patches, in its full layers, its windows and its merger, so each rank encodes temporal
patches of its own. All frames of a call are one list, in the order of their tokens in the text. Every rank has the
grids, which say how many rows of pixels and how many tokens each frame has.

Positions have three components (time, height, width), which the model's own `compute_3d_position_ids` computes from the
whole text and the grids. They are sharded with the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.adapting import (
    MULTIMODAL_OUTPUT,
    ConfigError,
    DecoderOnlyFamily,
    ForwardInputs,
    ForwardState,
    FrameShard,
    FrameTokens,
    Patch,
    SeqParContext,
    ShapeError,
    VisualTokenLayout,
    as_compared_tensors,
    cache_argument,
    cache_name,
    cache_of,
    cache_state_of,
    copy_to_device,
    decoder_arguments,
    frame_bounds,
    require_shape,
    sampled_bits,
)

PIXELS = ("pixel_values", "pixel_values_videos")
FEATURES = "visual_embeds"
GRIDS = ("image_grid_thw", "video_grid_thw")
KINDS = ("image", "video")
TOKENS = "kinds of visual tokens"


@dataclass(frozen=True, kw_only=True)
class QwenVLInputs(ForwardInputs):
    """The inputs of one pass. `frames` is one of the tensors of pixels, or the embeddings that the caller has.

    Attributes:
        pixels: rows of patches of the images and of the videos, all of them or this rank's; or None.
        merge: patches of a token along height and width.
        samples: number of samples that the frames belong to; ``batch / samples`` rows are beams of one sample.
        packs_by_positions: whether positions (B, L) also count the tokens of the text, as those of (4, B, L) do.
        rotary: computes the positions (3, B, L) of the text if none were given; None if they count the tokens.
    """

    frame_layouts = ("contiguous",)  # no attention to frames that another layout could balance

    pixels: tuple[Tensor | None, Tensor | None]
    merge: int
    samples: int
    packs_by_positions: bool
    rotary: Callable[[QwenVLInputs], Tensor | None] = field(repr=False)

    @property
    def text_position_ids(self) -> Tensor | None:
        given = self.position_ids
        if given is None or (given.dim() == 2 and not self.packs_by_positions):
            return None
        return given if given.dim() == 2 else given[0] if given.shape[0] == 4 else None

    def has_frames(self, kind: int) -> bool:
        """Return whether there are frames of images (0) or of videos (1); placeholders are text otherwise."""
        return self.pixels[kind] is not None or (self.frames_are_features and self.on_host(GRIDS[kind]) is not None)

    @functools.cached_property
    def frame_grids(self) -> Tensor:
        """Return (F, 3) int64 on the CPU: kind (0 image, 1 video), height and width in patches of each frame."""
        sizes, starts = [torch.zeros(0, 3, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        kinds = self.on_host(TOKENS)
        beams = max(1, self.batch // max(1, self.samples))  # `check` refuses a batch that is no multiple
        for kind, name in enumerate(GRIDS):
            grid = self.on_host(name)
            if grid is None or kinds is None or not self.has_frames(kind):
                continue
            rows = torch.cat([torch.full_like(grid[:, :1], kind), grid[:, 1:]], 1).long()
            sizes.append(rows.repeat_interleave(grid[:, 0].long(), 0))
            places = (kinds[::beams] == kind + 1).flatten().nonzero().flatten()
            tokens = self.tokens_of(sizes[-1])
            first = tokens.cumsum(0) - tokens  # beyond the text if it has too few tokens, as `placed_tokens` reports
            places = torch.cat([places, places.new_full((1,), kinds.numel())])
            starts.append(places[first.clamp(max=places.numel() - 1)])
        return torch.cat(sizes)[torch.cat(starts).argsort(stable=True)]

    def tokens_of(self, grids: Tensor) -> Tensor:
        """Return the number of tokens of each of these frames."""
        return grids[:, 1] * grids[:, 2] // self.merge**2

    @property
    def total_frames(self) -> int:
        return 0 if self.frames is None else self.frame_grids.shape[0]

    def rows_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the rows of the frames ``start <= f < stop``: of pixels of images and of videos, or of embeddings."""
        grids = self.frame_grids[start:stop]
        if self.frames_are_features:
            return (int(self.tokens_of(grids).sum()),)
        rows = grids[:, 1] * grids[:, 2]
        images = int(rows[grids[:, 0] == 0].sum())
        return images, int(rows.sum()) - images

    @property
    def _given_rows(self) -> tuple[int, ...]:
        given = (self.frames,) if self.frames_are_features else self.pixels
        return tuple(0 if x is None else x.shape[0] for x in given)

    @property
    def _names(self) -> str:
        return FEATURES if self.frames_are_features else " and ".join(PIXELS)

    def check_shard(self, shard: FrameShard) -> None:
        expected = self.rows_of(shard.start, shard.stop)
        if shard.total != self.total_frames or self._given_rows != expected:
            raise ShapeError(
                f"visual_shard: {shard} means {expected} rows of {self._names}, the temporal patches of this rank, and "
                f"{self._given_rows} were passed; total counts the {self.total_frames} temporal patches of all images "
                "and videos, in the order of the text, and the grids are those of all of them"
            )

    def check(self) -> None:
        """Raise ShapeError if frames, grids and positions do not fit together."""
        for kind, (name, grid_name) in enumerate(zip(PIXELS, GRIDS, strict=True)):
            grid = self.on_host(grid_name)
            if not self.has_frames(kind):
                continue
            if grid is None or grid.dim() != 2 or grid.shape[1] != 3 or bool((grid[:, 1:] % self.merge).any()):
                found = None if grid is None else f"{tuple(grid.shape)}: {grid.tolist()}"
                raise ShapeError(
                    f"{grid_name}: found {found}; expected (n, 3) for {name}, time, height and width of each in "
                    f"patches, the last two multiples of {self.merge}"
                )
        if self.visual_shard is None and self.frames is not None:
            if self._given_rows != (expected := self.rows_of(0, self.total_frames)):
                raise ShapeError(
                    f"{self._names}: {self._given_rows} rows were passed; the grids mean {expected}. A rank that "
                    "passes only its own frames says so by visual_shard"
                )
        given, shape = self.position_ids, (self.batch, self.length)
        if given is not None and given.dim() != 2 and (given.shape[0] not in (1, 3, 4) or given.shape[1:] != shape):
            raise ShapeError(
                f"position_ids: has shape {tuple(given.shape)}; expected (batch, tokens), (3, batch, tokens) or "
                f"(4, batch, tokens) with the positions in the text first, for {self.batch} samples of {self.length}"
            )
        if self.samples < 1 or self.batch % self.samples:
            raise ShapeError(f"visual_samples: {self.samples}; the batch of {self.batch} is no multiple of it")

    def placed_tokens(self) -> tuple[Tensor, Tensor]:
        """Return (B, L) the number of each visual token's embedding, -1 elsewhere; and where frames begin, (F + 1,).

        Raises:
            ShapeError: the placeholders of the text and the frames do not match.
        """
        kinds, grids = self.on_host(TOKENS), self.frame_grids
        assert kinds is not None
        tokens, beams = self.tokens_of(grids), self.batch // self.samples
        ends = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        numbers = torch.arange(int(ends[-1]))
        of_image = (grids[:, 0] == 0).repeat_interleave(tokens)
        placed = torch.full(kinds.shape, -1)
        for kind, name in enumerate(KINDS):
            if not self.has_frames(kind):
                continue
            here, embeddings = kinds == kind + 1, numbers[of_image if kind == 0 else ~of_image]
            by_sample = here.sum(1)[::beams]
            if int(here.sum()) != embeddings.numel() * beams or int(by_sample.sum()) != embeddings.numel():
                raise ShapeError(
                    f"{self._names}: {name} features and {name} tokens do not match: the text has {int(here.sum())} "
                    f"{name} tokens ({here.sum(1).tolist()} by row), and {GRIDS[kind]} means "
                    f"{embeddings.numel() * beams}; pass the text and the grids as the processor returns them, not "
                    "truncated"
                )
            first = (by_sample.cumsum(0) - by_sample).repeat_interleave(beams)
            index = (first[:, None] + here.long().cumsum(1) - 1).clamp(min=0)
            if embeddings.numel():
                placed = torch.where(here, embeddings[index.clamp(max=embeddings.numel() - 1)], placed)
        return placed, ends

    @functools.cached_property
    def positions(self) -> Tensor:
        """(4, B, L): positions in the text, and the rotary positions (time, height, width)."""
        counted = torch.arange(self.length, device=self.tokens.device)[None] + self.past_length
        text = self.text_position_ids
        given = self.position_ids if self.position_ids is not None else self.rotary(self)
        given = counted if given is None else given
        if given.dim() == 2:
            given = given[None].expand(3, -1, -1)
        shape = self.batch, self.length
        given = given[-3:, ..., -self.length :].expand(3, *shape)
        return torch.cat([(counted if text is None else text).to(given).expand(shape)[None], given])


def compared_tensors(
    config: Any,
    embed: Callable[[Tensor], Tensor],
    text: Tensor | None,
    frames: tuple[Tensor | None, ...],
    shard: FrameShard | None,
    given: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Return what the ranks compare of the frames of a pass, and what the host plans it by.

    Args:
        config: the model's.
        embed: its token embedding.
        text: ids (B, L) or embeddings (B, L, C).
        frames: pixels of images, pixels of videos, and embeddings; each may be None.
        shard: the frames that this rank passes, or None for all.
        given: grids, token types and times, by their names.
    """
    compared = as_compared_tensors(**given)
    if text is not None:
        ids = (config.image_token_id, config.video_token_id)
        if text.is_floating_point():  # embeddings: a placeholder is the embedding of its token
            rows = embed(torch.tensor(ids, device=text.device)).detach()
            kinds = [(text.detach() == row).all(-1) for row in rows]
        else:
            kinds = [text == token for token in ids]
        compared[TOKENS] = kinds[0].to(torch.uint8) + 2 * kinds[1].to(torch.uint8)
    compared["pixels that need gradients"] = torch.tensor([x is not None and x.requires_grad for x in frames])
    if shard is None and frames[0] is not None and frames[1] is not None:
        compared["pixels of videos"] = sampled_bits(frames[1])
    return compared


class QwenVLFamily(DecoderOnlyFamily[QwenVLInputs]):
    """The model of both families.

    The vision tower of Qwen3-VL returns features of several of its layers besides the last one (deepstack). Each is
    added to the hidden states of the visual tokens after one of the first decoder layers. They are sent with
    the embeddings, in one exchange.
    """

    parts = {
        "vision": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
        "projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
        "language": ("model.language_model", "lm_head"),
    }
    frame_arguments = (*PIXELS, FEATURES)
    visual_arguments = (*frame_arguments, *GRIDS, "second_per_grid_ts", "visual_shard")
    output_class = MULTIMODAL_OUTPUT
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that `pixel_values` and `pixel_values_videos`
        hold only the rows of this rank's temporal patches, of `visual_shard.total`, those of all images and videos in
        the order of their tokens in the text. The grids and the text are those of all ranks. A rank without rows of
        one of the two passes an empty tensor. `visual_embeds` takes the place of both: rows of embeddings (in Qwen3-VL
        with those of deepstack beside them) that were computed before. `visual_samples` is passed by `generate` with
        beams: the number of samples that the frames belong to.
"""

    packs_by_positions = False
    """Whether positions (B, L) also count the tokens of the text; otherwise only positions (4, B, L) do."""

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        super().check(model, context)
        strategy = context.config.strategy
        if strategy not in ("lv-xattn", "auto"):
            choice = "" if strategy == "replicate" else f', and pass self_attention="{strategy}" for the whole sequence'
            raise ConfigError(
                f'strategy="{strategy}": {cls.name} has no cross-attention to frames, which this option is for; leave '
                f"it out{choice}"
            )

    @classmethod
    def install(cls, model: Any, context: SeqParContext, patch: Patch) -> None:
        if context.config.strategy == "auto" and context.config.self_attention == "ring":
            patch.context = context = replace(context, config=replace(context.config, self_attention="auto"))
        super().install(model, context, patch)

    def install_more(self, patch: Patch) -> None:
        """Let `generate` continue a cache with the positions of its own text."""
        unpatched = self.model._prepare_position_ids_for_generation

        @functools.wraps(unpatched)
        def positions(inputs: Tensor, arguments: dict[str, Any]) -> Tensor:
            self._restore_offsets(arguments.get(cache_name()), inputs)
            computed: Tensor = unpatched(inputs, arguments)
            return computed

        patch.set(self.model, "_prepare_position_ids_for_generation", positions)

    def _store_offsets(self, cache: Cache, inputs: QwenVLInputs) -> None:
        """Store the offsets of the positions of later tokens with the cache, on the CPU: (rows of the prompt, 1), or
        (rows, 0) of a text alone.

        transformers stores them on the model (`rope_deltas`), where each prompt replaces the offsets of the one before.
        """
        state, offsets = cache_state_of(cache), self.model.model.rope_deltas
        assert state is not None
        rows = state.rows_of(inputs.batch)
        samples = int(rows.max()) + 1
        if offsets is None:  # of a text alone, whose positions follow from its padding
            if state.text_facts is None:
                state.text_facts = torch.zeros(samples, 0, dtype=torch.long)
            return
        if state.text_facts is None or not state.text_facts.shape[1]:
            state.text_facts = torch.zeros(samples, 1, dtype=torch.long)
        # Beams of a sample share its offset. With positions of the caller, the model may have those of another prompt.
        if inputs.batch % offsets.shape[0] == 0:
            state.text_facts[rows] = offsets.cpu().repeat_interleave(inputs.batch // offsets.shape[0], 0)

    def _restore_offsets(self, cache: Cache | None, text: Tensor) -> None:
        """Give the model the offsets (B, 1) of the cached text that `text` (B, ...) continues, None if it has none.

        If the cache has several beams of each sample, they are the offsets of the first.
        """
        state = cache_state_of(cache)
        if state is not None and state.text_facts is not None and state.rows is not None:
            rows = state.rows[:: max(1, len(state.rows) // text.shape[0])]
            offsets = copy_to_device(state.text_facts[rows], text.device)
            self.model.model.rope_deltas = offsets if offsets.shape[1] else None

    @property
    def decoder(self) -> Any:
        return self.model.model.language_model

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        return [*super().called_modules, self.model.model.visual]

    @property
    def merge(self) -> int:
        return int(self.model.config.vision_config.spatial_merge_size)

    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode rows of patches (p, width) with their grids (n, 3) to embeddings (x, C), or (x, (1 + deepstack) C)."""
        visual = self.model.model.visual
        grid = copy_to_device(extras[0], frames.device)
        out = visual(frames.type(visual.dtype), grid_thw=grid, return_dict=True)
        return torch.cat([out.pooler_output, *out.deepstack_features], -1) if self.deepstack else out.pooler_output

    @property
    def deepstack(self) -> int:
        """The number of further embeddings of each visual token."""
        return len(getattr(self.model.config.vision_config, "deepstack_visual_indexes", ()))

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return one black token."""
        config, weight = self.model.config.vision_config, self.embedding_weight()
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, self.merge, self.merge]])
        return torch.zeros(self.merge**2, width, device=weight.device, dtype=weight.dtype), grid

    def frames_between(self, inputs: QwenVLInputs, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return rows of patches and the grids (n, 3) of the frames; equal frames share one grid.

        Instead of them, return the rows of embeddings if the caller has passed those.
        """
        first = 0
        if inputs.visual_shard is not None:
            first = frame_bounds(inputs.total_frames, self.context.comm.size)[self.context.comm.rank][0]
        if inputs.frames_are_features:
            assert inputs.frames is not None
            (skipped,), (count,) = inputs.rows_of(first, start), inputs.rows_of(start, stop)
            return (inputs.frames[skipped : skipped + count],)
        position = list(inputs.rows_of(first, start))
        # The empty slices give a caller's tensor without rows here a zero gradient rather than none.
        parts = [pixels[:0] for pixels in inputs.pixels if pixels is not None]
        grids, times = inputs.frame_grids[start:stop].unique_consecutive(dim=0, return_counts=True)
        for (kind, height, width), time in zip(grids.tolist(), times.tolist(), strict=True):
            pixels, rows = inputs.pixels[kind], time * height * width
            assert pixels is not None
            parts.append(pixels[position[kind] : position[kind] + rows])
            position[kind] += rows
        grid = torch.cat([times[:, None], grids[:, 1:]], 1)
        return torch.cat([x.to(parts[0]) for x in parts]), grid

    def visual_token_layout(self, inputs: QwenVLInputs) -> VisualTokenLayout:
        comm = self.context.comm
        if inputs.frames is None or inputs.on_host(TOKENS) is None:
            zeros = torch.zeros(comm.size + 1, dtype=torch.long)
            return VisualTokenLayout(FrameTokens.none(), zeros[:0], zeros)
        numbers, ends = inputs.placed_tokens()
        samples, positions = (numbers >= 0).nonzero().unbind(1)
        total = inputs.total_frames
        cuts = torch.tensor([first for first, _ in frame_bounds(total, comm.size)] + [total])
        embeddings = numbers[samples, positions]
        frames = torch.searchsorted(ends[1:].contiguous(), embeddings, right=True)
        return VisualTokenLayout(FrameTokens.of(samples, positions, frames), embeddings, ends[cuts])

    def check_inputs(self, inputs: QwenVLInputs) -> None:
        if inputs.frames is not None and inputs.frames_are_features:
            note = ", embeddings of the vision tower" + ", with those of deepstack beside them" * bool(self.deepstack)
            width = (1 + self.deepstack) * self.text_config.hidden_size
            require_shape(FEATURES, inputs.frames.shape, note, tokens=None, width=width)
        inputs.check()

    def rotary_positions(self, given: Mapping[str, Any], inputs: QwenVLInputs) -> Tensor | None:
        """Return the positions (3, B, L) that the model itself computes, or None if they count the tokens.

        They are computed on the CPU from what the host has read, because the model reads every run and every grid.
        """
        model, device, shape = self.model.model, inputs.tokens.device, (inputs.batch, inputs.length)
        self._restore_offsets(inputs.cache, inputs.tokens)
        read = {name: inputs.on_host(name) for name in given}
        host = {name: x if read[name] is None else read[name] for name, x in given.items()}
        computed: Tensor | None = model.compute_3d_position_ids(
            input_ids=None
            if inputs.input_ids is None
            else torch.zeros(shape, dtype=torch.long),  # only its shape counts
            inputs_embeds=torch.empty(*shape, 0),
            attention_mask=inputs.on_host("attention_mask"),
            **cache_argument(inputs.cache),
            **{name: x.cpu() if isinstance(x, Tensor) else x for name, x in host.items()},
        )
        if computed is None and inputs.use_cache and not inputs.past_length:
            model.rope_deltas = None  # those of another prompt, which later tokens of this text must not have
        if model.rope_deltas is not None:
            model.rope_deltas = copy_to_device(model.rope_deltas, device)
        return None if computed is None else copy_to_device(computed, device)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        return super().text_mask(embeds, mask, positions[0], cache)

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        if further := state.visual_tokens:  # of deepstack
            kwargs["visual_pos_masks"] = further[0].mask(*embeds.shape[:2])
            kwargs["deepstack_visual_embeds"] = [tokens.embeddings for tokens in further]
            further.clear()
        return self.decoder(**decoder_arguments(embeds, positions[1:], mask, cache, state), **kwargs)

    def inputs_of(
        self,
        text: dict[str, Any],
        images: Tensor | None,
        videos: Tensor | None,
        visual_embeds: Tensor | None,
        visual_samples: int | None,
        given: dict[str, Any],
    ) -> QwenVLInputs:
        """Return the inputs of a pass.

        Args:
            text: see `Family.inputs`.
            images, videos: their pixels.
            visual_embeds: embeddings in place of both.
            visual_samples: the number of samples that the frames belong to; None: the rows of the batch.
            given: what positions are computed from, by name: grids, token types, times.
        """
        # A data loader gives empty pixels where no rank has any.
        pixels: Any = tuple(
            None if x is not None and not len(x) and given[grid] is None else x
            for x, grid in zip((images, videos), GRIDS, strict=True)
        )
        config, ids, past = self.model.config, text["input_ids"], text["cache"]
        rows = text["inputs_embeds"] if ids is None else ids
        frames = next((x for x in (visual_embeds, *pixels) if x is not None), None)
        if frames is not None and ids is not None and past is not None and past.get_seq_length():
            if not bool(((ids == config.image_token_id) | (ids == config.video_token_id)).any()):
                frames, visual_embeds, pixels = None, None, (None, None)  # those of earlier tokens
        tensors = (*pixels, visual_embeds)
        return QwenVLInputs(
            **text,
            frames=frames,
            frames_are_features=visual_embeds is not None,
            pixels_and_features=visual_embeds is not None and pixels != (None, None),
            compared_tensors={}
            if frames is None
            else compared_tensors(
                config, self.model.get_input_embeddings(), rows, tensors, text["visual_shard"], given
            ),
            pixels=pixels,
            merge=self.merge,
            samples=visual_samples or (1 if rows is None else rows.shape[0]),
            packs_by_positions=self.packs_by_positions,
            rotary=functools.partial(self.rotary_positions, given),
        )

    def model_output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: QwenVLInputs) -> Any:
        if inputs.use_cache and (not inputs.past_length or inputs.frames is not None):
            self._store_offsets(cache_of(out), inputs)
        return super().model_output(out, features, inputs)


class Qwen2_5_VLFamily(QwenVLFamily):
    """Qwen2.5-VL. Its layers may have windows of two kinds, so its decoder takes one mask for each."""

    name = "Qwen2.5-VL"
    model_class = "Qwen2_5_VLForConditionalGeneration"

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        second_per_grid_ts: Any = None,
        visual_embeds: Tensor | None = None,
        visual_samples: int | None = None,
    ) -> QwenVLInputs:
        given = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        given |= {"mm_token_type_ids": mm_token_type_ids, "second_per_grid_ts": second_per_grid_ts}
        return self.inputs_of(text, pixel_values, pixel_values_videos, visual_embeds, visual_samples, given)


class Qwen3VLFamily(QwenVLFamily):
    """Qwen3-VL, with deepstack."""

    name = "Qwen3-VL (dense)"
    model_class = "Qwen3VLForConditionalGeneration"
    packs_by_positions = True

    def inputs(
        self,
        text: dict[str, Any],
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        visual_embeds: Tensor | None = None,
        visual_samples: int | None = None,
    ) -> QwenVLInputs:
        given = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        given |= {"mm_token_type_ids": mm_token_type_ids}
        return self.inputs_of(text, pixel_values, pixel_values_videos, visual_embeds, visual_samples, given)
