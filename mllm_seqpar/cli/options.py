"""Command lines: names with underscores or hyphens, and options from the fields of a frozen dataclass."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import types
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from mllm_seqpar._compat import may_repeat, options_of
from mllm_seqpar.errors import ConfigError, did_you_mean

Arguments = TypeVar("Arguments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that an option may have. A bound that is None does not limit them; no range has NaN or infinity."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        low = self.least is None or value >= self.least
        high = self.most is None or value <= self.most
        inside = (self.above is None or value > self.above) and (self.below is None or value < self.below)
        return math.isfinite(value) and low and high and inside

    def __str__(self) -> str:
        low = None if self.above is None else f"more than {self.above:,}"
        high = None if self.below is None else f"below {self.below:,}"
        if low is None and high is None and None not in (self.least, self.most):
            return f"{self.least:,} to {self.most:,}"
        low = low or (None if self.least is None else f"{self.least:,} or more")
        high = high or (None if self.most is None else f"at most {self.most:,}")
        return " and ".join(bound for bound in (low, high) if bound)

    def require(self, name: str, value: float | None) -> None:
        """Raise ConfigError if the option `name` has a value outside of this range; None is not a number."""
        if value is not None and value not in self:
            raise ConfigError(f"--{name}: {value!r} is not allowed; give {self}")


def option(
    text: str, default: Any = dataclasses.MISSING, *, choices: Sequence[Any] = (), **bounds: float | None
) -> Any:
    """Return a dataclass field with its --help text, default and allowed values, those of each value of a tuple.

    An option without a default is required. `bounds` are those of the `Range` of a number.
    """
    metadata = {"help": text} | ({"choices": choices} if choices else {})
    return dataclasses.field(default=default, metadata=metadata | ({"range": Range(**bounds)} if bounds else {}))


class CommandOptions:
    """Base of the dataclasses that `parse_options` fills: checks of values that name the option."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if (choices := item.metadata.get("choices")) and value is not None:
                valid = all(one in choices for one in (value if isinstance(value, tuple) else (value,)))
                self._require(item.name, valid, f"one of {', '.join(map(str, choices))}")
            if (bounds := item.metadata.get("range")) is not None:
                bounds.require(item.name, value)

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise ConfigError(f"--{name}: {getattr(self, name)!r} is not allowed; give {allowed}")

    def _refuse_unused(self, name: str, reason: str) -> None:
        """Raise ConfigError if the option `name` differs from its default, for options that would have no effect."""
        value = getattr(self, name)
        if value == type(self).__dataclass_fields__[name].default:  # type: ignore[attr-defined]
            return
        if isinstance(value, bool):
            option = f"--{name}" if value else f"--no_{name}"
        else:
            option = f"--{name} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        raise ConfigError(f"{option} would have no effect: {reason}")


def parse_tile(text: str | None) -> tuple[int, int] | None:
    """Return the mesh shape that --tile gives: "2x4" becomes (2, 4)."""
    if text is None:
        return None
    a, _, b = text.lower().partition("x")
    if not (a.isdigit() and b.isdigit()):
        raise ConfigError(f"--tile: {text!r} is not allowed; give two numbers such as 2x2")
    return int(a), int(b)


def parse_options(
    kind: type[Arguments], argv: Sequence[str], *, prog: str, description: str, example: str = "", ranks: bool = False
) -> Arguments:
    """Return the options in `argv` as an instance of `kind`, a dataclass whose fields are made by `option`.

    A bool has a second form --no_NAME. An option with a tuple type may be repeated, and takes several values after one
    name if they are numbers or have choices; without a default, they are given without its name. With `ranks`, --help
    shows --num_processes. `Parser` and `kind` refuse wrong options with ConfigError.
    """
    # SUPPRESS leaves absent options out of the namespace: the dataclass has the defaults.
    parser = Parser(prog=prog, description=description, example=example, argument_default=argparse.SUPPRESS)
    if ranks:
        show_ranks_option(parser)
    hints = get_type_hints(kind)
    items: tuple[dataclasses.Field, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    for item in sorted(items, key=lambda item: item.default is not dataclasses.MISSING):  # required ones first
        _add_option(parser, item, hints[item.name])
    values = vars(parser.parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def show_ranks_option(parser: argparse.ArgumentParser) -> None:
    """Add --num_processes to the --help of a command. `launch.start_ranks_if_asked` reads it before the command."""
    text = "start N ranks on this machine, without a launcher"
    parser.add_argument("--num_processes", action=_ReadBefore, default=argparse.SUPPRESS, metavar="N", help=text)


def canonical_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return `argv` with the hyphens in the names of the parser's options replaced by underscores.

    The parser may be of any class, such as `HfArgumentParser`, whose options are named with underscores. A repeated
    option, of which only the last value would count, raises ConfigError.
    """
    known, seen = options_of(parser), set()
    result = list(argv)
    for index, argument in enumerate(argv):
        if argument == "--":
            break
        name, sign, value = argument.partition("=")
        written = "--" + name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and written in known:
            result[index], name = written + sign + value, written
        action = known.get(name)
        if action is None or may_repeat(action):
            continue
        if action.dest in seen:
            several = action.nargs in ("+", "*")
            raise ConfigError(f"{name} is given twice; give {f'all values after one {name}' if several else 'it once'}")
        seen.add(action.dest)
    return result


def unrecognized(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """Return the error message for arguments that the parser does not have, with the nearest name that it has."""
    return f"unrecognized arguments: {' '.join(arguments)}{suggestion(arguments[0], options_of(parser))}"


def suggestion(argument: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown option: the name that was probably meant, or nothing."""
    written = "--" + argument.partition("=")[0].lstrip("-").replace("-", "_")
    near = next((name for name in _OTHER_NAMES.get(written, ()) if name in known), None)
    return did_you_mean(written, known) if near is None else f" (did you mean {near}?)"


_OTHER_NAMES = {
    "--lr": ["--learning_rate"],
    "--epochs": ["--num_train_epochs"],
    "--steps": ["--max_steps"],
    "--batch_size": ["--global_batch_size", "--per_device_train_batch_size"],
    "--use_lora": ["--use_peft"],
    "--lora": ["--use_peft"],
    "--qlora": ["--load_in_4bit"],
    "--lora_rank": ["--lora_r"],
    "--fsdp2": ["--shard_weights"],
    "--resume": ["--resume_from_checkpoint"],
    "--dataset": ["--data"],
    "--model_name_or_path": ["--model"],
    "--output": ["--output_dir"],
    "--json": ["--report"],
    "--max_tokens": ["--max_new_tokens"],
    "--nproc_per_node": ["--num_processes"],
    "--gpus": ["--num_processes"],
}
"""Names of options in other programs, with our names for them; the first one that a command has is suggested."""


class Parser(argparse.ArgumentParser):
    """A parser whose options have names with underscores; hyphens are accepted for them.

    It raises ConfigError instead of printing: every rank parses the command line, and rank 0 reports the error.
    Abbreviated names, and repeated options of which only the last value would count, are refused.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter} | options
        super().__init__(epilog=f"example:\n  {example}" if example else None, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(canonical_arguments(self, args), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            values, unknown = self.parse_known_args(args, copy.copy(namespace))
        except ConfigError:
            # An option that is missing may be misspelled. After this error, the parser is not used again.
            for action in self._actions:
                action.required = False
            unknown = self.parse_known_args(args, copy.copy(namespace))[1]
            if not unknown:
                raise
        if unknown:
            self.error(unrecognized(self, unknown))
        return values

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after --help. The exception refers to the parser, whose options `completion` completes."""
        leaving = SystemExit(status)
        leaving.parser = self  # type: ignore[attr-defined]
        raise leaving

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # of several ranks, one prints the help
            super()._print_message(message, file)


class _ReadBefore(argparse.Action):
    """An option that `mllm-seqpar` reads and does not pass on to the command."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ConfigError(f"{option_string} {values}: give it on the command line, to mllm-seqpar or -m mllm_seqpar")


class _Switch(argparse.Action):
    """An option of a bool, --NAME or --no_NAME."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__([f"--{dest}", f"--no_{dest}"], dest, nargs=0, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def _add_option(parser: argparse.ArgumentParser, item: dataclasses.Field, hint: Any) -> None:
    text = item.metadata["help"].replace("%", "%%")
    required = item.default is dataclasses.MISSING
    if hint is bool:
        text += f" (default: {'on' if item.default else 'off'}; --no_{item.name} turns it off)"
        parser.add_argument(f"--{item.name}", action=_Switch, help=text)
        return
    if not required and item.default not in (None, "", ()):
        text += f" (default: {' '.join(item.default) if isinstance(item.default, tuple) else item.default})"
    # float for `float | None`, str for `tuple[str, ...]`
    value_type = next((part for part in get_args(hint) if part is not types.NoneType), hint)
    is_tuple, choices = get_origin(hint) is tuple, item.metadata.get("choices")  # the dataclass checks the value
    metavar = f"{{{','.join(map(str, choices))}}}" if choices else item.name.upper()
    options = {"type": value_type, "help": text, "metavar": metavar}
    if is_tuple and required:
        parser.add_argument(item.name, nargs="+", **options)
    elif is_tuple and value_type is str and not choices:  # words of a question without quotes are not several questions
        parser.add_argument(f"--{item.name}", action="append", **options)
    elif is_tuple:
        parser.add_argument(f"--{item.name}", action="extend", nargs="+", **options)
    else:
        parser.add_argument(f"--{item.name}", required=required, **options)
