"""Which text token sees which frames: the published ways to say it, brought into one form.

Shape legend: B samples, L text tokens, F frames of all samples in one flat list, sample after sample.

Both published variants mark each frame by one placeholder token in the text. They differ in whether the placeholder
itself sees its frame, in the position that rotates the frame's keys, and in how `media_offset` says all this. After
this module they do not differ any more: a row of text sees the half-open interval of frames [first, stop).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, ShapeError

MediaOffset = Tensor | list[Tensor] | list[list[int]]
"""As published: (B, L, 2) integers (gated), or the placeholders' positions of each sample (fused; taken by both)."""


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
    variant: str,
    *,
    total_frames: int,
    input_ids: Tensor | None = None,
    image_token_id: int | None = None,
    media_offset: MediaOffset | None = None,
    position_ids: Tensor | None = None,
) -> MediaLayout:
    """Brings placeholders, or a published `media_offset`, into the one form the model works with.

    Args:
        variant: "gated" or "fused".
        total_frames: frames of all samples.
        input_ids: (B, L); without it `media_offset` and `position_ids` are needed.
        image_token_id: the placeholder token; not needed with `media_offset`.
        media_offset: as published for the variant; computed from the placeholders when None. Both variants take the
            fused one's form, and it also as an integer tensor (B, N) whose rows are filled up with negative numbers.
        position_ids: (B, L) or (1, L), the rotary positions of the text; 0, 1, 2, ... when None.

    Raises:
        ConfigError: unknown variant, or no way to tell the placeholders.
        ShapeError: placeholders and frames do not fit each other, or `media_offset` does not fit the text or frames.
    """
    if variant not in ("gated", "fused"):
        raise ConfigError(f"variant is {variant!r}; it is 'gated' or 'fused'")
    positions = _positions(input_ids, position_ids, media_offset)
    placeholders = None
    if input_ids is not None and image_token_id is not None:
        placeholders = (input_ids == image_token_id).to(positions.device)
    if media_offset is None:
        if placeholders is None:
            if total_frames == 0:
                return _from_placeholders(variant, torch.zeros_like(positions, dtype=torch.bool), positions)
            raise ConfigError(
                "cannot tell which tokens stand for frames: set config.image_token_id and pass input_ids, or pass "
                "media_offset"
            )
        _check_count(placeholders, total_frames)
        return _from_placeholders(variant, placeholders, positions)
    if not (isinstance(media_offset, Tensor) and media_offset.dim() == 3):
        marked = _marks(media_offset, positions)
        _check_count(marked, total_frames)
        return _from_placeholders(variant, marked, positions)
    if variant == "fused":
        raise ShapeError(
            f"media_offset has shape {tuple(media_offset.shape)}, which is the gated variant's form; the fused variant "
            "takes the placeholders' positions of each sample"
        )
    return _from_offsets(media_offset, positions, total_frames, placeholders)


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
    """(B, L) bool, True at the placeholders that a fused `media_offset` lists."""
    batch, length = positions.shape
    if len(media_offset) != batch or (isinstance(media_offset, Tensor) and media_offset.dim() != 2):
        found = tuple(media_offset.shape) if isinstance(media_offset, Tensor) else f"{len(media_offset)} lists"
        raise ShapeError(
            f"media_offset has {found} for {batch} samples; expected one list of placeholder positions per sample, "
            "or for the gated variant (batch, length, 2) integers"
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


def _from_placeholders(variant: str, placeholders: Tensor, positions: Tensor) -> MediaLayout:
    counts = placeholders.sum(1)
    ends = counts.cumsum(0)
    starts = ends - counts
    seen = placeholders.long().cumsum(1)
    at = positions
    if variant == "gated":  # the placeholder itself does not see its frame; the next token is the first that does
        seen = seen - placeholders.long()
        at = torch.cat([positions[:, 1:], positions[:, -1:] + 1], dim=1)
    return MediaLayout(
        first=starts[:, None].expand_as(positions),
        stop=starts[:, None] + seen,
        frame_position=at[placeholders],  # row-major order is the order of the flat list of frames
        sample_range=torch.stack([starts, ends], dim=1),
    )


def _from_offsets(
    media_offset: Tensor, positions: Tensor, total_frames: int, placeholders: Tensor | None
) -> MediaLayout:
    """The layout of the gated variant's published (B, L, 2) offsets."""
    batch, length = positions.shape
    if media_offset.shape != (batch, length, 2):
        raise ShapeError(
            f"media_offset has shape {tuple(media_offset.shape)}; the gated variant takes integers of shape "
            f"{(batch, length, 2)}"
        )
    first, stop = media_offset.to(device=positions.device, dtype=torch.long).unbind(-1)
    stop = torch.where(stop < 0, first, stop)  # published as -1000000: the row sees nothing
    sees = stop > first
    if total_frames < int(torch.where(sees, stop, 0).max()) or bool((sees & (first < 0)).any()):
        raise ShapeError(
            f"media_offset reaches from frame {int(first[sees].min())} to {int(stop[sees].max())} and {total_frames} "
            "frames were passed (frames of all samples, one after another)"
        )
    counts = None if placeholders is None else placeholders.sum(1).tolist()
    sample_range = _sample_ranges(first, sees, counts, total_frames)
    frame_position = torch.zeros(total_frames, dtype=torch.long, device=positions.device)
    for sample, (start, end) in enumerate(sample_range):
        reached = torch.where(sees[sample], stop[sample], 0).cummax(0).values
        row = torch.searchsorted(reached, torch.arange(start, end, device=positions.device), right=True)
        after = positions[sample, -1:] + 1  # of a frame that only later tokens see
        frame_position[start:end] = torch.cat([positions[sample], after])[row]
    return MediaLayout(
        first=first,
        stop=stop,
        frame_position=frame_position,
        sample_range=torch.tensor(sample_range, dtype=torch.long, device=positions.device).reshape(batch, 2),
    )


def _sample_ranges(first: Tensor, sees: Tensor, counts: list[int] | None, total_frames: int) -> list[tuple[int, int]]:
    """Frames [start, end) of each sample: up to where the next sample's begin. Samples may share frames (beams)."""
    starts: list[int | None] = []
    for sample in range(first.shape[0]):
        has_frames = bool(sees[sample].any()) if counts is None else counts[sample] > 0
        seen = first[sample][sees[sample]]
        start = int(seen.min() if seen.numel() else first[sample].max())
        starts.append(start if has_frames else None)
    edges = sorted({start for start in starts if start is not None} | {total_frames})
    following = dict(zip(edges, [*edges[1:], total_frames], strict=True))
    ranges = [(0, 0) if begin is None else (begin, following[begin]) for begin in starts]
    if edges[0] != 0:
        raise ShapeError(f"media_offset begins with frame {edges[0]}; the frames before it belong to no sample")
    for sample, (begin, end) in enumerate(ranges):
        if counts is not None and counts[sample] != end - begin:
            raise ShapeError(
                f"sample {sample} has {counts[sample]} placeholders; media_offset gives it frames {begin} to {end}"
            )
    return ranges
