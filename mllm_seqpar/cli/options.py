"""A command line from a frozen dataclass: its fields are the options, its annotations their types."""

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
    """A field of the dataclass: what --help says of it, and its default; without one the option is required."""
    return dataclasses.field(default=default, metadata={"help": text})


class CommandOptions:
    """What the dataclasses of options have in common."""

    def _require(self, name: str, good: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{_flag(name)}: {value!r} is not allowed; give {allowed}")

    def _refuse_idle(self, name: str, why: str) -> None:
        """Raises ConfigError where the option `name` was given and would have no effect."""
        default = next(item.default for item in dataclasses.fields(self) if item.name == name)  # type: ignore[arg-type]
        if getattr(self, name) != default:
            raise ConfigError(f"{_flag(name)} {getattr(self, name)} would have no effect: {why}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def tile_shape(text: str | None) -> tuple[int, int] | None:
    """ "2x4" as (2, 4).

    Raises:
        ConfigError: for anything but two numbers.
    """
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ConfigError(f"--tile: {text!r} is not allowed; give two numbers such as 2x2")
    return int(parts[0]), int(parts[1])


def parse_options(kind: type[Arguments], argv: Sequence[str], *, prog: str, description: str) -> Arguments:
    """The options in `argv` (without the program's name) as a `kind`.

    Underscores become dashes, a bool has a --no- form, a tuple takes its option several times. Names are not
    abbreviated. Of any other option given twice the last one counts.

    Raises:
        ConfigError: an unknown option, a value of the wrong type, or what `kind` itself refuses.
    """
    # SUPPRESS: the dataclass has the defaults.
    parser = _Parser(prog=prog, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        _add(parser, item, hints[item.name])
    values = vars(parser.parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


class _Parser(argparse.ArgumentParser):
    """Reports through an exception: under a launcher every rank parses, and one line is enough."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def _add(parser: argparse.ArgumentParser, item: dataclasses.Field, hint: Any) -> None:
    flag, text = "--" + item.name.replace("_", "-"), item.metadata["help"].replace("%", "%%")
    required = item.default is dataclasses.MISSING
    if not required and item.default not in (None, "", ()):
        text += f" (default: {item.default})"
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    parser.add_argument(
        flag,
        type=_value_type(hint),
        action="append" if get_origin(hint) is tuple else "store",
        required=required,
        help=text,
        metavar=item.name.upper(),
    )


def _value_type(hint: Any) -> Any:
    """What makes a value of text: float for ``float | None``, str for ``tuple[str, ...]``."""
    return next(part for part in get_args(hint) if part is not types.NoneType) if get_args(hint) else hint
