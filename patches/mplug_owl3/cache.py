"""What mPLUG-Owl3 keeps with a cache beside the frames' K and V: which rows see which frames.

The native model keeps the same in a layer of its own (`VisualCache`), which its `generate` looks at; a patched model
keeps both up, so that either continues the other's caches on one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.transformers.cache import SequenceParallelCacheState, cache_state
from mllm_seqpar.integrations.transformers.family import Family
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs
from mllm_seqpar.integrations.transformers.passes import run_pass
from mllm_seqpar.models.cache_rows import attach, detach
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.models.mplug_owl3.visual_inputs import VisualCache, visual_cache
from mllm_seqpar.runtime.visual_features import VisualKVCache


@dataclass(frozen=True)
class Note:
    """Which row sees which frames, counted from the text token `row_offset` of the cache.

    `inclusive`: whether a placeholder sees its own frame.
    """

    layout: MediaLayout
    row_offset: int
    inclusive: bool


class MediaLayoutCache(Family):
    """The part of the family that is about caches."""

    def cropped(self, note: Note | None, past: int) -> Note | None:
        """The layout of the text that is left."""
        return (
            None if note is None else replace(note, layout=note.layout.cropped(past - note.row_offset, note.inclusive))
        )

    def adopt(self, cache: Any, beside: SequenceParallelCacheState) -> None:
        """Take over the native model's K and V of frames, which are those of one process; refuse them on several."""
        cached = visual_cache(cache)
        if cached is None:
            return
        if self.context.comm.size > 1:
            raise ConfigError(
                "past_key_values holds K and V of frames that the unpatched model computed, all of them on this rank; "
                "continue it with the unpatched model, or begin with a new cache"
            )
        kept = VisualKVCache.given(cached.states, cached.layout.total_frames, cached.tokens_per_frame)
        beside.keep(kept, Note(cached.layout, cached.row_offset, cached.inclusive), 0)
        beside.rows, beside.seen = cached.rows, cached.frame_fingerprints


def run_with_native_cache(family: Family, inputs: ForwardInputs, logits_to_keep: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a pass and keeps up what the native `generate` looks at: the layout of the prompt, beside the cache."""
    cache: Any = inputs.past_key_values
    cached = visual_cache(cache)
    if cached is not None and inputs.past_length <= cached.row_offset:
        detach(cache, VisualCache)  # of an earlier text, when the cache was reset, or cropped to before it
        beside = cache_state(cache)
        if beside is not None:
            beside.kept = beside.note = None
    out = run_pass(family, inputs, logits_to_keep, kwargs)
    cache = out.past_key_values
    beside = None if cache is None else cache_state(cache)
    if beside is not None and beside.kept is not None and beside.kept.total_frames:
        note, cached = beside.note, visual_cache(cache)
        if cached is None:
            tokens = beside.kept.tokens_per_unit
            cached = VisualCache(
                note.layout, row_offset=note.row_offset, tokens_per_frame=tokens, inclusive=note.inclusive
            )
            attach(cache, cached, family.text_config.num_hidden_layers)
            cached.states, cached.frame_fingerprints = beside.kept.states, beside.seen
            cached.is_complete = family.context.comm.size == 1
        cached.layout = note.layout
    return out
