"""The share of attention that each frame receives while a patched model generates an answer.

`runtime.attention_record` defines and computes the shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.attention_record import AttentionRecord, FrameAttention


@contextmanager
def record_attention(model: nn.Module) -> Iterator[AttentionRecord]:
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
        yield record
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
        return replace(recorded.result(), output=output)
