"""What a pass of a patched transformers model is made of, whatever kind it is: this rank's rows and its frames.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, F frames of all samples and ranks (f on this
rank). A frame is what one rank holds whole; it consists of `units_per_frame` units, which the mask speaks of.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.runtime.forward_state import ForwardState, FrameState, select_for_pass
from mllm_seqpar.runtime.text_shards import TextShards
from mllm_seqpar.runtime.visual_features import VisualFeatures, VisualKVCache
from mllm_seqpar.sharding import frame_bounds

from .checks import check_text, facts_of_call, refuse_unknown
from .family import Family, Visibility
from .inputs import ForwardInputs, require_same_inputs
from .star_attention import check_star
from .text_masks import whole_text_mask


def require_same_pass(family: Family, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
    """Raises on every rank unless all ranks can compute this pass, and pass the same to it."""

    def check() -> None:
        check_text(inputs)
        refuse_unknown(kwargs)
        check_star(family.context.config, inputs)
        family.check(inputs, kwargs)

    compared = family.model if family.context.compares_weights() else None
    facts = functools.partial(facts_of_call, family.model, inputs, kwargs, compared is not None)
    require_same_inputs(family.context.comm, inputs, check, compared, facts)


def passed_through(text: Tensor) -> Tensor:
    """An attention mask that transformers hands on as it is: in a sharded pass the call has its own."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=text.device)


def text_of(family: Family, inputs: ForwardInputs, call: ForwardState) -> tuple[Tensor, Tensor, Any]:
    """(embeds, positions, attention mask) of the rows that this rank computes."""
    ids, embeds, positions = inputs.input_ids, inputs.inputs_embeds, inputs.positions()
    mask: Any = whole_text_mask(inputs)
    if call.shards_text:
        assert call.text is not None
        positions = call.text.shard(positions, 1)
        ids, embeds = (None if x is None else call.text.shard(x, 1) for x in (ids, embeds))
        mask = passed_through(inputs.text)
    if embeds is None:
        assert ids is not None
        embeds = family.embed(ids)
    return embeds, positions, mask


def frames_of(
    family: Family,
    inputs: ForwardInputs,
    text: TextShards,
    features: Tensor | None,
    note: Any,
    kept: VisualKVCache | None = None,
) -> dict[str, Any]:
    """What a call of a pass with dealt text knows of the frames: `ForwardState`'s frames, rows, kept."""
    if features is None:
        return {}
    visual = shared(family, inputs, features)
    view = view_of(family, inputs, visual.total_frames, features.shape[1], inputs.total_frames, note)
    shards = FrameState.of(visual, view.mask, text, family.units_per_frame(inputs))
    if kept is None:
        shards = _as_chosen(family, inputs, text, shards)
    rows = view.rows
    if family.context.config.self_attention != "local":
        rows = {name: text.shard(x, 1) for name, x in rows.items()}
    return {"frames": shards, "rows": rows, "visual_cache": kept}


def _as_chosen(family: Family, inputs: ForwardInputs, text: TextShards, shards: FrameState) -> FrameState:
    """The frames of a pass, where "auto" or "replicate" settle before any layer runs how they go."""
    context, shape = family.context, family.cross_shape()
    if context.comm.size == 1:
        return shards
    if context.config.strategy == "auto" and shape is not None:
        shards = select_for_pass(context, shape, text, shards)
    if context.config.strategy == "replicate" or (shards.selection and shards.selection.strategy == "replicate"):
        shards = shards.gathered(context.comm, family.index(inputs, shards.visual.total_frames))
    return shards


def shared(family: Family, inputs: ForwardInputs, features: Tensor) -> VisualFeatures:
    """This rank's units; without frames, those of an empty one that rank 0 has."""
    per_frame, total = family.units_per_frame(inputs), max(1, inputs.total_frames)
    start, stop = frame_bounds(total, family.context.comm.size)[family.context.comm.rank]
    index = family.index(inputs, total * per_frame)[start * per_frame : stop * per_frame].to(features.device)
    return VisualFeatures(features, index, total * per_frame)


def view_of(family: Family, inputs: ForwardInputs, units: int, tokens: int, frames: int, note: Any) -> Visibility:
    """What all rows see of all units; of the empty frame that is there when there are no frames, nothing."""
    return family.view(inputs, units, tokens, note) if frames else family.empty_visibility(inputs, units, tokens)


def report(family: Family, inputs: ForwardInputs, held: int) -> None:
    """Logs once what this rank holds: `held` text tokens, and its frames."""
    comm = family.context.comm
    start, stop = frame_bounds(inputs.total_frames, comm.size)[comm.rank]
    family.context.report_shares((held, inputs.length), (stop - start, inputs.total_frames))
