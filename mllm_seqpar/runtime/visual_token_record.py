"""The attention that a row of a decoder-only model pays to the visual tokens of each frame.

Frames are tokens of the text here, so their K are sharded with the text's, and one frame's may be on several ranks.
Each rank adds up the softmax probability on the keys that it has, as soon as a layer has computed its attention:

    share of a frame = mean over layers and heads of    sum over the visible keys j of the frame of    exp(s_hj - lse_h)

with s and lse as in `attention_record`. A decoding step then reads K twice in place of once, and nothing is kept but
one number per frame. If every rank has all keys, each computes every n-th layer. The sum over ranks is taken once, for
all tokens of an answer.

Shape legend: V visual tokens of the text so far, K keys of this rank, H query heads, G KV heads, D head dim, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.keys import GivenKeys, Keys
from mllm_seqpar.comm import Communicator

SCORES = 1 << 24
"""Scores that are computed at once: 64 MiB in float32."""


@dataclass(frozen=True)
class FrameTokens:
    """Which tokens of a text are visual, and of which frame; on the CPU.

    Attributes:
        samples, positions, frames: (V,) int64: the sample, the position in the text, and the number of the frame.
        total: the number of frames.
    """

    samples: Tensor
    positions: Tensor
    frames: Tensor
    total: int

    @classmethod
    def none(cls) -> FrameTokens:
        """Return those of a text without frames."""
        empty = torch.zeros(0, dtype=torch.long)
        return cls(empty, empty, empty, 0)

    def before(self, length: int) -> FrameTokens:
        """Return the visual tokens among the first `length` tokens of the text, and the frames that have some."""
        kept = (self.positions < length).nonzero().flatten()
        frames = self.frames[kept]
        return FrameTokens(self.samples[kept], self.positions[kept], frames, int(frames.max()) + 1 if len(kept) else 0)

    def followed_by(self, later: FrameTokens, length: int, rows: Tensor) -> FrameTokens | None:
        """Return these with those of a text behind `length` tokens, in which row b continues the sample ``rows[b]``.

        None: several rows continue one sample, and their frames cannot be told apart by sample.
        """
        if rows.unique().numel() < rows.numel():
            return None
        return FrameTokens(
            torch.cat([self.samples, rows[later.samples]]),
            torch.cat([self.positions, later.positions + length]),
            torch.cat([self.frames, later.frames + self.total]),
            self.total + later.total,
        )

    def of_sample(self, sample: int) -> FrameTokens:
        """Return the visual tokens of one sample; frames keep their numbers."""
        kept = (self.samples == sample).nonzero().flatten()
        return FrameTokens(self.samples[kept], self.positions[kept], self.frames[kept], self.total)


class TokenRowRecorder:
    """Adds up the attention of one row of each layer of one pass to the keys of this rank.

    Args:
        comm: the group.
        frames: the visual tokens of the row's sample.
        keys: (K,) the positions in the text of the keys that this rank has; on the CPU. None: every rank has all.
        last: the position of the row in the text.
        row: the row of the tensors on this rank; None if another rank has it.
        length: the number of tokens of the pass.
        sharded: whether only one rank has the row.
        valid: (tokens,) bool, the tokens that may be attended to, on any device; None: all.
    """

    def __init__(
        self,
        comm: Communicator,
        frames: FrameTokens,
        keys: Tensor | None,
        last: int,
        row: int | None,
        length: int,
        sharded: bool,
        valid: Tensor | None,
    ) -> None:
        self.length, self.total_frames = length, frames.total
        self._comm, self._frames, self._keys, self._last, self._row = comm, frames, keys, last, row
        self._sharded = sharded
        self._valid = None if valid is None else valid.cpu()
        self._slots: dict[tuple[int | None, int], Tensor] = {}
        self._windows: set[int | None] = set()
        self._layers, self._sum = 0, torch.zeros(frames.total)

    def add(self, q: Tensor, keys: Sequence[Keys], lse: Tensor | None, scale: float) -> None:
        """Add the shares of a layer, given q (1, H, s, D) and the final lse (1, H, s), or None if the keys are all."""
        (each,) = keys
        assert isinstance(each, GivenKeys), "a decoder-only model attends to its text"
        number = self._layers
        self._layers += 1
        self._windows.add(each.window)
        wide = torch.promote_types(torch.float32, q.dtype)
        total: Tensor | None
        if self._sharded:
            assert lse is not None, "sharded rows have a log-sum-exp"
            stored = q.new_zeros(q.shape[1], q.shape[3] + 1, dtype=wide)
            if self._row is not None:
                stored = torch.cat([q[0, :, self._row].to(wide), lse[0, :, self._row, None].to(wide)], 1)
            stored = self._comm.all_reduce(stored, "evidence")  # all ranks but one have zeros
            row, total = stored[:, :-1], stored[:, -1:]
        elif self._keys is None and number % self._comm.size != self._comm.rank:
            return
        else:
            row, total = q[0, :, -1].to(wide), None if lse is None else lse[0, :, -1:].to(wide)
        slots = self._slot_of_keys(each, q.device)
        scores = _scores(row, each.k[0], scale).masked_fill(slots > self.total_frames, -torch.inf)
        total = scores.logsumexp(1, keepdim=True) if total is None else total
        shares = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)).mean(0)
        found = shares.new_zeros(self.total_frames + 2).index_add_(0, slots, shares)
        self._sum = found[: self.total_frames] + self._sum.to(found)

    def shares(self) -> Tensor:
        """Return (F,), the mean over layers of the probability on the keys of this rank."""
        return self._sum / max(1, self._layers)

    def visible_frames(self) -> Tensor:
        """Return (F,) bool, on every rank the same: whether some layer lets the row attend to some token of a frame."""
        positions, found = self._frames.positions, torch.zeros(self.total_frames, dtype=torch.bool)
        window = None if None in self._windows else max((w for w in self._windows if w is not None), default=None)
        found[self._frames.frames[self._is_visible(positions, window)]] = True
        return found

    def _slot_of_keys(self, keys: GivenKeys, device: torch.device) -> Tensor:
        """Return (K,): the frame of each key, F for a key of words, F + 1 for a key that the row does not attend to."""
        count = keys.k.shape[2]
        name = keys.window, count
        if name not in self._slots:
            positions = self._keys
            if positions is None:  # a window's cache has the last keys only
                positions = torch.arange(self._last + 1 - count, self._last + 1)
            table = torch.full((self._last + 1,), self.total_frames)
            table[self._frames.positions] = self._frames.frames
            visible = self._is_visible(positions, keys.window)
            slots = torch.where(visible, table[positions.clamp(max=self._last)], self.total_frames + 1)
            self._slots[name] = copy_to_device(slots, device)
        return self._slots[name]

    def _is_visible(self, positions: Tensor, window: int | None) -> Tensor:
        visible = positions <= self._last
        if window is not None:
            visible &= positions > self._last - window
        if self._valid is not None:
            visible &= self._valid[positions.clamp(max=self._last)]
        return visible


def _scores(row: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return (H, K), given q (H, D) of a row and k (G, K, D); KV heads are not expanded."""
    groups, count, dim = k.shape
    rows, step = row.unflatten(0, (groups, -1)), max(1, SCORES // max(1, groups * dim))
    parts = [k[:, first : first + step].to(row.dtype) for first in range(0, count, step)]
    found = [torch.matmul(rows, part.transpose(1, 2)) for part in parts]
    return torch.cat(found, -1).flatten(0, 1) * scale if found else row.new_zeros(row.shape[0], 0)
