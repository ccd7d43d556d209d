"""The state of a pass whose attention to frames is recorded; other passes contain no trace of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_seqpar.attention.decode import merge_over_ranks
from mllm_seqpar.attention.joint import KeySource, attend
from mllm_seqpar.kernels.merge import merge

from .attention_record import RowRecorder
from .forward_state import ForwardState


@dataclass(frozen=True)
class RecordingState(ForwardState):
    """A `ForwardState` that passes the queries and log-sum-exps of cross-attention to `recorder`.

    The results are those of `ForwardState`, in all bits.
    """

    recorder: RowRecorder | None = None

    def record(self, q: Tensor, k: Tensor, lse: Tensor | None, scale: float, *, jointly: bool = False) -> None:
        """Record a layer; the arguments are those of `RowRecorder.add`."""
        assert self.recorder is not None
        self.recorder.add(q, k, lse, scale, jointly=jointly)

    def attend(self, q: Tensor, sources: Sequence[KeySource], scale: float) -> Tensor:
        comm, config = self.context.comm, self.context.config
        o, lse = attend(q, sources, comm=comm, scale=scale, kernel=config.kernel, recompute=config.recompute_attention)
        assert self.recorder is not None
        self.recorder.add_sources(q, sources, lse, scale)
        return o

    def attend_cached_frames(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        lse = None
        if self._offloads or self.context.comm.size > 1:
            o, lse = self.attend_replicated(q, k, v, scale)
        else:
            o = super().attend_cached_frames(q, k, v, scale)
        self.record(q, k, lse, scale)
        return o

    def attend_text_and_frames(
        self,
        q: Tensor,
        text: tuple[Tensor, Tensor],
        frames: tuple[Tensor, Tensor],
        scale: float,
        window: int | None = None,
        *,
        jointly: bool,
    ) -> tuple[Tensor, Tensor]:
        on_text = self._cached_text_partial(q, *text, scale, window)
        on_frames = self._cached_frames_partial(q, *frames, scale)
        if jointly:
            o, lse = merge_over_ranks(*merge(on_text, on_frames), self.context.comm)
            text_o = frames_o = o
        else:
            o, lse = (torch.cat(pair) for pair in zip(on_text, on_frames, strict=True))
            o, lse = merge_over_ranks(o, lse, self.context.comm)
            (text_o, frames_o), (_, lse) = o.chunk(2), lse.chunk(2)
        self.record(q, frames[0], lse, scale, jointly=jointly)
        return text_o, frames_o
