"""The attention that the tokens of an answer pay to each frame.

A token of an answer is the result of one row: the last row of the prompt for the first token, and the row of the token
before it for every other. Let s_hj be the scaled score of the row's query and key j in head h of a layer, and lse_h the
log-sum-exp over all keys that the row attends to, on all ranks. The share of a frame is

    share = mean over layers and heads of    sum over the visible keys j of the frame of    exp(s_hj - lse_h)

which is the softmax probability on the keys of the frame, before any gate. KV heads are not expanded.

Cross-attention: while an answer is generated, a pass stores only the queries of its row and their log-sum-exp, which
the merge over ranks computes anyway. The shares are computed after the answer, on the rank that holds the frame, and
gathered once. K of a layer is then read once for all tokens, also from host memory.

Decoder-only models: frames are tokens of the text, so their K are sharded with the text's, and one frame's may be on
several ranks. Each rank adds up the probability on the keys that it has, as soon as a layer has computed its attention.
A decoding step then reads K twice in place of once, and nothing is kept but one number per frame. If every rank has all
keys, each computes every n-th layer. The sum over ranks is taken once, for all tokens of an answer.

Shape legend: T tokens of the answer, H query heads, G KV heads, D head dim, U mask units of this rank, F frames, V
visual tokens of the text so far, K keys of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.attention.keys import GivenKeys, Keys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.transformers.passes import Pass
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.text import Rows
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from mllm_seqpar.runtime.visual_tokens import FrameTokens
from mllm_seqpar.sharding import FrameSizes, in_frame_order, span_length, take_spans

SCORES = 1 << 24
"""Scores that are computed at once: 64 MiB in float32."""


@dataclass(kw_only=True, eq=False)
class TokenRowRecorder:
    """Adds up the attention of one row of each layer of one pass to the keys of this rank."""

    comm: Communicator
    frames: FrameTokens  # the visual tokens of the row's sample
    keys: Tensor | None  # (K,) the positions in the text of the keys of this rank, on the CPU; None: it has all
    last: int  # the position of the row in the text
    row: int | None  # the row of the tensors on this rank; None if another rank has it
    length: int  # tokens of the pass
    sharded: bool  # whether only one rank has the row
    valid: Tensor | None  # (tokens,) bool, the tokens that may be attended to; None: all

    def __post_init__(self) -> None:
        self.total_frames = self.frames.total
        self.valid = None if self.valid is None else self.valid.cpu()
        self._slots: dict[tuple[int | None, int], Tensor] = {}
        self._windows: set[int | None] = set()
        self._layers, self._sum = 0, torch.zeros(self.total_frames)

    def add(self, q: Tensor, keys: Sequence[Keys], lse: Tensor | None, scale: float) -> None:
        """Add the shares of a layer, given q (1, H, s, D) and the final lse (1, H, s), or None if the keys are all."""
        (each,) = keys
        assert isinstance(each, GivenKeys), "a decoder-only model attends to its text"
        number = self._layers
        self._layers += 1
        self._windows.add(each.window)
        wide = torch.promote_types(torch.float32, q.dtype)
        self._sum = self._sum.to(q.device, wide)  # also where no layer of this rank adds to it: all ranks are summed
        total: Tensor | None
        if self.sharded:
            assert lse is not None, "sharded rows have a log-sum-exp"
            stored = q.new_zeros(q.shape[1], q.shape[3] + 1, dtype=wide)
            if self.row is not None:
                stored = torch.cat([q[0, :, self.row].to(wide), lse[0, :, self.row, None].to(wide)], 1)
            stored = self.comm.all_reduce(stored, "evidence")  # all ranks but one have zeros
            row, total = stored[:, :-1], stored[:, -1:]
        elif self.keys is None and number % self.comm.size != self.comm.rank:
            return
        else:
            row, total = q[0, :, -1].to(wide), None if lse is None else lse[0, :, -1:].to(wide)
        slots = self._slot_of_keys(each, q.device)
        scores = _scores(row, each.k[0], scale).masked_fill(slots > self.total_frames, -torch.inf)
        total = scores.logsumexp(1, keepdim=True) if total is None else total
        shares = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)).mean(0)
        found = shares.new_zeros(self.total_frames + 2).index_add_(0, slots, shares)
        self._sum += found[: self.total_frames]

    def shares(self) -> Tensor:
        """Return (F,), the mean over layers of the probability on the keys of this rank."""
        return self._sum / max(1, self._layers)

    def visible_frames(self) -> Tensor:
        """Return (F,) bool, on every rank the same: whether some layer lets the row attend to some token of a frame."""
        positions, found = self.frames.positions, torch.zeros(self.total_frames, dtype=torch.bool)
        window = None if None in self._windows else max((w for w in self._windows if w is not None), default=None)
        found[self.frames.frames[self._is_visible(positions, window)]] = True
        return found

    def _slot_of_keys(self, keys: GivenKeys, device: torch.device) -> Tensor:
        """Return (K,): the frame of each key, F for a key of words, F + 1 for a key that the row does not attend to."""
        count = keys.k.shape[2]
        name = keys.window, count
        if name not in self._slots:
            positions = self.keys
            if positions is None:  # a window's cache has the last keys only
                positions = torch.arange(self.last + 1 - count, self.last + 1)
            table = torch.full((self.last + 1,), self.total_frames)
            table[self.frames.positions] = self.frames.frames
            visible = self._is_visible(positions, keys.window)
            slots = torch.where(visible, table[positions.clamp(max=self.last)], self.total_frames + 1)
            self._slots[name] = copy_to_device(slots, device)
        return self._slots[name]

    def _is_visible(self, positions: Tensor, window: int | None) -> Tensor:
        visible = positions <= self.last
        if window is not None:
            visible &= positions > self.last - window
        if self.valid is not None:
            visible &= self.valid[positions.clamp(max=self.last)]
        return visible


def _scores(row: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return (H, K), given q (H, D) of a row and k (G, K, D); KV heads are not expanded."""
    groups, count, dim = k.shape
    rows, step = row.unflatten(0, (groups, -1)), max(1, SCORES // max(1, groups * dim))
    parts = [k[:, first : first + step].to(row.dtype) for first in range(0, count, step)]
    found = [torch.matmul(rows, part.transpose(1, 2)) for part in parts]
    return torch.cat(found, -1).flatten(0, 1) * scale if found else row.new_zeros(row.shape[0], 0)


class LayerRow(NamedTuple):
    """What one cross-attention layer stores of a row."""

    q: Tensor  # (H, D)
    k: Sequence[Tensor]  # (1, G, keys of this rank, D) of each part of the visual KV cache, which stores them
    lse: Tensor | None  # (H,), or None if the keys of this rank are all keys
    scale: float  # factor of q k^T
    jointly: bool  # whether the softmax also has keys of the text


@dataclass(kw_only=True, eq=False)
class RowRecorder:
    """Stores one row of each cross-attention layer of one pass."""

    cache: VisualKVCache  # K and V of the frames
    mask: FrameMask  # of all rows of the pass, (1, rows)
    row: int | None  # the row of the tensors on this rank; None if another rank has it
    length: int  # tokens of the pass
    sharded: bool  # whether only one rank has the row

    def __post_init__(self) -> None:
        self._layers: list[LayerRow] = []

    def add(self, q: Tensor, keys: Sequence[Keys], lse: Tensor | None, scale: float) -> None:
        """Store the row of a softmax over frames, given q (1, H, s, D) and the final lse (1, H, s) or None."""
        for each in keys:
            if each.spec.masks.keys_are_rows:
                continue
            if self.row is None:
                row, total = q.new_zeros(q.shape[1], q.shape[3]), None if lse is None else lse.new_zeros(q.shape[1])
            else:  # copies, so that the other rows can be freed
                row, total = q[0, :, self.row].clone(), None if lse is None else lse[0, :, self.row].clone()
            self._layers.append(LayerRow(row, each.stored, total, scale, len(keys) > 1))

    @property
    def total_frames(self) -> int:
        return self.cache.total_frames

    def visible_units(self) -> Tensor:
        """Return a bool for each unit of all ranks: whether the row attends to it."""
        return self.mask.take(torch.tensor([self.mask.shape[1] - 1])).table()[0, 0]

    def layers(self, comm: Communicator) -> list[LayerRow]:
        """Return the rows of all layers, on every rank."""
        if not self.sharded:
            return self._layers
        wide = torch.promote_types(torch.float32, self._layers[0].q.dtype)
        stored = []
        for layer in self._layers:
            assert layer.lse is not None, "a sharded pass has a log-sum-exp"
            stored.append(torch.cat([layer.q.to(wide), layer.lse.to(wide)[:, None]], dim=1))
        rows = comm.all_reduce(torch.stack(stored), "evidence")  # all ranks but one have zeros
        return [x._replace(q=row[:, :-1], lse=row[:, -1]) for x, row in zip(self._layers, rows, strict=True)]


AnyRecorder = RowRecorder | TokenRowRecorder
_CHANGED = "the frames changed while the answer was generated; pass the same frames to every token"


def _visible_tokens(mask: Any) -> Tensor | None:
    """Return (tokens,) bool, the tokens of the first sample that its last row may attend to; None: all."""
    mask = mask.get("full_attention") if isinstance(mask, dict) else mask  # prepared by `generate`
    if mask is None:
        return None
    row = mask[0] if mask.dim() == 2 else mask[0, 0, -1]
    return row == 0 if row.is_floating_point() else row.bool()


@dataclass(frozen=True, kw_only=True)
class FrameAttention:
    """The attention that the T tokens of an answer pay to the F frames of all ranks; the same on every rank.

    Attributes:
        frames: (T, F), float32 or wider, on the CPU: the softmax probability on the keys of a frame, before any gate,
            averaged over heads and the layers that attend to frames. 0 for a frame that the mask hides from a token.
            A frame of a decoder-only model is a temporal patch.
        text: (T,), the probability on the keys of the text, in models with one softmax over text and frames
            (decoder-only models, mPLUG-Owl3 without a gate); in other models 0.
        visible: (T, F) bool, the frames that the mask lets a token attend to.
        output: what `generate` returned; None from `AttentionRecord.result`.
    """

    frames: Tensor
    text: Tensor
    visible: Tensor
    output: Any = None

    def split(self, sizes: Sequence[int]) -> FrameAttention:
        """Return the attention to the images that each of the F frames consists of, equal parts of its own.

        `sizes` (F,) is how many images a frame has: two in a temporal patch of a decoder-only model.
        """
        if len(sizes) != self.frames.shape[1] or max(sizes, default=1) == 1:
            return self
        counts = torch.tensor(sizes)
        index = torch.arange(len(sizes)).repeat_interleave(counts)
        return replace(self, frames=(self.frames / counts)[:, index], visible=self.visible[:, index])

    @property
    def ranks_frames(self) -> bool:
        """Whether the mask lets some token attend to several frames, or there is only one frame."""
        return bool((self.visible.sum(1) > 1).any()) or self.visible.shape[1] == 1


class AttentionRecord:
    """The rows of the answer that is being generated, or was generated last, within `record_attention`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._passes: list[AnyRecorder] = []

    def begin_answer(self) -> None:
        """Forget the rows of an earlier answer."""
        self._passes = []

    def begin_rows(self, running: Pass, rows: Rows) -> AnyRecorder | None:
        """Return the recorder of the last row of a part of the rows of a pass; None if it has no frames.

        Raises:
            ConfigError: the pass has several samples, or beams, or is differentiated.
        """
        inputs, attended, cache_state = running.inputs, running.attended, running.cache_state
        assert cache_state is not None
        if attended is None and cache_state.frame_tokens is None:  # of a decoder-only model only
            return None
        # (B,) the sample that each row continues
        samples = cache_state.rows_of(inputs.batch) if attended is None else torch.arange(attended.mask.shape[0])
        if torch.is_grad_enabled():
            raise ConfigError("the attention over frames is recorded without gradients; use torch.no_grad()")
        if samples.numel() != 1:
            raise ConfigError(
                f"the attention over frames is recorded for one sample without beams; this pass has "
                f"{samples.numel()} rows of text; ask one question at a time"
            )
        positions = None if rows.text is None else rows.text.positions(self._comm.rank)
        last = inputs.length - 1 if attended is not None else inputs.past_length + inputs.length - 1
        row: int | None = -1
        if positions is not None:
            row = next(iter((positions == last).nonzero().flatten().tolist()), None)
        place: dict[str, Any] = {"row": row, "length": inputs.length, "sharded": positions is not None}
        recorder: AnyRecorder
        if attended is not None:
            assert isinstance(attended.source, VisualKVCache)
            recorder = RowRecorder(cache=attended.source, mask=attended.mask, **place)
        else:
            assert cache_state.frame_tokens is not None
            stored = None if cache_state.text_kv is None else cache_state.text_kv.positions
            recorder = TokenRowRecorder(
                comm=self._comm,
                frames=cache_state.frame_tokens.of_sample(int(samples[0])),
                keys=stored if positions is None else positions,
                last=last,
                valid=_visible_tokens(inputs.attention_mask),
                **place,
            )
        self._passes.append(recorder)
        return recorder

    @torch.no_grad()
    def result(self) -> FrameAttention:
        """Return the attention of the last answer over frames. Every rank of the group calls this; it is one gather.

        Raises:
            ConfigError: no answer about frames was generated. AgreementError: the ranks recorded different answers.
        """
        prompts = [number for number, one in enumerate(self._passes) if one.length > 1]
        passes = self._passes[prompts[-1] if prompts else 0 :]  # a prompt may be prefilled in several passes
        agree(self._comm, "attention over frames", lambda: {"tokens": len(passes)}, dict)
        of_tokens = [one for one in passes if isinstance(one, TokenRowRecorder)]
        if not passes or not passes[0].total_frames:
            raise ConfigError(
                "no attention over frames was recorded: within record_attention, generate an answer about frames with "
                "use_cache=True, then read the result"
            )
        if not of_tokens:
            return self._layer_shares([one for one in passes if isinstance(one, RowRecorder)])
        if len({one.total_frames for one in of_tokens}) > 1:
            raise ConfigError(_CHANGED)
        frames = torch.stack([one.shares() for one in of_tokens])  # on this rank's keys
        frames = (frames if self._comm.size == 1 else self._comm.all_reduce(frames, "evidence")).cpu()
        visible = torch.stack([one.visible_frames() for one in of_tokens])
        return FrameAttention(frames=frames, text=(1 - frames.sum(1)).clamp(min=0), visible=visible)

    def _layer_shares(self, passes: Sequence[RowRecorder]) -> FrameAttention:
        """Return the shares of the rows that the passes of a model with cross-attention have stored."""
        cache = passes[0].cache
        if any(one.cache is not cache for one in passes):
            raise ConfigError(_CHANGED)
        rows = [one.layers(self._comm) for one in passes]
        visible = torch.stack([one.visible_units() for one in passes])
        sizes = cache.sizes
        by_rank = [sizes.units(spans) for spans in cache.spans(self._comm.size)]
        if visible.shape[1] != cache.units:  # the mask is over frames
            visible = visible.repeat_interleave(torch.as_tensor(sizes.per_frame), dim=1)
        own = take_spans(visible, by_rank[self._comm.rank], dim=1)
        if not all(rows):
            raise ConfigError(
                "the family adapter of this model records no attention to frames; call ForwardState.frame_keys in it"
            )
        layers = [_unit_shares(list(layer), cache, own) for layer in zip(*rows, strict=True)]
        # (T, units of this rank) -> (T, units) of all ranks, in order, on the CPU
        most = max(map(span_length, by_rank))
        units = torch.nn.functional.pad(torch.stack(layers).mean(0), (0, most - own.shape[1]))
        parts = [units] if self._comm.size == 1 else self._comm.all_gather(units, "evidence")
        frames = _sum_units(in_frame_order([part.cpu() for part in parts], by_rank, dim=1), sizes)
        text = (1 - frames.sum(1)).clamp(min=0) if rows[0][0].jointly else frames.new_zeros(len(passes))
        return FrameAttention(frames=frames, text=text, visible=_sum_units(visible.float(), sizes) > 0)


def _sum_units(x: Tensor, sizes: FrameSizes) -> Tensor:
    """(T, units) -> (T, frames), summed over the units of each frame."""
    if not isinstance(sizes.per_frame, Tensor):
        return x.unflatten(1, (sizes.total, sizes.per_frame)).sum(-1)
    frame = torch.arange(sizes.total).repeat_interleave(sizes.per_frame)
    return x.new_zeros(x.shape[0], sizes.total).index_add_(1, frame, x)


def _unit_shares(rows: Sequence[LayerRow], cache: VisualKVCache, visible: Tensor) -> Tensor:
    """Return (T, U), the mean over heads of the probability on each unit of this rank, in one layer.

    `rows` are those of each token, and `visible` (T, U) bool the units that a token attends to.
    """
    k, scale = rows[0].k, rows[0].scale
    heads, units = rows[0].q.shape[0], visible.shape[1]
    wide = torch.promote_types(torch.float32, k[0].dtype)
    q = torch.stack([row.q for row in rows]).to(wide)
    hidden = ~visible.to(q.device)
    out = q.new_zeros(len(rows), units)
    step = max(1, SCORES // max(1, heads * units))
    for first in range(0, len(rows) if units else 0, step):
        block = slice(first, first + step)
        found = [x.masked_fill(hidden[block, span], -torch.inf) for span, x in _unit_lse(q[block], k, scale, cache)]
        unit_lse = torch.cat(found, dim=-1)  # (H, T, U)
        total = unit_lse.logsumexp(-1)  # (H, T)
        for token, row in enumerate(rows[block]):
            if row.lse is not None:
                total[:, token] = row.lse
        total = total.masked_fill(total == -torch.inf, 0.0)[..., None]  # a row without visible keys has shares of 0
        out[block] = torch.exp(unit_lse - total).mean(0)
    return out


def _unit_lse(q: Tensor, k: Sequence[Tensor], scale: float, cache: VisualKVCache) -> list[tuple[slice, Tensor]]:
    """Return, for spans of units, the log-sum-exp (H, T, units) of the scores of q (T, H, D) over each unit."""
    tokens, groups = cache.tokens_per_unit, k[0].shape[1]
    rows = q.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)  # (G, T * H / G, D): KV heads are not expanded
    step = max(1, SCORES // max(1, tokens * max(q.shape[0] * q.shape[1], groups * q.shape[2])))
    found = []
    for (first, _), (part,) in cache.chunks(k):
        for start in range(0, part.shape[2] // tokens, step):
            keys = part[0, :, start * tokens : (start + step) * tokens].to(device=q.device, dtype=q.dtype)
            scores = torch.matmul(rows, keys.transpose(1, 2)) * scale
            lse = scores.unflatten(-1, (-1, tokens)).logsumexp(-1)  # (G, T * H / G, units)
            lse = lse.unflatten(1, (q.shape[0], -1)).transpose(1, 2).flatten(0, 1)  # (H, T, units)
            found.append((slice(first + start, first + start + lse.shape[-1]), lse))
    return found
