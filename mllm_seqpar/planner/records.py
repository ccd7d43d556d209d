"""Frozen dataclasses whose fields are checked, and the files that they are read from.

Errors name the file, the field, the value that was found and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.hub import local_config

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""The folder of model and cluster files: inside an installed package, at the top of a repository checkout."""


def number(unit: str | None = None, default: Any = MISSING, *, least: int | None = None) -> Any:
    """Return a field that holds a number: what it counts or is measured in, and the smallest value.

    Without `least`, a whole number is 1 or more, and any other number is above 0.
    """
    return field(default=default, metadata={"unit": unit, "least": least})


def one_of(choices: tuple[Any, ...], default: Any = MISSING) -> Any:
    """Return a field that holds one of `choices`."""
    return field(default=default, metadata={"choices": choices})


class Record:
    """A frozen dataclass whose fields are checked by their annotations, and by what `number` and `one_of` allow."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            valid, expected = _check(item, value)
            if not valid:
                raise ConfigError(f"{item.name} is {value!r}; expected {expected}")


def _check(item: Field[Any], value: Any) -> tuple[bool, str]:
    """Return whether a field may hold `value`, and what it may hold."""
    types, choices, least = {*re.findall(r"\w+", str(item.type))}, *map(item.metadata.get, ("choices", "least"))
    if choices is not None:
        return value in choices, f"one of {', '.join(map(str, choices))}"
    if (value is None and "None" in types) or "tuple" in types:
        return True, ""
    if "bool" in types:
        return isinstance(value, bool), "true or false"
    if "float" in types:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        valid = is_number and (value > 0 if least is None else value >= least) and value < float("inf")
        return valid, f"{item.metadata.get('unit') or 'a number'}, {'above 0' if least is None else f'{least} or more'}"
    if "int" in types:
        least = 1 if least is None else least
        unit = item.metadata.get("unit") or "a whole number"
        return type(value) is int and value >= least, f"{unit}, {least} or more"
    return "str" not in types or isinstance(value, str), "a string"


def find_file(what: str, name: str) -> Path:
    """Return the path `name`, or the file that `name` stands for ("a100-80g-4x4" in configs/clusters).

    `what` is "model" or "cluster". A model may be an id on the Hub, of which only the config.json is downloaded. A
    ConfigError lists the known names.
    """
    path = CONFIGS / f"{what}s" / f"{name}.yaml"
    if Path(name).exists() or path.is_file():
        return Path(name) if Path(name).exists() else path
    if what == "model" and (config := local_config(name)) != name:
        return Path(config)
    raise ConfigError(f"{what}: {name!r} is neither a file nor a known name; known names: {known_files(what)}")


def known_files(what: str) -> str:
    """Return the names that `find_file` accepts, separated by commas."""
    return ", ".join(sorted(path.stem for path in (CONFIGS / f"{what}s").glob("*.yaml"))) or "none"


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; raise ConfigError if it is missing, invalid or not a mapping."""
    import yaml  # imported here, because simulating needs no YAML

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}; see configs/{what}s for examples")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: {path} holds a {type(values).__name__}; expected fields, `name: value`")
    return values


def build(cls: type[T], values: Mapping[str, Any], origin: str) -> T:
    """Return an instance of the dataclass `cls` with the fields `values`; ConfigErrors begin with their `origin`.

    YAML reads 25e9, without a dot, as text; such values of float fields are converted to numbers.
    """
    known: dict[str, Field[Any]] = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(map(str, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{origin}: unknown field {', '.join(unknown)}; allowed fields: {', '.join(sorted(known))}")
    missing = [item for item in known.values() if item.default is MISSING and item.name not in values]
    if missing:
        units = [(item.name, item.metadata.get("unit")) for item in missing]
        raise ConfigError(
            f"{origin}: {', '.join(f'{name} ({unit})' if unit else name for name, unit in units)} missing"
        )
    converted = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and "float" in str(known[name].type):
            with suppress(ValueError):  # the dataclass rejects it with a message that names the field
                converted[name] = float(value)
    try:
        return cls(**converted)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
