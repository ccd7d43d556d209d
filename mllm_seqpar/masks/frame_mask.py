"""FrameMask: which frames each query row attends to, as intervals of frames."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import MaskError, ShapeError
from mllm_seqpar.sharding import FrameSizes, Spans, numbers_of_spans

from .block_masks import BlockMasks, HeldKeys
from .intervals import runs_of


class FrameMask:
    """Query rows against whole frames, in global frame numbers.

    In families whose frames have several mask units (image tiles), each unit counts as a frame here.

    Build it with `from_intervals` or `from_dense`. Its tensors live on the CPU, because masks are planned on the host,
    once for all layers. Only the interval of each row is copied to the device.

    Attributes:
        bounds: (K, 2, B, s_q) int64. In layer k, a row attends to the frames ``bounds[k, 0] <= f < bounds[k, 1]``.
        sizes: the number of keys of each frame.
    """

    def __init__(self, bounds: Tensor, sizes: FrameSizes) -> None:
        self.bounds, self.sizes = bounds, sizes
        self._by_group: dict[tuple[Hashable, tuple[Spans, ...]], tuple[int, BlockMasks]] = {}

    @classmethod
    def from_intervals(
        cls, first: Tensor, stop: Tensor, tokens_per_frame: int | Tensor, total_frames: int
    ) -> FrameMask:
        """Create a mask in which row (b, r) attends to the frames ``first[b, r] <= f < stop[b, r]``.

        A row with stop <= first attends to no frame.

        Args:
            first, stop: (B, s_q) integers, global frame numbers.
            tokens_per_frame: keys of one frame; or (total_frames,) integers, the keys of each.
            total_frames: frames of all ranks together.

        Raises:
            MaskError: wrong shapes or dtypes, or a row that attends to frames that do not exist.
        """
        tensors = isinstance(first, Tensor) and isinstance(stop, Tensor) and first.shape == stop.shape
        if not tensors or first.dim() != 2 or first.is_floating_point() or stop.is_floating_point():
            given = [
                f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in (first, stop)
            ]
            raise MaskError(
                f"FrameMask.from_intervals: first is {given[0]}, stop is {given[1]}; both must be tensors of integers "
                "of shape (batch, query rows)"
            )
        sizes = _sizes("from_intervals", tokens_per_frame, total_frames)
        first, stop = first.detach().long().cpu(), stop.detach().long().cpu()
        visible = stop > first
        if bool((visible & ((first < 0) | (stop > total_frames))).any()):
            raise MaskError(
                f"FrameMask.from_intervals: a row attends to frames {int(first[visible].min())} to "
                f"{int(stop[visible].max()) - 1}, but there are {total_frames} frames, numbered from 0"
            )
        bounds = torch.stack([first.masked_fill(~visible, 0), stop.masked_fill(~visible, 0)])
        return cls(bounds.unsqueeze(0), sizes)

    @classmethod
    def from_dense(cls, visible: Tensor, tokens_per_frame: int | Tensor) -> FrameMask:
        """Create a mask in which row (b, r) attends to frame f if ``visible[b, r, f]``.

        Attention is computed once for each run of frames that a row attends to, with at most as many calls of a kernel
        as the row with the most runs has.

        Args:
            visible: (B, s_q, F) bool, F = all frames of all ranks.
            tokens_per_frame: keys of one frame; or (F,) integers, the keys of each.

        Raises:
            MaskError: wrong shape or dtype.
        """
        if visible.dim() != 3 or visible.dtype is not torch.bool:
            raise MaskError(
                f"FrameMask.from_dense: visible is {tuple(visible.shape)} {visible.dtype}; "
                "it must be bool of shape (batch, query rows, frames of all ranks)"
            )
        sizes = _sizes("from_dense", tokens_per_frame, visible.shape[-1])
        return cls(runs_of(visible.detach().cpu()), sizes)

    @classmethod
    def joined(cls, masks: Sequence[FrameMask]) -> FrameMask:
        """Return the mask of the same rows over the frames of all these masks, one after the other."""
        sizes, before = masks[0].sizes.followed_by(*(mask.sizes for mask in masks[1:])), 0
        layers: list[tuple[Tensor, Tensor]] = []
        for mask in masks:
            for first, stop in mask.bounds:
                left = stop > first
                first, stop = first + before, stop + before
                for number, (low, high) in enumerate(layers):  # an interval that continues another one needs no layer
                    grows, free = left & (low < high) & (high == first), left & (low >= high)
                    layers[number] = torch.where(free, first, low), torch.where(grows | free, stop, high)
                    left = left & ~grows & ~free
                if not layers or bool(left.any()):
                    layers.append((first.masked_fill(~left, 0), stop.masked_fill(~left, 0)))
            before += mask.total_frames
        return cls(torch.stack([torch.stack(layer) for layer in layers]), sizes)

    @property
    def tokens_per_frame(self) -> int | Tensor:
        return self.sizes.per_frame

    @property
    def total_frames(self) -> int:
        return self.sizes.total

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, query rows)."""
        return self.bounds.shape[2], self.bounds.shape[3]

    def equals(self, other: FrameMask) -> bool:
        """Return whether both masks have the same entries."""
        return self.sizes == other.sizes and torch.equal(self.bounds, other.bounds)

    def take(self, rows: Tensor) -> FrameMask:
        """Return the mask of the rows with the given indices, (s,) int64, in that order."""
        return FrameMask(self.bounds[..., rows.cpu()], self.sizes)

    def table(self) -> Tensor:
        """Return (B, s_q, F) bool: which frames each row attends to."""
        frames = torch.arange(self.total_frames)
        first, stop = self.bounds.unsqueeze(-1).unbind(1)
        return ((first <= frames) & (frames < stop)).any(0)

    def any_frame_visible(self) -> Tensor:
        """Return (B, s_q) bool: True for rows that attend to any frame."""
        return (self.bounds[:, 0] < self.bounds[:, 1]).any(0)

    def gathered_digest(self, comm: Communicator, frames: Sequence[Spans]) -> int:
        """Return a checksum of the rows of all ranks that `blocks` keeps for these arguments; 0 if it keeps none.

        If the checksums of the ranks differ, the ranks keep rows of different calls: some ranks used a mask again,
        while others used a new one.
        """
        kept = self._by_group.get((comm.identity, tuple(frames)))
        return 0 if kept is None else kept[0]

    def blocks(
        self, comm: Communicator, frames: Sequence[Spans], *, layers: int | None = None, refresh: bool = False
    ) -> BlockMasks:
        """Return the masks of every block. This mask has this rank's rows; rank j holds the frames ``frames[j]``.

        The first call for a group gathers the rows of the other ranks and keeps them for all layers. `refresh` gathers
        them again. All ranks must do so if one of them has to, which the caller finds by `gathered_digest`. `layers` is
        the largest number of layers of bounds of any rank; None: all have as many.
        """
        key = (comm.identity, tuple(frames))
        if refresh or key not in self._by_group:
            missing = 0 if layers is None else layers - self.bounds.shape[0]
            bounds = torch.cat([self.bounds, self.bounds.new_zeros(missing, *self.bounds.shape[1:])]).int()
            gathered = [shard.cpu() for shard in comm.all_gather(bounds.to(comm.control_device), "mask")]
            digest = 1
            for shard in gathered:
                digest = zlib.crc32(shard.contiguous().view(torch.uint8).numpy().data, digest)
            blocks = frame_masks([FrameMask(shard.long(), self.sizes) for shard in gathered], frames)
            self._by_group[key] = max(digest, 1), blocks
        return self._by_group[key][1]


def mask_over_samples(
    visible: Tensor, tokens: int, units: int, rows: Tensor | None = None, prompt_batch: int | None = None
) -> FrameMask:
    """Return the mask over the units of all samples, given a table of the units of its sample that each row may attend
    to.

    Args:
        visible: (B, L, U) bool, over the units of the row's sample.
        units: units of all samples and ranks. With beams, B is a multiple of the number of samples, and the beams of a
            sample share its units.
        rows: (B,) for each row, the row of the frames' own pass that it continues; None if this is that pass.
        prompt_batch: rows of the frames' own pass; None: B.
    """
    visible = visible.detach().cpu()
    batch, length, per_sample = visible.shape
    prompt_batch = prompt_batch or batch
    samples = units // per_sample if per_sample else prompt_batch
    if per_sample and (units % per_sample or samples == 0 or prompt_batch % samples):
        raise ShapeError(
            f"{units} frames (or tiles) were passed for {prompt_batch} samples of the text, whose mask is for "
            f"{per_sample} each; expected {prompt_batch * per_sample}, or with beams those of the samples once"
        )
    offset = torch.arange(prompt_batch) // max(1, prompt_batch // samples) * per_sample
    offset = offset if rows is None else offset[rows]
    own = FrameMask.from_dense(visible, tokens).bounds
    return FrameMask(torch.where(own[:, 1:] > own[:, :1], own + offset[:, None], 0), FrameSizes(units, tokens))


def frame_masks(masks: Sequence[FrameMask], frames: Sequence[Spans]) -> BlockMasks:
    """Return the masks of every block: ``masks[i]`` has the rows of rank i, ``frames[j]`` the frames of rank j."""
    sizes, keys = masks[0].sizes, []
    for spans in frames:
        numbers = numbers_of_spans(spans)
        keys.append(HeldKeys(numbers, sizes.of(numbers)))
    return BlockMasks([mask.bounds for mask in masks], keys, prunable=True)


def _sizes(where: str, tokens: int | Tensor, frames: int) -> FrameSizes:
    problem = None
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 0:
        problem = f"frames={frames!r}; expected an integer of at least 0"
    elif isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.dtype is torch.bool or tokens.shape != (frames,):
            problem = f"tokens_per_frame is {tuple(tokens.shape)} {tokens.dtype}; expected ({frames},) integers"
        elif frames and int(tokens.min()) < 1:
            problem = f"tokens_per_frame has a frame of {int(tokens.min())} tokens; every frame needs at least 1"
    elif isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        problem = f"tokens_per_frame={tokens!r}; expected an integer of at least 1, or a tensor with one for each frame"
    if problem is not None:
        raise MaskError(f"FrameMask.{where}: {problem}")
    return FrameSizes(frames, tokens)
