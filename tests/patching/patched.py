"""Running a patched tiny model on real ranks, and the unpatched one in this process, on the same inputs.

A `Case` says what is run. Every rank builds the same model from a seed, so nothing of it travels; gradients are
averaged over the ranks as DDP would, and come back from rank 0 only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar import FrameShard, frame_range, patch_model, unpatch_model
from outcomes import Outcome, average, error, run_case, worst_gradient
from tiny import IMAGE_TOKEN, tiny_frames, tiny_model, tiny_text

TOLERANCE = 1e-5
"""float32 through 4 layers and their gradients; a wrong mask, scale or position shows as 1e-3 and more."""

PATIENCE = 240.0
"""Seconds for a case on ranks: the first one imports transformers in every worker, on a machine that others use."""

GATES = ("per_head", None)
"""Gates with a path of their own through the patch. A vector gate is mixed in the same place as `per_head`."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One batch of a tiny model.

    Attributes:
        frames: frames of each sample.
        length: tokens of the longest sample.
        padding: "left", "right" or None: every sample after the first is shorter by 3 more tokens.
        packed: lengths of sequences packed into each row, told apart by positions.
        features: `image_embeds` in place of `pixel_values`.
        offsets: pass `media_offset` instead of leaving it to the placeholders.
        embeds: `inputs_embeds` in place of `input_ids`.
        wants_grad: inputs whose gradients are compared, too.
        local_frames: each rank passes only its own frames, with `visual_shard`.
        labels: "usual", "shifted" (`shift_labels`), "few" (the last two tokens only), "every row", or None.
        arguments: further arguments of forward.
        model: config overrides of the tiny model.
        options: of patch_model.
    """

    frames: tuple[int, ...] = (5,)
    length: int = 13
    padding: str | None = None
    packed: tuple[int, ...] = ()
    features: bool = False
    offsets: bool = False
    embeds: bool = False
    wants_grad: tuple[str, ...] = ()
    local_frames: bool = False
    labels: str | None = "usual"
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


@functools.cache
def _model(gate: str | None, overrides: tuple[tuple[str, Any], ...]) -> nn.Module:
    return tiny_model(gate, **{name: list(v) if isinstance(v, tuple) else v for name, v in overrides})


def model_of(gate: str | None, case: Case) -> Any:
    """The case's model, kept between cases: patching it must leave no trace."""
    overrides = {name: tuple(v) if isinstance(v, list) else v for name, v in case.model.items()}
    model = _model(gate, tuple(sorted(overrides.items())))
    model.zero_grad(set_to_none=True)
    return model.eval()


def inputs_of(gate: str | None, case: Case, model: Any) -> Inputs:
    """The arguments of the unpatched model's forward."""
    ids = tiny_text(*case.frames, length=case.length)
    inputs: Inputs = {"input_ids": ids, **case.arguments}
    batch, length = ids.shape
    if case.padding:
        mask = torch.ones_like(ids)
        for sample in range(1, batch):
            mask[sample, : 3 * sample] = 0
            # placeholders stay real: padding takes the place of text before them
            kept = torch.cat([ids[sample][ids[sample] == IMAGE_TOKEN], ids[sample][ids[sample] != IMAGE_TOKEN]])
            ids[sample] = torch.cat([kept.new_zeros(3 * sample), kept[: length - 3 * sample]])
        if case.padding == "right":
            ids, mask = ids.flip(1), mask.flip(1)
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if case.packed:
        inputs |= {"position_ids": torch.cat([torch.arange(part) for part in case.packed])[None].expand(batch, -1)}
        inputs["use_cache"] = False
    if case.labels:
        labels = ids.clone()
        labels[:, : min(2, length - 2)] = -100
        if case.labels == "few":
            labels[:, :-2] = -100
        if case.padding:
            labels[inputs["attention_mask"] == 0] = -100
        name = "labels"
        if case.labels == "shifted":
            name, labels = "shift_labels", nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        elif case.labels == "every row":
            name, labels = "shift_labels", ids.clone()
        inputs[name] = labels
    total = sum(case.frames)
    if total and case.features:
        generator = torch.Generator().manual_seed(3)
        inputs["image_embeds"] = torch.randn(total, 4, model.config.hidden_size, generator=generator)
    elif total:
        inputs["pixel_values"] = tiny_frames(total)
    if case.offsets or case.embeds:
        inputs["media_offset"] = published_offsets(gate, ids)
    if case.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    for name in case.wants_grad:
        inputs[name].requires_grad_()
    return inputs


def published_offsets(gate: str | None, ids: Tensor) -> Any:
    """`media_offset` as the published checkpoints want it."""
    placeholders = ids == IMAGE_TOKEN
    if gate is None:
        return [row.nonzero().flatten() for row in placeholders]
    counts = placeholders.sum(1)
    first = (counts.cumsum(0) - counts)[:, None].expand_as(ids)
    before = placeholders.long().cumsum(1) - placeholders.long()
    stop = torch.where(counts[:, None] > 0, first + before, -1000000)
    return torch.stack([first, stop], dim=-1)


def local_frames(inputs: Inputs, group: Any = None) -> Inputs:
    """The same inputs as a rank passes them that holds only its own frames."""
    name = "pixel_values" if "pixel_values" in inputs else "image_embeds"
    total = inputs[name].shape[0]
    own = frame_range(total, group)
    return inputs | {name: inputs[name][own.start : own.stop], "visual_shard": FrameShard(own.start, own.stop, total)}


@functools.cache
def _reference(gate: str | None, key: str, case_: _Hashable) -> Outcome:
    case = case_.case
    model = model_of(gate, case)
    return run_case(model, inputs_of(gate, case, model))


@dataclass(frozen=True)
class _Hashable:
    case: Case

    def __hash__(self) -> int:
        return 0


def reference(gate: str | None, case: Case) -> Outcome:
    """The unpatched model in this process; the same for all options and ways to pass frames, so computed once."""
    plain = replace(case, options={}, local_frames=False)
    return _reference(gate, repr(plain), _Hashable(plain))


def patched_rank(rank: int, world: int, gate: str | None, case: Case) -> Outcome:
    """On a rank: the patched model's outcome."""
    model = model_of(gate, case)
    inputs = inputs_of(gate, case, model)
    if case.local_frames:
        inputs = local_frames(inputs)
    patch_model(model, **case.options)
    try:
        outcome = run_case(model, inputs)
    finally:
        unpatch_model(model)
    for grads in (outcome.grads, outcome.input_grads):
        average(grads, world)
    if rank:
        outcome.grads, outcome.input_grads = {}, {}
    return outcome


def check(outcomes: list[Outcome], expected: Outcome, case: Case, tolerance: float = TOLERANCE) -> None:
    """Every rank's numbers against the unpatched model's."""
    real = slice(None)
    mask = inputs_mask(case)
    for outcome in outcomes:
        assert outcome.loss == outcomes[0].loss  # the same number, not nearly
        if expected.loss is not None:
            assert outcome.loss is not None
            assert abs(outcome.loss - expected.loss) <= tolerance * abs(expected.loss)
        real = slice(None) if mask is None else mask
        if gives_whole_logits(case, len(outcomes)):
            assert error(outcome.logits[real], expected.logits[real]) < tolerance
        for mine, theirs in zip(outcome.hidden_states, expected.hidden_states, strict=True):
            assert error(mine[real], theirs[real]) < tolerance
    if expected.loss is not None:
        value, name = worst_gradient(outcomes[0].grads, expected.grads)
        assert value < tolerance, (value, name)
        value, name = worst_gradient(outcomes[0].input_grads, expected.input_grads)
        assert value < tolerance, (value, name)


def gives_whole_logits(case: Case, size: int) -> bool:
    """Whether a rank gets the caller's logits. Not by their shape: a padded shard of a short text may have the same."""
    sharded = size > 1 and case.options.get("self_attention") != "local"
    wanted = case.options.get("logits", "auto")
    return not sharded or wanted == "full" or (wanted == "auto" and case.labels is None)


def inputs_mask(case: Case) -> Tensor | None:
    """(B, L) bool: real rows of a padded batch; what padding rows compute is nobody's concern."""
    if case.padding is None:
        return None
    mask = torch.ones(len(case.frames), case.length, dtype=torch.bool)
    for sample in range(1, len(case.frames)):
        mask[sample, : 3 * sample] = False
    return mask if case.padding == "left" else mask.flip(1)
