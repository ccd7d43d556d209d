"""The part of mPLUG-Owl3's caches that belongs to the family: which rows may attend to which frames.

The native model stores the same in a cache layer of its own (`VisualCache`), which its `generate` reads. A patched
model keeps both up to date, so that on one process each of the two models can continue the caches of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mllm_seqpar.adapting import ConfigError
from mllm_seqpar.integrations.transformers.cache import SequenceParallelCacheState, cache_state_of
from mllm_seqpar.integrations.transformers.family import Family
from mllm_seqpar.integrations.transformers.inputs import ForwardInputs
from mllm_seqpar.integrations.transformers.passes import run_pass
from mllm_seqpar.models.cache_rows import attach, detach
from mllm_seqpar.models.mplug_owl3.media import MediaLayout
from mllm_seqpar.models.mplug_owl3.visual_inputs import VisualCache, visual_cache
from mllm_seqpar.runtime.frame_cache import VisualKVCache


@dataclass(frozen=True)
class FramePlacement:
    """Which frames each row may attend to; `inclusive`: a placeholder attends to its own frame."""

    layout: MediaLayout
    """The intervals of frames, for rows counted from text token `row_offset` of the cache; on the CPU."""
    row_offset: int
    inclusive: bool


class MediaLayoutCache(Family):
    """The methods of the family that concern caches."""

    def crop_placement(self, placement: FramePlacement | None, past_length: int) -> FramePlacement | None:
        if placement is None:
            return None
        kept = past_length - placement.row_offset
        return replace(placement, layout=placement.layout.cropped(kept, placement.inclusive))

    def adopt_cache(self, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Take over K and V of frames that the native model stored on one process; refuse them on several ranks."""
        native = visual_cache(cache)
        if native is None:
            return
        if self.context.comm.size > 1:
            raise ConfigError(
                "past_key_values holds K and V of frames that the unpatched model computed, all of them on this rank; "
                "continue it with the unpatched model, or begin with a new cache"
            )
        visual = VisualKVCache.given(native.states, native.layout.total_frames, native.tokens_per_frame)
        layout = native.layout.to("cpu")
        cache_state.store_frames(visual, FramePlacement(layout, native.row_offset, native.inclusive), 0)
        cache_state.rows, cache_state.frame_fingerprints = native.rows, native.frame_fingerprints


def run_with_native_cache(family: Family, inputs: ForwardInputs, logits_to_keep: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a pass, and keep the native `VisualCache` of the cache up to date."""
    cache: Any = inputs.past_key_values
    native = visual_cache(cache)
    if native is not None and inputs.past_length <= native.row_offset:
        # The cache was reset, or cropped to before the text that the frames came with.
        detach(cache, VisualCache)
        if (state := cache_state_of(cache)) is not None:
            state.visual = state.placement = None
    out = run_pass(family, inputs, logits_to_keep, kwargs)
    cache = out.past_key_values
    state = None if cache is None else cache_state_of(cache)
    if state is not None and state.visual is not None and state.visual.total_frames:
        placement, native = state.placement, visual_cache(cache)
        if native is None:
            options = {"row_offset": placement.row_offset, "inclusive": placement.inclusive}
            native = VisualCache(placement.layout, tokens_per_frame=state.visual.tokens_per_unit, **options)
            attach(cache, native, family.text_config.num_hidden_layers)
            native.states, native.frame_fingerprints = state.visual.states, state.frame_fingerprints
            native.is_complete = family.context.comm.size == 1
        native.layout = placement.layout
    return out
