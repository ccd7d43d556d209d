"""Layer: one process. Every option that is a number states which numbers it may have."""

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import pytest

from mllm_seqpar.cli.commands import COMMANDS, load_entry
from mllm_seqpar.cli.options import CommandOptions, Range
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.training.arguments import RANGES, REFUSED, FineTuningArguments

WITHOUT_RANGE = {
    "dataloader_prefetch_factor": "TrainingArguments refuses it without workers, and workers are refused",
    "local_rank": "launchers set it, and transformers ignores it",
}
"""Options that are numbers and have no range, with the reason."""


def is_number(hint: Any) -> bool:
    return bool({int, float} & {hint, *get_args(hint)})


def numbers_of(kind: type) -> dict[str, dataclasses.Field]:
    hints = get_type_hints(kind)
    return {item.name: item for item in dataclasses.fields(kind) if item.init and is_number(hints[item.name])}


def kinds() -> list[type]:
    """The dataclasses of the options of all commands."""
    for command in COMMANDS.values():
        load_entry(command.entry)
    found, waiting = [], [CommandOptions]
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        found += [kind for kind in subclasses if kind.__module__.startswith("mllm_seqpar.")]
    return found


CASES = [(kind, name) for kind in kinds() for name in numbers_of(kind)]


def test_every_command_with_numbers_is_among_the_cases() -> None:
    named = {kind.__name__.removesuffix("Options").lower() for kind, _ in CASES}
    assert named >= {"ask", "chat", "serve", "checkdata", "convert", "plan", "calibrate", "doctor", "example"}
    assert {"modelanddata", "sequenceparallel"} <= named


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_number_outside_its_range_is_refused_by_name(kind: type, name: str) -> None:
    item = numbers_of(kind)[name]
    if "choices" in item.metadata:
        return
    bounds: Range | None = item.metadata.get("range")
    assert bounds is not None, f"{kind.__name__}.{name} has neither a range nor choices"
    assert item.default in (None, dataclasses.MISSING) or item.default in bounds
    required = {
        other.name: 1 if other.type in ("int", int) else ("x",) if "tuple" in str(other.type) else "x"
        for other in dataclasses.fields(kind)
        if other.default is dataclasses.MISSING
    }
    outside = {bounds.above, bounds.below, *(() if is_whole(kind, name) else (math.nan, math.inf))} - {None}
    outside |= {bound - 1 for bound in (bounds.least,) if bound is not None}
    outside |= {bound + 1 for bound in (bounds.most,) if bound is not None}
    assert outside
    for value in outside:
        with pytest.raises(ConfigError, match=f"^--{name}: .* is not allowed; give "):
            kind(**required | {name: value})


def is_whole(kind: type, name: str) -> bool:
    hint = get_type_hints(kind)[name]
    return float not in {hint, *get_args(hint)}


def test_every_number_of_training_arguments_has_a_range_or_a_reason() -> None:
    names = numbers_of(FineTuningArguments).keys()
    without = names - RANGES.keys() - REFUSED.keys()
    assert without <= WITHOUT_RANGE.keys(), f"give these options a range, or a reason: {sorted(without)}"
    assert not WITHOUT_RANGE.keys() & RANGES.keys()
    for name in names & RANGES.keys():
        default = next(item.default for item in dataclasses.fields(FineTuningArguments) if item.name == name)
        assert default is None or default in RANGES[name], name


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Range(least=1), "1 or more", [1, 2**70], [0, 0.5, -1]),
        (Range(above=0), "more than 0", [1e-30, 3], [0, -1e-30, math.inf, math.nan]),
        (Range(least=0, most=65_535), "0 to 65,535", [0, 65_535], [-1, 65_536]),
        (Range(above=0, most=1), "more than 0 and at most 1", [1, 0.1], [0, 1.1]),
        (Range(least=0, below=1), "0 or more and below 1", [0, 0.99], [1, -0.1]),
    ],
)
def test_range_names_what_it_contains(bounds: Range, text: str, inside: list[float], outside: list[float]) -> None:
    assert str(bounds) == text
    assert all(value in bounds for value in inside) and not any(value in bounds for value in outside)
