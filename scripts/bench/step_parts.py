"""Which calls of which modules are which part of a training step, for each family, patched and unpatched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from step_clock import REST, Clock, timed_calls, timed_transfers

from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.visual_features import RecomputedKV

CROSS, SELF, VISION, TRANSFERS, AVERAGING = "cross", "self", "vision", "transfers", "averaging"
PARTS = (CROSS, SELF, VISION, TRANSFERS, AVERAGING, REST)
Calls = list[tuple[Any, str, str]]


def idefics(model: Any) -> Calls:
    """Tower and resampler; blocks between layers."""
    decoder = model.model
    return [
        (decoder.vision_model, "forward", VISION),
        (decoder.perceiver_resampler, "forward", VISION),
        *((block.cross_attn, "forward", CROSS) for block in decoder.gated_cross_attn_layers),
        *((layer.self_attn, "forward", SELF) for layer in decoder.layers),
    ]


def open_flamingo(model: Any) -> Calls:
    """Tower and perceiver; blocks in front of layers."""
    layers = model.lang_encoder._get_decoder_layers()
    return [
        (model.vision_encoder, "forward", VISION),
        (model.perceiver, "forward", VISION),
        *((layer.gated_cross_attn_layer.attn, "forward", CROSS) for layer in layers if layer.gated_cross_attn_layer),
        *((layer.decoder_layer.self_attn, "forward", SELF) for layer in layers),
    ]


def mllama(model: Any) -> Calls:
    """Tower and projector; layers with cross-attention in the place of self-attention."""
    layers = model.model.language_model.layers
    return [
        (model.model.vision_model, "forward", VISION),
        (model.model.multi_modal_projector, "forward", VISION),
        *((layer.cross_attn, "forward", CROSS) for layer in layers if hasattr(layer, "cross_attn")),
        *((layer.self_attn, "forward", SELF) for layer in layers if hasattr(layer, "self_attn")),
    ]


def mplug_owl3(model: Any) -> Calls:
    """Tower and projector; the visual part of hyper attention is taken out of the self-attention it lies in."""
    attentions = [layer.self_attn for layer in model.language_model.model.layers]
    hyper = [attention for attention in attentions if hasattr(attention, "v_kv_proj")]
    return [
        (model, "encode_frames", VISION),
        *((attention, "forward", SELF) for attention in attentions),
        *((attention, name, CROSS) for attention in hyper for name in ("visual_states", "_attend_frames")),
    ]


FAMILIES: dict[str, Callable[[Any], Calls]] = {
    "idefics": idefics,
    "open_flamingo": open_flamingo,
    "mllama": mllama,
    "mplug_owl3": mplug_owl3,
}


@contextmanager
def timed(family: str, model: Any, clock: Clock) -> Iterator[None]:
    """The parts of this model are timed inside, patched or not."""
    patch = patch_of(model)
    with timed_calls(clock, FAMILIES[family](model)):
        if patch is None:
            yield
            return
        with timed_transfers(clock, patch.context.comm, TRANSFERS), _visual_part(clock):
            yield


@contextmanager
def _visual_part(clock: Clock) -> Iterator[None]:
    """A patched layer's attention to frames, for the family whose self-attention it lies in; a part of a part."""
    unpatched = ForwardState.attend

    @functools.wraps(unpatched)
    def attend(self: ForwardState, q: Any, sources: Any, scale: float) -> Any:
        if not any(isinstance(source, RecomputedKV) for source in sources):
            return unpatched(self, q, sources, scale)
        return clock.timed(CROSS, lambda q: unpatched(self, q, sources, scale))(q)

    ForwardState.attend = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        ForwardState.attend = unpatched  # type: ignore[method-assign]
