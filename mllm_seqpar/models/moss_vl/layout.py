"""Where the frames of MOSS-VL are in the text, what rows attend to, and the rotary positions of text and frames.

A frame is an image, or one frame of a video; its placeholder is one `<|image_pad|>` of the text. A frame of h x w
merged patches has h * w + 1 visual tokens, the last of which is the separator. A counter p gives all positions (time,
height, width). An ordinary token has p on all axes, and increases it by 1. Before the placeholder of a frame, the
visual token (y, x) has (p, p + y, p + x), and p increases by max(h, w); then separator and placeholder have p on all
axes.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, sample after sample, V visual tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import MaskError, ShapeError
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.sharding import Spans, take_spans


@dataclass(frozen=True, kw_only=True)
class MossVLLayout(MediaLayout):
    """The frames that each text token attends to, and the positions of text and frames.

    `frame_position` has the first position of each frame, that of its first visual token.

    Attributes:
        positions: (3, B, L) int64, the positions of the text; 0 at padding.
        sizes: (F, 2) int64, height and width of each frame in merged patches.
        begin: (B, 1) int64, the position that follows those of the text before.
    """

    positions: Tensor
    sizes: Tensor
    begin: Tensor

    @property
    def tokens(self) -> Tensor:
        """(F,) the number of visual tokens of each frame, with the separator."""
        return self.sizes.prod(1) + 1

    @property
    def end(self) -> int:
        """The number of tokens of the text up to the last of this layout."""
        return self.past_length + self.positions.shape[2]

    def following(self) -> Tensor:
        """Return (B, 1), the position of the first token after this text that is not padding."""
        return torch.maximum(self.positions.amax((0, 2))[:, None] + 1, self.begin)

    def visual_positions(self, frames: Spans | None = None) -> Tensor:
        """Return (V, 3) int32, time, height and width of each visual token of some frames (None: all)."""
        sizes, position = self.sizes.int(), self.frame_position.int()
        if frames is not None:
            sizes, position = take_spans(sizes, frames), take_spans(position, frames)
        counts = sizes.prod(1, dtype=torch.int32) + 1
        frame = torch.arange(len(sizes), device=sizes.device, dtype=torch.int32).repeat_interleave(counts)
        number = torch.arange(len(frame), device=sizes.device, dtype=torch.int32) - (counts.cumsum(0) - counts)[frame]
        height, width = sizes[frame].unbind(1)
        first, is_separator = position[frame], number == height * width
        last = torch.where(is_separator, torch.maximum(height, width), 0)
        row, column = (torch.where(is_separator, last, x) for x in (number // width, number % width))
        return torch.stack([first + last, first + row, first + column], 1).int()

    def followed_by(self, later: "MossVLLayout", rows: Tensor, between: Tensor) -> "MossVLLayout":
        """Return the layout of this text, which has no frames, and of a later one with the first frames.

        Row b of the later text continues row ``rows[b]`` of this one. `between` (B, tokens) bool has the tokens between
        the two, False at padding.
        """
        positions = self.positions[:, rows]
        counted = count_positions(self.following()[rows], between).expand(3, -1, -1)
        before = later.sample_range[:, :1].expand(-1, later.past_length - self.past_length)
        return replace(
            later,
            first=torch.cat([before, later.first], 1),
            stop=torch.cat([before, later.stop], 1),
            positions=torch.cat([positions, counted, later.positions], 2),
            past_length=self.past_length,
            begin=self.begin[rows],
        )

    def cropped(self, length: int, inclusive: bool = True) -> "MossVLLayout":
        kept = replace(self, positions=self.positions[:, :, : max(0, length - self.past_length)])
        return MediaLayout.cropped(kept, length, inclusive)  # type: ignore[return-value]


def real_tokens(attention_mask: Any, batch: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return (B, stop - start) bool, False at padding, of a part of the text.

    Args:
        attention_mask: (B, tokens so far), 0 at padding; of None and of masks in other forms, no token is padding.
        batch: B.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, start:stop].to(device) != 0
    return torch.ones(batch, stop - start, dtype=torch.bool, device=device)


def count_positions(begin: Tensor, real: Tensor, extent: Tensor | int = 0) -> Tensor:
    """Return (B, L), the positions of tokens of which the first has `begin` (B, 1); 0 at padding.

    Args:
        real: (B, L) bool, False at padding.
        extent: (B, L), how many positions a frame takes before its placeholder, or 0 without frames.
    """
    step = real.long()
    return (begin + (step + extent).cumsum(1) - step).masked_fill(~real, 0)


def frame_grids(grid_thw: Tensor, media: Sequence[int] | Tensor | None, batch: int) -> tuple[Tensor, list[int]]:
    """Return (F, 2), height and width in patches of each frame, and the number of frames of each sample.

    Args:
        grid_thw: (media, 3), frames, height and width of each medium in patches.
        media: the number of media of each sample; None for one sample. With beams, samples stand for several rows of
            the batch each.
        batch: B.

    Raises:
        ShapeError: the numbers do not fit together.
    """
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3 or bool((grid_thw < 1).any()):
        raise ShapeError(
            f"grid_thw has shape {tuple(grid_thw.shape)}; expected (media, 3), the frames, height and width of each "
            "image or video in patches, all above 0"
        )
    if media is None and batch != 1:
        raise ShapeError(
            f"media_nums_per_sample is missing for a batch of {batch}; pass the number of images and videos of each "
            "sample, as the processor returns it"
        )
    of_samples = [grid_thw.shape[0]] if media is None else torch.as_tensor(media).tolist()
    if sum(of_samples) != grid_thw.shape[0] or not of_samples or batch % len(of_samples):
        raise ShapeError(
            f"media_nums_per_sample is {of_samples} for {grid_thw.shape[0]} rows of grid_thw and a batch of {batch}; "
            "expected the number of images and videos of each sample"
        )
    counts = grid_thw[:, 0]
    by_sample = [int(part.sum()) for part in counts.split(of_samples)]
    return grid_thw[:, 1:].repeat_interleave(counts, 0), by_sample


def visible_frames(mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return first and stop (B, L), the range of frames of its sample that each row attends to.

    Args:
        mask: `cross_attention_mask`: (B, 1, rows, frames) bool, True where a frame is hidden, or (B, rows) integers,
            the number of frames that a row attends to, from the first one on. Rows after those of the mask attend as
            its last row.
        length: L.
    """
    if mask.dim() == 2 and not mask.is_floating_point() and mask.dtype != torch.bool:
        first, stop = torch.zeros_like(mask), mask
    elif mask.dim() == 4 and mask.shape[1] == 1 and mask.dtype == torch.bool:
        visible = ~mask[:, 0]
        count = visible.sum(2)
        first = visible.byte().argmax(2) if visible.shape[2] else count
        stop = first + count
        columns = torch.arange(visible.shape[2], device=mask.device)
        if bool((visible != ((first[..., None] <= columns) & (columns < stop[..., None]))).any()):
            raise MaskError(
                "cross_attention_mask has rows that attend to frames with hidden ones between them; expected the "
                "processor's mask, in which a row attends to the frames up to its place in the text"
            )
    else:
        raise MaskError(
            f"cross_attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected (batch, 1, tokens, "
            "frames) bool, True where a frame is hidden, or (batch, tokens) integers, the number of frames that a row "
            "attends to"
        )
    rows = first.shape[1]
    if not 0 < rows <= length:
        raise MaskError(f"cross_attention_mask has {rows} rows for a text of {length} tokens; pass one for each token")
    more = (first.shape[0], length - rows)
    return tuple(torch.cat([x, x[:, -1:].expand(more)], 1).long() for x in (first, stop))  # type: ignore[return-value]


def moss_vl_layout(
    *,
    batch: int,
    length: int,
    sizes: Tensor,
    frames: Sequence[int],
    placeholders: Tensor | None = None,
    attention_mask: Any = None,
    cross_attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_length: int = 0,
    begin: Tensor | None = None,
) -> MossVLLayout:
    """Return the layout of a text of which no token is in the cache, or which brings frames to its cache.

    Args:
        batch, length: B and L.
        sizes: (F, 2), height and width of each frame in merged patches.
        frames: the number of frames of each sample; it has one entry for each beam group if B is larger. A frame
            without a placeholder is hidden from every row, such as the blank image of a text without media.
        placeholders: (B, L) bool, the tokens `<|image_pad|>`; None: they follow from the mask.
        attention_mask: see `real_tokens`.
        cross_attention_mask: see `visible_frames`; None: every row attends to all frames of its sample. It may
            also have rows for the tokens in the cache, as `generate` passes it with the whole text.
        position_ids: (3, B, L) or (B, L), the positions of the text, if the caller states them. The frames of a
            placeholder then begin max(h, w) before it.
        past_length: the number of tokens in the cache.
        begin: (B, 1), the position that follows those of the text in the cache; None without one.

    Raises:
        ShapeError, MaskError: the arguments do not fit together.
    """
    device = sizes.device
    of_samples = torch.tensor(list(frames) or [0] * batch, device=device)
    beams = batch // max(1, len(of_samples))
    counts = of_samples.repeat_interleave(beams)
    starts = (of_samples.cumsum(0) - of_samples).repeat_interleave(beams)
    real = real_tokens(attention_mask, batch, past_length, past_length + length, device)
    first, stop = (starts[:, None].expand(batch, length) for _ in range(2))
    stop = stop + counts[:, None]
    prompt = length
    if cross_attention_mask is not None:
        if (samples := cross_attention_mask.shape[0]) != batch:
            raise MaskError(f"cross_attention_mask has {samples} samples and the text has {batch}; pass one for each")
        rows_dim = -2 if cross_attention_mask.dim() == 4 else -1
        if past_length and cross_attention_mask.shape[rows_dim] == past_length + length:  # of the whole text
            cross_attention_mask = cross_attention_mask.narrow(rows_dim, past_length, length)
        prompt = min(length, cross_attention_mask.shape[rows_dim])
        shown = (torch.minimum(x, counts[:, None]) for x in visible_frames(cross_attention_mask.to(device), length))
        first, stop = (starts[:, None] + x for x in shown)
    if placeholders is None:
        if cross_attention_mask is None and int(counts.sum()):
            raise ShapeError(
                "the places of the frames in the text are unknown: pass input_ids, or cross_attention_mask with "
                "inputs_embeds"
            )
        seen = (stop - starts[:, None]).cummax(1).values
        placeholders = torch.nn.functional.pad(seen, (1, 0)).diff(dim=1) > 0
        if bool((seen.diff(dim=1) > 1).any() | (seen[:, :1] > 1).any()):
            raise MaskError(
                "cross_attention_mask shows two more frames from one row to the next, so the places of the frames are "
                "unknown; pass input_ids"
            )
    placeholders = placeholders.to(device) & (torch.arange(length, device=device) < prompt)
    number = placeholders.long().cumsum(1) - 1  # of the sample's frames
    _check_placeholders(placeholders, counts)
    extents = torch.nn.functional.pad(sizes.amax(1), (0, 1)) if len(sizes) else sizes.new_zeros(1)
    frame = torch.where(placeholders, starts[:, None] + number, len(sizes))
    extent = extents[frame]
    begin = torch.zeros(batch, 1, dtype=torch.long, device=device) if begin is None else begin.to(device)
    if position_ids is None:
        positions = count_positions(begin, real, extent).expand(3, -1, -1)
    else:
        positions = position_ids.to(device).expand(3, batch, length)
        _check_one_sequence(positions[0], real)
    position = torch.zeros(len(sizes), dtype=torch.long, device=device)
    position[frame[placeholders]] = (positions[0] - extent)[placeholders]
    return MossVLLayout(
        first=first,
        stop=stop,
        frame_position=position,
        sample_range=torch.stack([starts, stop[:, -1] if length else starts], 1),
        past_length=past_length,
        positions=positions,
        sizes=sizes,
        begin=begin,
    )


def _check_one_sequence(positions: Tensor, real: Tensor) -> None:
    if bool(((positions.diff(dim=1) < 0) & real[:, 1:] & real[:, :-1]).any()):
        raise ShapeError(
            "position_ids begin again within a text, as those of packed sequences do, and MOSS-VL does not separate "
            "them; pass one sequence in each row (packing=False, padding_free=False), and leave position_ids out"
        )


def _check_placeholders(placeholders: Tensor, counts: Tensor) -> None:
    placed = placeholders.sum(1)
    if bool((placed > counts).any()):
        raise ShapeError(
            f"the texts have {placed.tolist()} placeholders <|image_pad|>, and frames {counts.tolist()} were passed; "
            "each needs a frame: pass pixel_values, grid_thw and media_nums_per_sample as the processor returns them"
        )
