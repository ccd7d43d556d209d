"""The share of attention that each frame receives while a patched model generates an answer.

This module is the interface. `runtime.attention_record` defines and computes the shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.attention_record import AttentionRecord


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
        output: what `generate` returned; None from `RecordedAttention.result`.
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


class RecordedAttention:
    """The attention of the answer that was generated last within `record_attention`."""

    def __init__(self, record: AttentionRecord) -> None:
        self._record = record

    def result(self) -> FrameAttention:
        """Return the attention over frames. Every rank of the model's group calls this; it is one gather.

        Raises:
            ConfigError: no answer about frames was generated.
        """
        with torch.no_grad():
            shares = self._record.shares()
        return FrameAttention(frames=shares.frames, text=shares.text, visible=shares.visible)


@contextmanager
def record_attention(model: nn.Module) -> Iterator[RecordedAttention]:
    """Record the attention over frames of each `generate` within this context. Read `result()` within it too.

    The generated tokens do not change. Each pass stores the queries of one row, H * D elements for each cross-attention
    layer and token. Every rank of the model's group enters the context.

    Args:
        model: patched by `patch_model`.

    Raises:
        ConfigError: the model is not patched, or its attention is being recorded already. Within the context, by
            `generate`: several samples, beams, assisted generation, or no cache.
    """
    patch = patch_of(model)
    if patch is None:
        raise ConfigError("record_attention: the model is not patched; call patch_model(model) first")
    records = patch.context.records
    if records:
        raise ConfigError("record_attention: the attention of this model is being recorded already; use that record")
    record = AttentionRecord(patch.context.comm)
    records.append(record)
    try:
        yield RecordedAttention(record)
    finally:
        records.clear()
        record.begin_answer()  # it refers to K of the frames


def attention_over_frames(model: nn.Module, *args: Any, **kwargs: Any) -> FrameAttention:
    """Generate an answer, and return the share of attention that each frame receives for each of its tokens.

    Args:
        model: patched by `patch_model`. Every rank of its group calls this.
        *args, **kwargs: the arguments of `model.generate`, of one sample.

    Returns:
        The attention (tokens, frames), with the output of `generate` as `output`.

    Raises:
        ConfigError: as for `record_attention`.
    """
    with record_attention(model) as recorded:
        output = model.generate(*args, **kwargs)  # type: ignore[operator]
        found = recorded.result()
    return FrameAttention(frames=found.frames, text=found.text, visible=found.visible, output=output)
