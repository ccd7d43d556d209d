"""The frames of a pass: each rank encodes its frame shard, and states which frames its text rows may attend to.

In a decoder-only model, the features are embeddings of text tokens, which are sent to the ranks of their rows instead.

Shape legend: B samples, L text tokens, U units of a sample, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.runtime.attention_record import AnyRecorder, AttentionRecord
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.frames import Frames, VisualKVCache, select_strategy, unit_spans
from mllm_seqpar.runtime.offload import HostFeatures, in_host_memory, stored_in_host_memory
from mllm_seqpar.runtime.text import TextShards
from mllm_seqpar.runtime.visual_features import VisualFeatures, fingerprint_of
from mllm_seqpar.runtime.visual_tokens import FrameTokens, VisualTokens
from mllm_seqpar.sharding import frame_bounds, span_length, take_spans

from .data_parallel import agree_on_frames
from .inputs import ForwardInputs

if TYPE_CHECKING:
    from .family import DecoderOnlyFamily, Family


def local_features(family: Family, inputs: ForwardInputs) -> Tensor | None:
    """Return the features (units, tokens, width) of this rank's frames; the vision tower encodes only those.

    The tower encodes `vision_chunk_size` frames at a time, and makes as many calls on every rank as the rank with the
    most frames needs. A rank with nothing left to encode runs it on one frame and discards the result, so that its
    parameters have zero gradients rather than none and the gathers of FSDP stay in step. For the same reason a batch
    without any frame gets an empty one, to which no token attends, if other ranks under the same FSDP2 or DDP have
    frames (`agree_on_frames`). The empty frame is encoded, or zeros if the other ranks pass features, because they do
    not run the tower then either. If no rank has frames, the result is None and the parameters have no gradient, as in
    the unpatched model.
    """
    frames, total, units = inputs.frames, inputs.total_frames, family.units_per_frame(inputs)
    rank = family.context.comm.rank
    weight = family.embedding_weight()
    by_rank = family.frame_spans(inputs)
    runs, shape = _tower_runs(family, inputs, max(map(span_length, by_rank)) if total else 0)
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
    runs, shape = _tower_runs(family, inputs, max(last - first for first, last in bounds))
    if total == 0 and shape is not None:
        weight = family.embedding_weight()
        return torch.zeros(0, shape[1], dtype=weight.dtype, device=weight.device) if runs else None
    if inputs.frames is not None and inputs.frames_are_features:
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


def _tower_runs(family: Family, inputs: ForwardInputs, most: int) -> tuple[int, tuple[int, int] | None]:
    """Return how often each rank runs the tower, given the frames of the rank with `most`; see `agree_on_frames`."""
    frames, is_features = inputs.frames, inputs.frames is not None and inputs.frames_are_features
    chunk = most if is_features else family.context.config.vision_chunk_size or most
    shape = (frames.shape[-2], frames.shape[-1]) if frames is not None and is_features else None
    return agree_on_frames(family.model, -(-most // max(chunk, 1)), frames is not None and not is_features, shape)


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


class PassFrames(ABC):
    """The frames of one pass: encoded by the ranks that have them, and prepared for the rows that need them.

    Attributes:
        cache_state: what the patched model stores with the cache, in a pass with one.
        media_position: what `Family.media_position` returned for these frames.
        features: of the frames that came with this pass, on this rank; None if none came, or if the rows have them.
        has_frames: whether this pass has frames, perhaps only the empty one (`local_features`); the same on all ranks.
    """

    media_position: Any = None
    features: Tensor | None = None
    has_frames = False

    def __init__(
        self, family: Family, inputs: ForwardInputs, cache_state: SequenceParallelCacheState | None = None
    ) -> None:
        self.family, self.inputs, self.cache_state = family, inputs, cache_state

    def encode(self) -> None:
        """Encode the frames that came with this pass, unless the cache has them; all ranks call it together."""
        if self.cache_state is None or self._are_new(self.cache_state):
            self.media_position = self.family.media_position(self.inputs)
            self._encode()
            self.has_frames = self.features is not None

    def _are_new(self, cache_state: SequenceParallelCacheState) -> bool:
        """Return whether this pass encodes frames: those of a prompt, also without any (for FSDP), and later ones."""
        return not self.inputs.past_length or self.inputs.total_frames > 0

    @abstractmethod
    def _encode(self) -> None:
        """Encode the frames that came with this pass."""

    @abstractmethod
    def state_of_shards(self, text: TextShards, recorder: AnyRecorder | None = None) -> ForwardState:
        """Return the state of a pass with a sharding of the text."""

    @abstractmethod
    def state_of_rows(self, start: int, length: int, tokens: int, **given: Any) -> ForwardState:
        """Return the state of a pass in which every rank has the `length` rows from `start` on.

        Args:
            start, length: the rows.
            tokens: the number of tokens so far, including those of this pass.
            **given: the other arguments of `ForwardState`.
        """

    @abstractmethod
    def begin_record(self, record: AttentionRecord, tokens: int, positions: Tensor | None) -> AnyRecorder | None:
        """Return what records the attention of the last row of this pass to the frames; None without frames.

        Args:
            record: the record that it belongs to.
            tokens: the number of tokens so far, those of this pass included.
            positions: the positions of this rank's rows, if they are sharded.
        """


class AttendedFrames(PassFrames):
    """Frames that layers attend to by cross-attention.

    Attributes:
        source: where their K and V come from: the features, or the cache; None without frames.
        mask: which of them each row of the pass attends to.
    """

    source: VisualFeatures | VisualKVCache | None = None
    mask: FrameMask

    def encode(self) -> None:
        super().encode()
        inputs, state, total_frames = self.inputs, self.cache_state, self.inputs.total_frames
        if state is not None and state.visual is not None:
            self.source, self.media_position, total_frames = (
                state.visual,
                state.media_position,
                state.visual.total_frames,
            )
        if self.source is None:
            return
        self.has_frames, units, tokens = True, self.source.units, self.source.tokens_per_unit
        if total_frames:
            self.mask = self.family.visibility(inputs, units, tokens, self.media_position)
        else:  # the empty frame, to which no row attends
            none = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
            self.mask = FrameMask.from_intervals(none, none, tokens, units)

    def _encode(self) -> None:
        family, inputs, state = self.family, self.inputs, self.cache_state
        self.features = features = local_features(family, inputs)
        if features is None:
            return
        visual = visual_features(family, inputs, features)
        if state is None:
            self.source = visual
            return
        cache = VisualKVCache(inputs.total_frames, visual.units, visual.tokens_per_unit, visual)
        fingerprints = {fingerprint_of(features)}
        if inputs.frames is not None:
            fingerprints.add(self._fingerprint(inputs.frames))
        state.store_frames(cache, self.media_position, inputs.batch, fingerprints)

    def _fingerprint(self, frames: Tensor) -> tuple[int, ...]:
        return fingerprint_of(frames, self.inputs.on_host("sample of frames"))

    def _are_new(self, cache_state: SequenceParallelCacheState) -> bool:
        """Return whether this pass has frames, and others than the cache.

        ShapeError refuses other frames in a family whose earlier text would then lack its own frames.
        """
        inputs, family, visual = self.inputs, self.family, cache_state.visual
        if visual is None:
            return super()._are_new(cache_state)
        if inputs.frames is None or not inputs.total_frames:
            return False
        same = self._fingerprint(inputs.frames) in cache_state.frame_fingerprints
        # The frames of one rank may be the same while those of another are not.
        if not inputs.compares_values_of_frames:
            same = all(number for (number,) in family.context.comm.gather_ints([int(same)]))
        if family.repeats_frames:  # as unpatched: every pass attends to the frames that come with it
            return (
                torch.is_grad_enabled() or not same or not family.rows_match_frames(inputs, cache_state.media_position)
            )
        if same:
            return False
        raise ShapeError(
            f"{inputs.total_frames} frames were passed with a cache that holds {visual.total_frames} others already; "
            "leave frames out to continue with those of the cache, or pass new frames with the whole conversation and "
            "without the cache"
        )

    def state_of_shards(self, text: TextShards, recorder: AnyRecorder | None = None) -> ForwardState:
        family, inputs, source, context = self.family, self.inputs, self.source, self.family.context
        if source is None:
            return ForwardState(context, text=text, recorder=recorder)
        frames = Frames.of_shards(source, self.mask, text, family.units_per_frame(inputs))
        if isinstance(source, VisualFeatures):
            index = functools.partial(family.unit_index, inputs, source.units)
            frames = select_strategy(context, frames, source, text, index, family.cross_attention_shape())
        local = context.config.self_attention == "local"
        facts = family.row_facts(inputs, self.mask, self.media_position)
        rows = {name: x if local else text.shard(x, 1) for name, x in facts.items()}
        return ForwardState(context, text=text, frames=frames, rows=rows, recorder=recorder)

    def state_of_rows(self, start: int, length: int, tokens: int, **given: Any) -> ForwardState:
        context = self.family.context
        if self.source is None:
            return ForwardState(context, tokens=tokens, **given)
        assert isinstance(self.source, VisualKVCache)
        facts = self.family.row_facts(self.inputs, self.mask, self.media_position)
        mask = self.mask.take(torch.arange(start, start + length)) if start else self.mask
        frames = self.source.frames_of(mask, context.comm)
        rows = {name: x[:, start:] for name, x in facts.items()} if start else facts
        return ForwardState(context, frames=frames, rows=rows, tokens=tokens, **given)

    def begin_record(self, record: AttentionRecord, tokens: int, positions: Tensor | None) -> AnyRecorder | None:
        if self.source is None:
            return None
        assert isinstance(self.source, VisualKVCache)
        return record.begin_pass(self.source, self.mask, self.inputs.length, positions)


class EmbeddedFrames(PassFrames):
    """Frames of a decoder-only model, whose features take the place of text tokens."""

    family: DecoderOnlyFamily[Any]

    def _encode(self) -> None:
        self.features = _local_embeddings(self.family, self.inputs)
        state, past = self.cache_state, self.inputs.past_length
        tokens = self.media_position.tokens
        if state is None or not tokens.total:
            return
        if past:
            earlier = FrameTokens.none() if state.media_position is None else state.media_position
            tokens = earlier.followed_by(tokens, past, state.rows_of(self.inputs.batch))
        state.media_position = tokens

    def state_of_shards(self, text: TextShards, recorder: AnyRecorder | None = None) -> ForwardState:
        context = self.family.context
        if context.config.self_attention == "local":
            tokens = self._of_replicated_rows(0, text.length)
        else:
            later = text.length < self.inputs.length  # rows behind the shards, of Star Attention, need the features too
            rows = [text.positions(rank) for rank in range(text.comm.size)]
            tokens = self._exchanged(0, text.length, rows, later)
        return ForwardState(context, text=text, visual_tokens=tokens, recorder=recorder)

    def state_of_rows(self, start: int, length: int, tokens: int, **given: Any) -> ForwardState:
        visual_tokens = self._of_replicated_rows(start, length)
        return ForwardState(self.family.context, visual_tokens=visual_tokens, tokens=tokens, **given)

    def _of_replicated_rows(self, start: int, length: int) -> list[VisualTokens] | None:
        return self._exchanged(start, length, [torch.arange(length)] * self.family.context.comm.size)

    def _exchanged(
        self, start: int, length: int, rows: Sequence[Tensor], keep: bool = False
    ) -> list[VisualTokens] | None:
        """Send the features of the `length` tokens from `start` on to the ranks that have their rows.

        Return the visual tokens among the rows of this rank; None in a pass without frames.
        """
        features, comm, width = self.features, self.family.context.comm, self.family.text_config.hidden_size
        if features is None:
            return None
        if not keep:
            self.features = None  # the rows will have them, and the memory is free for the layers
        routes = self.media_position.between(start, start + length).routes(rows, comm.rank)
        return routes.exchange(features, comm, features.shape[1] // width)

    def begin_record(self, record: AttentionRecord, tokens: int, positions: Tensor | None) -> AnyRecorder | None:
        state, inputs = self.cache_state, self.inputs
        assert state is not None
        if state.media_position is None:
            return None
        keys = None if state.text is None else state.text.positions
        return record.begin_token_pass(
            state.media_position,
            state.rows_of(inputs.batch),
            inputs.length,
            tokens - 1,
            keys=keys if positions is None else positions,
            positions=positions,
            valid=self._visible_tokens(),
        )

    def _visible_tokens(self) -> Tensor | None:
        """Return (tokens,) bool, the tokens of the first sample that its last row may attend to; None: all."""
        mask = self.inputs.attention_mask
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask  # prepared by `generate`
        if mask is None:
            return None
        row = mask[0] if mask.dim() == 2 else mask[0, 0, -1]
        return row == 0 if row.is_floating_point() else row.bool()


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
