"""The frames of a pass: each rank encodes its frame shard, and states which frames its text rows may attend to.

In a decoder-only model, the features are embeddings of text tokens, which are sent to the ranks of their rows instead.

Shape legend: B samples, L text tokens, U units of a sample, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.frames import Frames, VisualKVCache, select_strategy, unit_spans
from mllm_seqpar.runtime.offload import HostFeatures, in_host_memory, stored_in_host_memory
from mllm_seqpar.runtime.text import TextShards
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.runtime.visual_tokens import TokenPlaces
from mllm_seqpar.sharding import frame_bounds, span_length, take_spans

from .data_parallel import agree_on_frames
from .family import DecoderOnlyFamily, Family
from .inputs import ForwardInputs


def local_features(family: Family, inputs: ForwardInputs) -> Tensor | None:
    """Return the features (units, tokens, width) of this rank's frames; the vision tower encodes only those.

    The tower encodes `vision_chunk_size` frames at a time, and runs as often as on the rank with most frames. A rank
    with nothing left to encode runs it on one frame and discards the result, so that its parameters have zero gradients
    rather than none and the gathers of FSDP stay in step. For the same reason a batch without any frame gets an empty
    one, to which no token attends, if other ranks under the same FSDP2 or DDP have frames (`agree_on_frames`). The
    empty frame is encoded, or zeros if the other ranks pass features, because they do not run the tower then either. If
    no rank has frames, the result is None and the parameters have no gradient, as in the unpatched model.
    """
    if isinstance(family, DecoderOnlyFamily):
        return _local_embeddings(family, inputs)
    frames, total, units = inputs.frames, inputs.total_frames, family.units_per_frame(inputs)
    rank = family.context.comm.rank
    weight = family.embedding_weight()
    by_rank = family.frame_spans(inputs)
    most = max(map(span_length, by_rank)) if total else 0
    chunk = most if inputs.frames_are_features else family.context.config.vision_chunk_size or most
    is_features = frames is not None and inputs.frames_are_features
    shape = (frames.shape[-2], frames.shape[-1]) if frames is not None and is_features else None
    pixels = frames is not None and not is_features
    runs, shape = agree_on_frames(family.model, -(-most // max(chunk, 1)), pixels, shape)
    if total == 0:
        if not runs:
            return None
        if shape is not None:
            empty = torch.zeros((units, *shape), dtype=weight.dtype, device=weight.device)
        else:
            blank = family.blank_frame()
            empty = _encode_in_runs(family, blank, blank, runs, units)
        return empty if rank == 0 else empty[:0]
    assert frames is not None
    local = given = (frames, *inputs.extras)
    if inputs.visual_shard is None:
        multiple = units if inputs.frames_are_features else 1
        spans = tuple((start * multiple, stop * multiple) for start, stop in by_rank[rank])
        local = tuple(take_spans(x, spans) for x in given)
    if inputs.frames_are_features:
        features = local[0].flatten(0, local[0].dim() - 3)  # by units, if they came by frames
        if family.context.config.visual_offload is not None:
            return in_host_memory(features, weight.device)
        return features.to(device=weight.device, dtype=_features_dtype(family, features))
    # A run whose result is discarded uses one of the caller's frames, from any rank, so that a frame of a wrong size
    # fails on every rank, and the caller's tensor has a zero gradient here rather than none.
    spare = local if local[0].shape[0] else tuple(x if x.shape[0] else x.new_zeros((1, *x.shape[1:])) for x in given)
    return _encode_in_runs(family, local, spare, runs, units)


def _local_embeddings(family: DecoderOnlyFamily[Any], inputs: ForwardInputs) -> Tensor | None:
    """Return the embeddings (x, width) of this rank's frames, for a decoder-only model."""
    comm, total = family.context.comm, inputs.total_frames
    bounds = frame_bounds(total, comm.size)
    start, stop = bounds[comm.rank]
    most = max(last - first for first, last in bounds)
    is_features = inputs.frames is not None and inputs.frames_are_features
    chunk = most if is_features else family.context.config.vision_chunk_size or most
    shape = (1, inputs.frames.shape[-1]) if inputs.frames is not None and is_features else None
    pixels = inputs.frames is not None and not is_features
    runs, shape = agree_on_frames(family.model, -(-most // max(chunk, 1)), pixels, shape)
    if total == 0 and shape is not None:
        weight = family.embedding_weight()
        return torch.zeros(0, shape[1], dtype=weight.dtype, device=weight.device) if runs else None
    if is_features:
        weight, (rows,) = family.embedding_weight(), family.frames_between(inputs, start, stop)
        return rows.to(device=weight.device, dtype=weight.dtype)
    parts = []
    for number in range(runs):
        first = min(start + number * max(1, -(-(stop - start) // runs)), stop)
        last = min(first + max(1, -(-(stop - start) // runs)), stop)
        if first < last:
            own = family.frames_between(inputs, first, last)
            parts.append(family.encode(*(_moved(x, family.embedding_weight().device) for x in own)))
        else:  # the empty slices of the caller's tensors have zero gradients here rather than none
            empty = family.blank_frame()
            if inputs.frames is not None:
                none = family.frames_between(inputs, first, first)
                empty = tuple(torch.cat([x.to(y), y]) for x, y in zip(none, empty, strict=True))
            parts.append(family.encode(*empty)[:0])
    return torch.cat(parts) if parts else None


def _features_dtype(family: Family, features: Tensor) -> torch.dtype:
    """Return the dtype that layers take features of the caller in."""
    weight = family.embedding_weight()
    return features.dtype if torch.is_autocast_enabled(weight.device.type) else weight.dtype


def _encode_in_runs(
    family: Family, local: Sequence[Tensor], spare: Sequence[Tensor], runs: int, units_per_frame: int
) -> Tensor:
    """Encode `local` in `runs` runs of the tower; a run with nothing left encodes a frame of `spare`, and drops it.

    Frames in host memory move to the device run by run.
    """
    count, device = local[0].shape[0], family.embedding_weight().device
    chunk = max(1, -(-count // runs))

    def encoded() -> Iterator[Tensor]:
        for number in range(runs):
            if number * chunk < count:
                yield family.encode(*(_moved(x[number * chunk : (number + 1) * chunk], device) for x in local))
            else:  # an empty slice, so that the run stays in the graph for backward
                yield family.encode(*(_moved(x[:1], device) for x in spare))[:0]

    if family.context.config.visual_offload is not None:
        return stored_in_host_memory(encoded(), count * units_per_frame, device)
    parts = list(encoded())
    return parts[0] if runs == 1 else torch.cat(parts)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device) if x.requires_grad else copy_to_device(x, device)  # pinned copies have no gradients


def sharded_frames(
    family: Family,
    inputs: ForwardInputs,
    text: TextShards,
    source: VisualFeatures | VisualKVCache,
    mask: FrameMask,
    media_position: Any,
) -> dict[str, Any]:
    """Return what `ForwardState` takes for the frames of a pass with sharded text; `mask` is that of all rows."""
    context = family.context
    frames = Frames.of_shards(source, mask, text, family.units_per_frame(inputs))
    if isinstance(source, VisualFeatures):
        index = functools.partial(family.unit_index, inputs, source.total_frames)
        frames = select_strategy(context, frames, source, text, index, family.cross_attention_shape())
    local = context.config.self_attention == "local"
    facts = family.row_facts(inputs, mask, media_position)
    rows = {name: x if local else text.shard(x, 1) for name, x in facts.items()}
    return {"frames": frames, "rows": rows}


def sharded_tokens(
    family: Family, features: Tensor | None, media_position: TokenPlaces, text: TextShards
) -> dict[str, Any]:
    """Return what `ForwardState` takes for the frames of a decoder-only model, if the text is sharded."""
    if family.context.config.self_attention == "local":
        return replicated_tokens(family, features, media_position, 0, text.length)
    if features is None:
        return {}
    positions = [text.positions(rank) for rank in range(text.comm.size)]
    return _exchanged_tokens(family, features, media_position.between(0, text.length), positions)


def replicated_tokens(
    family: Family, features: Tensor | None, media_position: TokenPlaces, start: int, length: int
) -> dict[str, Any]:
    """Return what `ForwardState` takes for these frames, if every rank has all text rows.

    The rows of the pass are `length` from `start` on.
    """
    if features is None:
        return {}
    rows = [torch.arange(length)] * family.context.comm.size
    return _exchanged_tokens(family, features, media_position.between(start, start + length), rows)


def _exchanged_tokens(
    family: Family, features: Tensor, media_position: TokenPlaces, rows: Sequence[Tensor]
) -> dict[str, Any]:
    comm, width = family.context.comm, family.text_config.hidden_size
    return {
        "visual_tokens": media_position.routes(rows, comm.rank).exchange(features, comm, features.shape[1] // width)
    }


def visual_features(family: Family, inputs: ForwardInputs, features: Tensor) -> VisualFeatures:
    """Return this rank's features with the index of each unit. Without frames, rank 0 has the empty one."""
    per_frame, comm, config = family.units_per_frame(inputs), family.context.comm, family.context.config
    units, layout = max(1, inputs.total_frames) * per_frame, family.layout_of_frames(inputs)
    index = take_spans(family.unit_index(inputs, units), unit_spans(units, per_frame, comm, layout)[comm.rank])
    if config.visual_offload is None:
        index = copy_to_device(index, features.device)
        return VisualFeatures(features, index, units, config.recompute_visual, layout)
    dtype = _features_dtype(family, features) if inputs.frames_are_features else features.dtype
    index = copy_to_device(index, family.embedding_weight().device)
    return HostFeatures.of(features, index, units, dtype, layout)


def frame_mask(
    family: Family, inputs: ForwardInputs, units: int, tokens: int, media_position: Any, total_frames: int
) -> FrameMask:
    """Return the mask of all rows over the frames; without frames, over the empty one, to which no row attends."""
    if total_frames:
        return family.visibility(inputs, units, tokens, media_position)
    none = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
    return FrameMask.from_intervals(none, none, tokens, units)


def log_shard_sizes(family: Family, inputs: ForwardInputs, local_tokens: int) -> None:
    """Log once per model how many text tokens and frames this rank holds."""
    local = span_length(family.frame_spans(inputs)[family.context.comm.rank]) if inputs.total_frames else 0
    family.context.log_shard_sizes((local_tokens, inputs.length), (local, inputs.total_frames))


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
    table = visible.numpy()  # the equivalent operation of torch would convert every entry to a wider type
    count = np.count_nonzero(table, axis=-1)
    runs = np.count_nonzero(table[..., :1]) + np.count_nonzero(table[..., 1:] > table[..., :-1])
    if runs == np.count_nonzero(count):  # no gaps: an interval per row is enough
        first = offset[:, None] + torch.from_numpy(table.argmax(-1) if per_sample else count)
        return FrameMask.from_intervals(first, first + torch.from_numpy(count), tokens, units)
    of_all_samples = torch.zeros(batch, length, units, dtype=torch.bool)
    for sample in range(batch):
        of_all_samples[sample, :, int(offset[sample]) : int(offset[sample]) + per_sample] = visible[sample]
    return FrameMask.from_dense(of_all_samples, tokens)
