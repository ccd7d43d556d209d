"""Visibility of frames for text tokens: both published forms of `media_offset` are converted to `MediaLayout`.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, sample after sample.

Each frame has a placeholder in the text. The published generations differ in whether the placeholder's first token
attends to the frame, in the position that rotates the frame's keys, and in the form of `media_offset`. `MediaLayout` is
common to all of them: a row of text attends to the half-open interval of frames [first, stop).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, ShapeError, require_one_of, require_shape
from mllm_seqpar.models.cache import ONE_PROCESS, SequenceParallelCacheState, cache_state_of

from .configuration import GATES

MediaOffset = Tensor | list[Tensor] | list[list[int]]
"""Either published form; models of all generations accept both.

- (B, L, 2) integers (240728, 241014): the index of the sample's first frame, and that index plus the number of
  placeholders that start strictly before the token; -1000000 for a sample without images.
- The positions of each sample's placeholders (241101 and later); also as an integer tensor (B, N) padded with negative
  numbers.
"""


@dataclass(frozen=True, kw_only=True)
class MediaLayout:
    """The frames that each text token attends to, and the rotary position of each frame.

    Attributes:
        first: (B, L) int64, the first frame that a row attends to, as an index of the flat list of frames.
        stop: (B, L) int64, one past the last; a row with stop <= first attends to no frame.
        frame_position: (F,) int64, the position that rotates the keys of each frame.
        sample_range: (B, 2) int64, the frames [start, end) of each sample; rows after the layout (decoding) attend to
            all.
        past_length: the number of tokens in the cache before the first row.
    """

    first: Tensor
    stop: Tensor
    frame_position: Tensor
    sample_range: Tensor
    past_length: int = 0

    @property
    def total_frames(self) -> int:
        return self.frame_position.shape[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the layout by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def to(self, device: torch.device | str) -> "MediaLayout":
        """Return the layout with its tensors on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in self.tensors.items()}
        return replace(self, **moved)

    def rows(self, past_length: int, length: int) -> tuple[Tensor, Tensor]:
        """Return first and stop, (B, length) each, of the `length` tokens that follow `past_length` others.

        Tokens after the layout attend to all frames of their sample.
        """
        start = past_length - self.past_length
        known = max(0, min(self.first.shape[1] - start, length))
        low, high = [edge[:, None].expand(-1, length - known) for edge in self.sample_range.unbind(1)]
        first, stop = [part[:, start : start + known] for part in (self.first, self.stop)]
        return torch.cat([first, low], dim=1), torch.cat([stop, high], dim=1)

    def cropped(self, length: int, inclusive: bool) -> "MediaLayout":
        """Return the layout of the first `length` tokens; later rows attend to the frames of the remaining text.

        `inclusive` says whether a placeholder attends to its own frame. A layout that is not longer is returned
        unchanged.
        """
        length -= self.past_length
        if length >= self.first.shape[1]:
            return self
        start, stop = self.sample_range.unbind(1)
        end = start if length <= 0 else self.stop[:, length - 1 if inclusive else length]
        end = torch.minimum(torch.maximum(end, start), stop)
        first, stop = (bound[:, : max(length, 0)] for bound in (self.first, self.stop))
        return replace(self, first=first, stop=stop, sample_range=torch.stack([start, end], dim=1))

    def repeat_samples(self, times: int) -> "MediaLayout":
        """Return the layout of a batch that repeats each sample `times` times (beams); repetitions share the frames."""
        if times == 1:
            return self
        repeated = {name: getattr(self, name).repeat_interleave(times, 0) for name in ("first", "stop", "sample_range")}
        return replace(self, **repeated)


def cached_frames(cache: Any) -> SequenceParallelCacheState | None:
    """Return the state of a cache that has frames, or None."""
    state = cache_state_of(cache)
    return state if state is not None and state.frames is not None else None


def brings_frames(known: bool, input_ids: Tensor | None, image_token_id: int | None) -> bool:
    """Return whether the frames of a pass follow those of its cache; otherwise they are those, repeated.

    They do if the cache does not have them, or if the text of the pass has placeholders.
    """
    placed = input_ids is not None and image_token_id is not None and bool((input_ids == image_token_id).any())
    return not known or placed


def continue_layout(state: SequenceParallelCacheState, past_length: int, inclusive: bool) -> None:
    """Crop the frames of a cache that the native model continues, and their layout; see `crop_layout`."""
    state.crop_to(past_length)
    crop_layout(state, past_length, inclusive)
    state.continue_in(ONE_PROCESS)


def crop_layout(state: SequenceParallelCacheState, past_length: int, inclusive: bool) -> None:
    """Crop the layout of a cache to the `past_length` tokens that are still in it.

    The frames are removed if the text that they came with is no longer in the cache, which was reset or cropped.
    `inclusive` says whether a placeholder attends to its own frame.
    """
    layout = state.frame_facts
    if layout is None:
        return
    if past_length <= layout.past_length:
        state.drop_frames()
    else:
        state.frame_facts = layout.cropped(past_length, inclusive)


def check_layout(layout: MediaLayout, batch: int, total_frames: int) -> None:
    """Raise ShapeError unless the layout is for that many samples and frames."""
    samples, frames = layout.first.shape[0], layout.total_frames
    if (samples, frames) != (batch, total_frames):
        raise ShapeError(
            f"media_layout is for {samples} samples and {frames} frames; the call has {batch} samples and "
            f"{total_frames} frames"
        )


def media_layout(
    gate: str | None,
    *,
    total_frames: int,
    input_ids: Tensor | None = None,
    image_token_id: int | None = None,
    media_offset: MediaOffset | None = None,
    position_ids: Tensor | None = None,
) -> MediaLayout:
    """Return the layout by the rules of the generation that has this gate.

    Args:
        gate: `config.gate`. With a gate, a placeholder does not attend to its own frame, and the frame's keys are
            rotated by the position of the first token that attends to it. Without a gate, a placeholder attends to its
            own frame, and the keys are rotated by the placeholder's position.
        input_ids: (B, L); without it, `media_offset` and `position_ids` are required.
        image_token_id: the placeholder token; ignored if `media_offset` is given.
        position_ids: (B, L) or (1, L), the rotary positions of the text; 0, 1, 2, ... if None.

    Raises:
        ConfigError: unknown gate, or the arguments do not determine the positions of the frames.
        ShapeError: the number of placeholders is not that of frames, or `media_offset` does not fit text or frames.
    """
    require_one_of("gate", gate, GATES)
    positions = _positions(input_ids, position_ids, media_offset)
    if media_offset is None:
        if input_ids is not None and image_token_id is not None:
            placeholders = (input_ids == image_token_id).to(positions.device)
            _check_count(placeholders, total_frames)
        elif total_frames == 0:
            placeholders = torch.zeros_like(positions, dtype=torch.bool)
        else:
            raise ConfigError(
                "the positions of the frames are unknown: pass media_offset, or for a tokenizer with a token for "
                "<|image|> set config.image_token_id and pass input_ids"
            )
    elif isinstance(media_offset, Tensor) and media_offset.dim() == 3:
        first, stop, sample_range = _checked_offsets(media_offset, positions, total_frames)
        if gate is not None:
            frame_position = _first_visible_positions(first, stop, sample_range, positions, total_frames)
            return MediaLayout(first=first, stop=stop, frame_position=frame_position, sample_range=sample_range)
        placeholders = _placeholders_of_intervals(first, stop, sample_range, total_frames)
    else:
        placeholders = _placeholders_of_positions(media_offset, positions)
        _check_count(placeholders, total_frames)
    return _layout_of_placeholders(gate, placeholders, positions)


def _positions(input_ids: Tensor | None, position_ids: Tensor | None, media_offset: MediaOffset | None) -> Tensor:
    """Return (B, L) int64 rotary positions."""
    if input_ids is not None:
        batch, length, device = *input_ids.shape, input_ids.device
    elif position_ids is not None:
        batch = position_ids.shape[0] if media_offset is None else len(media_offset)
        length, device = position_ids.shape[-1], position_ids.device
    else:
        raise ShapeError("the text's length is unknown: pass input_ids or position_ids")
    if position_ids is None:
        position_ids = torch.arange(length, device=device)[None]
    if position_ids.shape not in ((batch, length), (1, length)):
        raise ShapeError(
            f"position_ids has shape {tuple(position_ids.shape)}; expected {(batch, length)} or {(1, length)}"
        )
    return position_ids.to(device=device, dtype=torch.long).expand(batch, length)


def _check_count(placeholders: Tensor, total_frames: int) -> None:
    placed = int(placeholders.sum())
    if placed == total_frames:
        return
    passed = f"{total_frames} were passed; each frame needs exactly one placeholder"
    if total_frames == 0:
        passed = "neither pixel_values nor image_embeds was passed: pass the frames, or remove the placeholders"
    by_sample = placeholders.sum(1).tolist()
    raise ShapeError(f"the text has placeholders for {placed} frames (by sample: {by_sample}), and {passed}")


def _placeholders_of_positions(media_offset: MediaOffset, positions: Tensor) -> Tensor:
    """Return (B, L) bool, True at the positions that `media_offset` lists."""
    batch, length = positions.shape
    if len(media_offset) != batch or (isinstance(media_offset, Tensor) and media_offset.dim() != 2):
        shape = tuple(media_offset.shape) if isinstance(media_offset, Tensor) else f"{len(media_offset)} lists"
        raise ShapeError(
            f"media_offset has {shape} for {batch} samples; expected one list of placeholder positions per sample, "
            "or (batch, length, 2) integers"
        )
    placeholders = torch.zeros_like(positions, dtype=torch.bool)
    for sample, listed in enumerate(media_offset):
        at = torch.as_tensor(listed, dtype=torch.long, device=positions.device).flatten()
        at = at[at >= 0]  # negative numbers are padding
        if at.numel() and (int(at.max()) >= length or bool((at.diff() <= 0).any())):
            raise ShapeError(
                f"media_offset of sample {sample} is {at.tolist()}; placeholder positions must be strictly ascending "
                f"and stay below {length}"
            )
        placeholders[sample, at] = True
    return placeholders


def _layout_of_placeholders(gate: str | None, placeholders: Tensor, positions: Tensor) -> MediaLayout:
    counts = placeholders.sum(1)
    ends = counts.cumsum(0)
    starts = ends - counts
    visible = placeholders.long().cumsum(1)
    if gate is not None:  # The token after the placeholder is the first that attends to the frame.
        visible = visible - placeholders.long()
        positions = torch.cat([positions[:, 1:], positions[:, -1:] + 1], dim=1)
    return MediaLayout(
        first=starts[:, None].expand_as(positions),
        stop=starts[:, None] + visible,
        frame_position=positions[placeholders],  # row-major order is the order of the flat list of frames
        sample_range=torch.stack([starts, ends], dim=1),
    )


def _checked_offsets(media_offset: Tensor, positions: Tensor, total_frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and stop, (B, L), and the frame range of each sample, (B, 2), from (B, L, 2) offsets.

    As in the published code, the offsets of a sample determine its frame range. Samples may share frames (beams).
    """
    batch, length = positions.shape
    require_shape("media_offset", media_offset.shape, samples=batch, tokens=length, bounds=2)
    first, stop = media_offset.to(device=positions.device, dtype=torch.long).unbind(-1)
    has_frames = stop > first  # published as -1000000 for rows without frames
    stop = torch.where(has_frames, stop, first)
    if bool(has_frames.any()):
        low, high = int(first[has_frames].min()), int(stop[has_frames].max())
        if low < 0 or high > total_frames:
            raise ShapeError(
                f"media_offset refers to frames {low} to {high}, but {total_frames} frames were passed (frames of all "
                "samples, one after another)"
            )
    starts = torch.where(has_frames, first, total_frames).amin(1)
    ends = torch.where(has_frames, stop, 0).amax(1)
    starts = torch.minimum(starts, ends)  # (0, 0) for a sample without frames
    frames = torch.arange(total_frames, device=positions.device)
    visible = ((starts[:, None] <= frames) & (frames < ends[:, None])).any(0)
    if not bool(visible.all()):
        invisible = frames[~visible].tolist()
        raise ShapeError(
            f"by media_offset, no token attends to frame {invisible[0]} ({len(invisible)} of {total_frames} frames "
            "are not visible). Pass only the frames of this text, or pass the placeholders' positions of each sample "
            "as media_offset, which also allow a placeholder as the last token"
        )
    return first, stop, torch.stack([starts, ends], dim=1)


def _first_visible_positions(
    first: Tensor, stop: Tensor, sample_range: Tensor, positions: Tensor, total_frames: int
) -> Tensor:
    """Return (F,), the position of the first token that attends to each frame."""
    frame_position = torch.zeros(total_frames, dtype=torch.long, device=positions.device)
    for sample, (start, end) in enumerate(sample_range.tolist()):
        last_stop = torch.where(stop[sample] > first[sample], stop[sample], 0).cummax(0).values
        rows = torch.searchsorted(last_stop, torch.arange(start, end, device=positions.device), right=True)
        frame_position[start:end] = positions[sample][rows]
    return frame_position


def _placeholders_of_intervals(first: Tensor, stop: Tensor, sample_range: Tensor, total_frames: int) -> Tensor:
    """Return (B, L) bool: a placeholder precedes each token that attends to one frame more than the token before it."""
    starts, ends = sample_range[:, :1], sample_range[:, 1:]
    count = torch.minimum(torch.maximum(stop, starts), ends) - starts
    increase = count.diff(dim=1)
    ordered = sample_range[ends[:, 0] > starts[:, 0]].flatten()
    shared = bool((ordered.diff()[1::2] != 0).any())
    if bool((count[:, :1] != 0).any() | (increase < 0).any() | (increase > 1).any()) or shared:
        raise ShapeError(
            "media_offset of shape (batch, length, 2) does not determine where each frame's placeholder is, which a "
            "model without a gate needs; pass the placeholders' positions of each sample"
        )
    placeholders = torch.nn.functional.pad(increase > 0, (0, 1))
    _check_count(placeholders, total_frames)
    return placeholders
