"""The arguments of one forward pass of a patched model, and the sizes derived from them.

Shape legend: B samples, L text tokens, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mllm_seqpar._transfers import copy_to_host
from mllm_seqpar.digests import sampled_bits
from mllm_seqpar.errors import MaskError, ShapeError
from mllm_seqpar.models.cache import SequenceParallelCacheState, cache_state_of
from mllm_seqpar.runtime.loss import shifted
from mllm_seqpar.runtime.text import packed_starts
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameShard, FrameSizes, Spans, take_spans


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """The inputs of one forward pass.

    Attributes:
        input_ids, inputs_embeds: (B, L) or (B, L, width); exactly one of them is given.
        attention_mask: (B, tokens so far) or None. With a static cache also the mask that `generate` prepares.
        position_ids: (B or 1, L) or None.
        labels, shift_labels: (B, L) or None.
        frames: (F, ...) pixels or features; with `visual_shard` this rank's (f, ...); None without frames.
        pixels_and_features: whether the caller passed both, which is an error.
        compared_tensors: further tensors that must be equal on all ranks: they say where frames belong in the text.
            The host plans the pass by them, so it reads them; see `on_host`.
        use_cache: whether the pass uses or makes a cache.
        detects_packing: whether positions separate packed sequences if there is no mask. In most models this is the
            case if the unpatched model would not create a cache.
        extras: (F, ...) or (f, ...) each: further tensors with one entry per frame, such as its aspect ratio.
        compare_frames: whether pixels that all ranks have must be equal bit by bit. Computed values may differ.
        error: what `Family.inputs` raised on this rank, which then has no inputs; the pass raises it on all ranks.
        frame_layouts: the layouts that `visual_shard` may have.
    """

    frame_layouts: ClassVar[tuple[str, ...]] = FRAME_LAYOUTS

    frames: Tensor | None
    frames_are_features: bool
    compared_tensors: Mapping[str, Tensor]
    input_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    attention_mask: Any = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    pixels_and_features: bool = False
    visual_shard: FrameShard | None = None
    cache: Any = None
    use_cache: bool = False
    detects_packing: bool = False
    extras: tuple[Tensor, ...] = ()
    compare_frames: bool = True
    error: Exception | None = None
    appends_frames: bool = field(default=False, init=False)
    """Whether the frames of this pass follow those of the cache; True in a copy, once the ranks have agreed on it."""
    shard_layout: str | None = field(default=None, init=False)
    """The layout in which every rank has its shard, in a copy made once the ranks have compared their inputs."""
    tokens: Tensor = field(init=False, repr=False)
    """`input_ids` or `inputs_embeds`, whichever was given; `check_text` refuses both and none."""
    batch: int = field(init=False)
    length: int = field(init=False)
    past_length: int = field(init=False)
    """Number of tokens in the cache before this pass."""
    has_labels: bool = field(init=False)
    _host: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _state: SequenceParallelCacheState | None = field(default=None, init=False, repr=False)
    """What `cache_state` returns in a copy, once the pass has brought the cache up to date, and of an earlier pass."""

    def __post_init__(self) -> None:
        tokens = self.inputs_embeds if self.input_ids is None else self.input_ids
        tokens = torch.empty(0, 0) if tokens is None else tokens
        batch, length, *_ = *tokens.shape, 0, 0  # of a wrong number of dimensions, too
        past_length = 0 if self.cache is None else int(self.cache.get_seq_length())
        has_labels = self.labels is not None or self.shift_labels is not None
        vars(self).update(tokens=tokens, batch=batch, length=length, past_length=past_length, has_labels=has_labels)

    @property
    def text_position_ids(self) -> Tensor | None:
        """The positions (B or 1, L) that count the tokens of the text and separate packed sequences, or None."""
        return self.position_ids

    @functools.cached_property
    def total_frames(self) -> int:
        if self.frames is None:
            return 0
        return self.visual_shard.total if self.visual_shard is not None else self.frames.shape[0]

    @property
    def units_per_frame(self) -> int | Tensor:
        """The number of units, such as image tiles, that a frame consists of; a rank holds whole frames.

        If frames differ in it, (total_frames,) integers. Units are then single tokens, features are (tokens, 1, width),
        and the mask (`Family.visibility`) may be over frames, with these sizes. Without frames, that of the blank one.
        """
        return 1

    @functools.cached_property
    def sizes(self) -> FrameSizes:
        """The units of each frame of all ranks, also if this rank passed none. Without any, there is the empty one."""
        total = self.total_frames if self.visual_shard is None else self.visual_shard.total
        held = None
        if (state := self.cache_state) is not None and (earlier := state.frames) is not None:
            held = earlier.units_by_rank(state.group[1])
        return FrameSizes(max(1, total), self.units_per_frame, held)

    def take(self, frames: Spans) -> tuple[Any, ...]:
        """Return the tensors of frames, among those that the caller passed, in the form that `Family.encode` takes.

        `frames` are places among the frames that were passed. A family whose pixels have no row for each frame, because
        frames differ in size, overrides it, and `check_shard`, `total_frames` and `blank_frames`. Tensors are moved to
        the device before they are encoded. Other values, such as a list of sizes, stay on the host.
        """
        assert self.frames is not None
        return tuple([take_spans(x, frames) for x in (self.frames, *self.extras)])

    def blank_frames(self) -> tuple[Any, ...]:
        """Return tensors of one frame as those of `take`, for a rank that was passed none; it has zero gradients."""
        assert self.frames is not None
        given = self.frames, *self.extras
        return tuple(x.new_zeros((1, *x.shape[1:])).requires_grad_(x.requires_grad) for x in given)

    @property
    def compares_values_of_frames(self) -> bool:
        """Whether frames must be equal bit by bit on all ranks: pixels that every rank has."""
        whole = self.frames is not None and self.visual_shard is None
        return whole and not self.frames_are_features and self.compare_frames

    @property
    def is_decoding_step(self) -> bool:
        """Whether this pass adds one token and no frames to a cache; the ranks do not compare such inputs."""
        return self.past_length > 0 and self.length == 1 and self.frames is None

    @property
    def cache_state(self) -> SequenceParallelCacheState | None:
        """What the patched model has stored with the text that this pass continues; None if it begins one.

        Of the frames, it is what came with the last pass that brought any, or with that of `of_pass`.
        """
        if self._state is not None:
            return self._state
        return cache_state_of(self.cache) if self.past_length else None

    def of_pass(self, state: SequenceParallelCacheState) -> Self:
        """Return the inputs for `Family.visibility` of frames that came with an earlier pass: those of its state."""
        earlier = self.changed(frames=None, visual_shard=None, _state=state)
        for name in vars(earlier).keys() - {each.name for each in fields(self)}:
            del vars(earlier)[name]  # derived from the inputs of this pass
        return earlier

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values of fields, which shares what was read and derived."""
        changed = copy.copy(self)
        vars(changed).update(values)
        return changed

    @property
    def unit_columns(self) -> slice:
        """The columns of the units of `cache_state` in a table (B, L, units of a sample) over the frames of all
        passes."""
        if (state := self.cache_state) is None:
            return slice(None)
        first = sum(earlier.units_of_sample() for earlier in state.earlier)
        return slice(first, first + state.units_of_sample())

    @property
    def prompt_rows(self) -> Tensor:
        """(B,) int64: the row of the frames' own pass that each row continues; the rows of a cache may have moved."""
        state = self.cache_state
        return torch.arange(self.batch) if state is None else state.rows_of(self.batch)

    @property
    def prompt_batch(self) -> int:
        """The number of rows of the frames' own pass."""
        state = self.cache_state
        return self.batch if state is None else state.prompt_batch

    def on_host(self, name: str) -> Tensor | None:
        """Return one of the tensors of `read_by_host` on the CPU; None if the pass has none of that name."""
        if not self._host:
            self.read()
        return self._host.get(name)

    def read(self, others: Sequence[Tensor] = ()) -> list[Tensor]:
        """Read the tensors that the host needs in this pass, and `others`, in one copy; return the others on the CPU.

        Each copy from the device makes the host wait until the device has computed everything before it.
        """
        needed = self.read_by_host()
        on_host = copy_to_host([*needed.values(), *others])
        self._host.update(zip(needed, on_host, strict=False))
        return on_host[len(needed) :]

    def read_by_host(self) -> dict[str, Tensor]:
        """Return the tensors whose values the host needs to plan this pass, by name.

        These are token ids and labels, except in a decoding step, a two-dimensional attention mask, positions that may
        separate packed sequences, the compared tensors, and, in a pass with a cache, the sample of the frames by which
        they are recognised later.
        """
        tensors, mask = dict(self.compared_tensors), self.attention_mask
        for name in () if self.is_decoding_step else ("input_ids", "labels", "shift_labels"):
            if (x := getattr(self, name)) is not None:
                tensors[name] = x
        if isinstance(mask, Tensor) and mask.dim() == 2:
            tensors["attention_mask"] = mask
        elif mask is None and self.detects_packing and (positions := self.text_position_ids) is not None:
            tensors["position_ids"] = positions
        if self.frames is not None and self.use_cache:
            tensors["sample_of_frames"] = sampled_bits(self.frames)
        return tensors

    def check_shard(self, shard: FrameShard) -> None:
        """Raise ShapeError unless the tensors of frames have the same number of frames as the shard."""
        assert self.frames is not None
        for x in (self.frames, *self.extras):
            if x.shape[0] != len(shard):
                raise ShapeError(
                    f"visual_shard: {shard} means {len(shard)} frames, {x.shape[0]} were passed, in a tensor of shape "
                    f"{tuple(x.shape)}"
                )

    @functools.cached_property
    def positions(self) -> Tensor:
        """(..., B or 1, L), rotary positions; if none were given, they start at the length of the cache.

        The first use is before the decoder runs, which fills the cache.
        """
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.length, device=self.tokens.device)[None] + self.past_length

    @functools.cached_property
    def padding_mask(self) -> Tensor | None:
        """The attention mask, on the host if it was read; None without one; MaskError unless it is (B, tokens so far).

        With a cache it may be longer, as in the unpatched model, which reads its first entries.
        """
        mask, tokens = self.attention_mask, self.past_length + self.length
        if mask is None:
            return None
        is_table = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == self.batch
        if not is_table or mask.shape[1] < tokens or (mask.shape[1] > tokens and not self.past_length):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise MaskError(
                f"attention_mask: sequence-parallel text takes a padding mask of shape {(self.batch, tokens)}, got "
                f"{shape}"
            )
        return self.on_host("attention_mask")

    @functools.cached_property
    def packed_starts(self) -> Tensor | None:
        """(B or 1, L), the first token of the sequence that each token belongs to; None if nothing is packed."""
        positions = self.on_host("position_ids") if self.padding_mask is None and self.detects_packing else None
        return None if positions is None else packed_starts(positions)

    @property
    def given_labels(self) -> Tensor:
        """`shift_labels`, or `labels` without them; one of them was given."""
        labels = self.labels if self.shift_labels is None else self.shift_labels
        assert labels is not None
        return labels

    def target_labels(self, ignore_index: int | None = None) -> Tensor:
        """Return (B, L) shifted labels, which were given, on the CPU. The last is `ignore_index` (None: -100)."""
        labels, targets = self.on_host("labels"), self.on_host("shift_labels")
        if targets is not None:
            return targets
        assert labels is not None
        return shifted(labels, ignore_index)


def as_compared_tensors(**values: Any) -> dict[str, Tensor]:
    """Return values (None, numbers, tensors, or lists of them) as tensors by name; "name 0", "name 1" ... of a list."""
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            tensors[f"length of {name}"] = torch.tensor(len(value))
        if isinstance(value, (list, tuple)) and not all(isinstance(x, int) for x in value):
            tensors |= as_compared_tensors(**{f"{name} {number}": x for number, x in enumerate(value)})
        elif value is not None:
            tensors[name] = torch.as_tensor(value)
    return tensors
