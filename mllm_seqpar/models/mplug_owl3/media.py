"""Which text token sees which frames: both published forms of `media_offset`, brought into one form.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, sample after sample.

A frame belongs to a place in the text, its placeholder. The published generations differ in whether the placeholder's
first token itself sees the frame, in the position that rotates the frame's keys, and in how `media_offset` says all
this. After this module they do not differ any more: a row of text sees the half-open interval of frames [first, stop).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, ShapeError

from .configuration import GATES

MediaOffset = Tensor | list[Tensor] | list[list[int]]
"""Either published form; models of all generations take both.

- (B, L, 2) integers (240728, 241014): the index of the sample's first frame, and that plus the number of placeholders
  that start strictly before the token; -1000000 for a sample without images.
- Per sample, the positions of its placeholders (241101 and later); also as an integer tensor (B, N) whose rows are
  filled up with negative numbers.
"""


@dataclass(frozen=True, kw_only=True)
class MediaLayout:
    """What each text token sees, and where each frame lies.

    Attributes:
        first: (B, L) int64, the first frame a row sees, a global number in the flat list of frames.
        stop: (B, L) int64, one past the last; stop <= first: the row sees none.
        frame_position: (F,) int64, the position that rotates the keys of each frame.
        sample_range: (B, 2) int64, the frames [start, end) of each sample; later rows (decoding) see all of them.
    """

    first: Tensor
    stop: Tensor
    frame_position: Tensor
    sample_range: Tensor

    @property
    def total_frames(self) -> int:
        """Number of frames of all samples."""
        return self.frame_position.shape[0]

    def rows(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """(first, stop), each (B, length), of the tokens from `start` on; later ones see their whole sample."""
        known = max(0, min(self.first.shape[1] - start, length))
        first, stop = (
            torch.cat([part[:, start : start + known], edge[:, None].expand(-1, length - known)], dim=1)
            for part, edge in zip((self.first, self.stop), self.sample_range.unbind(1), strict=True)
        )
        return first, stop

    def cropped(self, length: int, inclusive: bool) -> "MediaLayout":
        """The layout once the text was cut to `length` tokens: later rows see the frames that are left.

        Args:
            length: from the first token on; a longer text is left unchanged.
            inclusive: whether a placeholder sees its own frame.
        """
        if length >= self.first.shape[1]:
            return self
        start, stop = self.sample_range.unbind(1)
        left = start if length <= 0 else self.stop[:, length - 1 if inclusive else length]
        left = torch.minimum(torch.maximum(left, start), stop)
        first, stop = (bound[:, : max(length, 0)] for bound in (self.first, self.stop))
        return replace(self, first=first, stop=stop, sample_range=torch.stack([start, left], dim=1))

    def repeat_samples(self, times: int) -> "MediaLayout":
        """The layout of a batch in which each sample stands `times` times (beams), all sharing the sample's frames."""
        if times == 1:
            return self
        first, stop, sample_range = (
            part.repeat_interleave(times, dim=0) for part in (self.first, self.stop, self.sample_range)
        )
        return replace(self, first=first, stop=stop, sample_range=sample_range)


def media_layout(
    gate: str | None,
    *,
    total_frames: int,
    input_ids: Tensor | None = None,
    image_token_id: int | None = None,
    media_offset: MediaOffset | None = None,
    position_ids: Tensor | None = None,
) -> MediaLayout:
    """Return which rows see which frames, by the rules of the generation that has this gate.

    Args:
        gate: `config.gate`. With a gate, a placeholder does not see its own frame, and the frame's keys are rotated by
            the position of the first token that sees it. Without one, both are the placeholder's.
        total_frames: frames of all samples.
        input_ids: (B, L); without it `media_offset` and `position_ids` are needed.
        image_token_id: the placeholder token. Ignored when `media_offset` is given.
        media_offset: where the frames are.
        position_ids: (B, L) or (1, L), the rotary positions of the text; 0, 1, 2, ... when None.

    Raises:
        ConfigError: unknown gate, or nothing says where the frames are.
        ShapeError: placeholders and frames do not fit each other, or `media_offset` does not fit the text or frames.
    """
    if gate not in GATES:
        raise ConfigError(f"gate is {gate!r}; expected one of {GATES}")
    positions = _positions(input_ids, position_ids, media_offset)
    if media_offset is None:
        if input_ids is not None and image_token_id is not None:
            placeholders = (input_ids == image_token_id).to(positions.device)
            _check_count(placeholders, total_frames)
        elif total_frames == 0:
            placeholders = torch.zeros_like(positions, dtype=torch.bool)
        else:
            raise ConfigError(
                "nothing says which tokens stand for frames: pass media_offset, or for a tokenizer with a token for "
                "<|image|> set config.image_token_id and pass input_ids"
            )
    elif isinstance(media_offset, Tensor) and media_offset.dim() == 3:
        first, stop, sample_range = _checked_offsets(media_offset, positions, total_frames)
        if gate is not None:
            at = _first_rows(first, stop, sample_range, positions, total_frames)
            return MediaLayout(first=first, stop=stop, frame_position=at, sample_range=sample_range)
        placeholders = _placeholders_of(first, stop, sample_range, total_frames)
    else:
        placeholders = _marks(media_offset, positions)
        _check_count(placeholders, total_frames)
    return _from_placeholders(gate, placeholders, positions)


def _positions(input_ids: Tensor | None, position_ids: Tensor | None, media_offset: MediaOffset | None) -> Tensor:
    """(B, L) int64 rotary positions."""
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
    found = int(placeholders.sum())
    if found == total_frames:
        return
    per_sample = placeholders.sum(1).tolist()
    if total_frames == 0:
        raise ShapeError(
            f"the text has placeholders for {found} frames (by sample: {per_sample}), and neither pixel_values nor "
            "image_embeds was passed: pass the frames, or take the placeholders out"
        )
    raise ShapeError(
        f"the text has placeholders for {found} frames (by sample: {per_sample}), and {total_frames} were passed; "
        "each frame needs exactly one placeholder"
    )


def _marks(media_offset: MediaOffset, positions: Tensor) -> Tensor:
    """Return (B, L) bool, True at the placeholders' positions that `media_offset` lists."""
    batch, length = positions.shape
    if len(media_offset) != batch or (isinstance(media_offset, Tensor) and media_offset.dim() != 2):
        found = tuple(media_offset.shape) if isinstance(media_offset, Tensor) else f"{len(media_offset)} lists"
        raise ShapeError(
            f"media_offset has {found} for {batch} samples; expected one list of placeholder positions per sample, "
            "or (batch, length, 2) integers"
        )
    marked = torch.zeros_like(positions, dtype=torch.bool)
    for sample, listed in enumerate(media_offset):
        at = torch.as_tensor(listed, dtype=torch.long, device=positions.device).flatten()
        at = at[at >= 0]  # negative numbers fill a ragged tensor up
        if at.numel() and (int(at.max()) >= length or bool((at.diff() <= 0).any())):
            raise ShapeError(
                f"media_offset of sample {sample} is {at.tolist()}; placeholder positions rise and stay below {length}"
            )
        marked[sample, at] = True
    return marked


def _from_placeholders(gate: str | None, placeholders: Tensor, positions: Tensor) -> MediaLayout:
    counts = placeholders.sum(1)
    ends = counts.cumsum(0)
    starts = ends - counts
    seen = placeholders.long().cumsum(1)
    at = positions
    if gate is not None:  # the placeholder itself does not see its frame; the next token is the first that does
        seen = seen - placeholders.long()
        at = torch.cat([positions[:, 1:], positions[:, -1:] + 1], dim=1)
    return MediaLayout(
        first=starts[:, None].expand_as(positions),
        stop=starts[:, None] + seen,
        frame_position=at[placeholders],  # row-major order is the order of the flat list of frames
        sample_range=torch.stack([starts, ends], dim=1),
    )


def _checked_offsets(media_offset: Tensor, positions: Tensor, total_frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and stop, (B, L), and the frames of each sample, (B, 2), of (B, L, 2) offsets.

    As in the published code, the frames of a sample are those that its offsets reach. Samples may share frames (beams).
    """
    batch, length = positions.shape
    if media_offset.shape != (batch, length, 2):
        raise ShapeError(f"media_offset has shape {tuple(media_offset.shape)}; expected {(batch, length, 2)}")
    first, stop = media_offset.to(device=positions.device, dtype=torch.long).unbind(-1)
    sees = stop > first  # published as -1000000: the row sees nothing
    stop = torch.where(sees, stop, first)
    if bool(sees.any()) and (int(first[sees].min()) < 0 or int(stop[sees].max()) > total_frames):
        raise ShapeError(
            f"media_offset reaches from frame {int(first[sees].min())} to {int(stop[sees].max())} and {total_frames} "
            "frames were passed (frames of all samples, one after another)"
        )
    starts = torch.where(sees, first, total_frames).amin(1)
    ends = torch.where(sees, stop, 0).amax(1)
    starts = torch.minimum(starts, ends)  # (0, 0) for a sample that sees nothing
    frames = torch.arange(total_frames, device=positions.device)
    reached = ((starts[:, None] <= frames) & (frames < ends[:, None])).any(0)
    if not bool(reached.all()):
        unseen = frames[~reached].tolist()
        raise ShapeError(
            f"by media_offset, no token sees frame {unseen[0]} ({len(unseen)} of {total_frames} frames are unseen). "
            "Pass only the frames of this text, or the placeholders' positions of each sample as media_offset, which "
            "can also say that a placeholder is the last token"
        )
    return first, stop, torch.stack([starts, ends], dim=1)


def _first_rows(first: Tensor, stop: Tensor, sample_range: Tensor, positions: Tensor, total_frames: int) -> Tensor:
    """Return (F,) the position of the first token that sees each frame."""
    at = torch.zeros(total_frames, dtype=torch.long, device=positions.device)
    for sample, (start, end) in enumerate(sample_range.tolist()):
        reached = torch.where(stop[sample] > first[sample], stop[sample], 0).cummax(0).values
        rows = torch.searchsorted(reached, torch.arange(start, end, device=positions.device), right=True)
        at[start:end] = positions[sample][rows]
    return at


def _placeholders_of(first: Tensor, stop: Tensor, sample_range: Tensor, total_frames: int) -> Tensor:
    """Return (B, L) bool: a placeholder is the token before one that sees a frame more."""
    starts, ends = sample_range[:, :1], sample_range[:, 1:]
    count = torch.minimum(torch.maximum(stop, starts), ends) - starts
    more = count.diff(dim=1)
    ordered = sample_range[ends[:, 0] > starts[:, 0]].flatten()
    shared = bool((ordered.diff()[1::2] != 0).any())
    if bool((count[:, :1] != 0).any() | (more < 0).any() | (more > 1).any()) or shared:
        raise ShapeError(
            "media_offset of shape (batch, length, 2) does not say where each frame's placeholder is, which a model "
            "without a gate needs; pass the placeholders' positions of each sample"
        )
    placeholders = torch.nn.functional.pad(more > 0, (0, 1))
    _check_count(placeholders, total_frames)
    return placeholders
