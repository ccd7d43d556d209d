"""The arguments of a forward pass of Qwen2.5-VL or Qwen3-VL: which temporal patches it has, and where their tokens are.

Frames are counted in the order of their tokens in the text, whether they are of images or of videos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import FrameShard, ShapeError, sampled_bits
from mllm_seqpar.adapting.transformers import ForwardInputs, as_compared_tensors

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

    @cached_property
    def units(self) -> Tensor:
        """Return (F, 3) int64 on the CPU: kind (0 image, 1 video), height and width in patches of each frame."""
        sizes, starts = [torch.zeros(0, 3, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        kinds = self.on_host(TOKENS)
        beams = self.batch // max(1, self.samples)
        for kind, name in enumerate(GRIDS):
            grid = self.on_host(name)
            if grid is None or kinds is None or not self.has_frames(kind):
                continue
            found = torch.cat([torch.full_like(grid[:, :1], kind), grid[:, 1:]], 1).long()
            sizes.append(found.repeat_interleave(grid[:, 0].long(), 0))
            places = (kinds[::beams] == kind + 1).flatten().nonzero().flatten()
            tokens = self.tokens_of(sizes[-1])
            first = (
                tokens.cumsum(0) - tokens
            )  # beyond the text if it has too few tokens, which `media_position` reports
            places = torch.cat([places, places.new_full((1,), kinds.numel())])
            starts.append(places[first.clamp(max=places.numel() - 1)])
        return torch.cat(sizes)[torch.cat(starts).argsort(stable=True)]

    def tokens_of(self, units: Tensor) -> Tensor:
        """Return the number of tokens of each of `units`."""
        return units[:, 1] * units[:, 2] // self.merge**2

    @property
    def total_frames(self) -> int:
        return 0 if self.frames is None else self.units.shape[0]

    def rows_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the rows of the frames ``start <= f < stop``: of pixels of images and of videos, or of embeddings."""
        units = self.units[start:stop]
        if self.frames_are_features:
            return (int(self.tokens_of(units).sum()),)
        rows = units[:, 1] * units[:, 2]
        images = int(rows[units[:, 0] == 0].sum())
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
        kinds, units = self.on_host(TOKENS), self.units
        assert kinds is not None
        tokens, beams = self.tokens_of(units), self.batch // self.samples
        ends = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        numbers = torch.arange(int(ends[-1]))
        of_image = (units[:, 0] == 0).repeat_interleave(tokens)
        found = torch.full(kinds.shape, -1)
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
                found = torch.where(here, embeddings[index.clamp(max=embeddings.numel() - 1)], found)
        return found, ends

    @cached_property
    def positions(self) -> Tensor:
        """(4, B, L): positions in the text, and the rotary positions (time, height, width)."""
        counted = torch.arange(self.length, device=self.text.device)[None] + self.past_length
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
    found = as_compared_tensors(**given)
    if text is not None:
        ids = (config.image_token_id, config.video_token_id)
        if text.is_floating_point():  # embeddings: a placeholder is the embedding of its token
            rows = embed(torch.tensor(ids, device=text.device)).detach()
            kinds = [(text.detach() == row).all(-1) for row in rows]
        else:
            kinds = [text == token for token in ids]
        found[TOKENS] = kinds[0].to(torch.uint8) + 2 * kinds[1].to(torch.uint8)
    found["pixels that need gradients"] = torch.tensor([x is not None and x.requires_grad for x in frames])
    if shard is None and frames[0] is not None and frames[1] is not None:
        found["pixels of videos"] = sampled_bits(frames[1])
    return found
