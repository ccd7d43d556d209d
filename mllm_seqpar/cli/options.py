"""A command line from a frozen dataclass: its fields become the options, its annotations their types."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from mllm_seqpar.errors import ConfigError

Arguments = TypeVar("Arguments")


def option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field with its --help text and default. An option without a default is required."""
    return dataclasses.field(default=default, metadata={"help": text})


class CommandOptions:
    """Base of the dataclasses that `parse_options` fills: checks of values that name the option."""

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not valid or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{_flag(name)}: {value!r} is not allowed; give {allowed}")

    def _refuse_unused(self, name: str, reason: str) -> None:
        """Raise ConfigError if the option `name` differs from its default, for options that would have no effect."""
        default = next(item.default for item in dataclasses.fields(self) if item.name == name)  # type: ignore[arg-type]
        if getattr(self, name) != default:
            raise ConfigError(f"{_flag(name)} {getattr(self, name)} would have no effect: {reason}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_tile(text: str | None) -> tuple[int, int] | None:
    """Return the mesh shape that --tile gives: "2x4" becomes (2, 4).

    Raises:
        ConfigError: if `text` is not two numbers joined by "x".
    """
    if text is None:
        return None
    a, _, b = text.lower().partition("x")
    if not (a.isdigit() and b.isdigit()):
        raise ConfigError(f"--tile: {text!r} is not allowed; give two numbers such as 2x2")
    return int(a), int(b)


def parse_options(kind: type[Arguments], argv: Sequence[str], *, prog: str, description: str) -> Arguments:
    """Return the options in `argv` (without the program's name) as an instance of `kind`.

    Underscores become dashes, a bool has a --no- form, and an option with a tuple type may be repeated. Of any other
    repeated option the last value counts. Abbreviated names are refused.

    Raises:
        ConfigError: on an unknown option, a value of the wrong type, or a value that `kind` refuses.
    """
    # SUPPRESS leaves absent options out of the namespace: the dataclass has the defaults.
    parser = _Parser(prog=prog, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        _add_option(parser, item, hints[item.name])
    values = vars(parser.parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing: every rank parses the command line, and rank 0 reports the error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def _add_option(parser: argparse.ArgumentParser, item: dataclasses.Field, hint: Any) -> None:
    text = item.metadata["help"].replace("%", "%%")
    required = item.default is dataclasses.MISSING
    if not required and item.default not in (None, "", ()):
        text += f" (default: {item.default})"
    if hint is bool:
        parser.add_argument(_flag(item.name), action=argparse.BooleanOptionalAction, help=text)
        return
    # float for `float | None`, str for `tuple[str, ...]`
    value_type = next((part for part in get_args(hint) if part is not types.NoneType), hint)
    action = "append" if get_origin(hint) is tuple else "store"
    metavar = item.name.upper()
    parser.add_argument(_flag(item.name), type=value_type, action=action, required=required, help=text, metavar=metavar)
