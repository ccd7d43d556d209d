"""Frozen dataclasses whose fields are checked, and the files that they are read from.

Errors name the file, the field, the value that was found and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.hub import local_config

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""The folder of model and cluster files: inside an installed package, at the top of a repository checkout."""


class Record:
    """A frozen dataclass whose fields are checked by their annotations.

    Attributes:
        units: what the number in a field counts, or is measured in.
        least: the smallest value of a field, other than 1 for whole numbers and above 0 for others.
        choices: the allowed values of a field.
    """

    units: ClassVar[Mapping[str, str]] = {}
    least: ClassVar[Mapping[str, int]] = {}
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            valid, expected = self._expected(field.name, {*re.findall(r"\w+", str(field.type))}, value)
            if not valid:
                raise ConfigError(f"{field.name} is {value!r}; expected {expected}")

    def _expected(self, name: str, annotation: set[str], value: Any) -> tuple[bool, str]:
        least = self.least.get(name)
        if name in self.choices:
            return value in self.choices[name], f"one of {', '.join(map(str, self.choices[name]))}"
        if (value is None and "None" in annotation) or "tuple" in annotation:
            return True, ""
        if "bool" in annotation:
            return isinstance(value, bool), "true or false"
        if "float" in annotation:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            valid = number and (value > 0 if least is None else value >= least) and value < float("inf")
            return valid, f"{self.units.get(name, 'a number')}, {'above 0' if least is None else f'{least} or more'}"
        if "int" in annotation:
            least = 1 if least is None else least
            return type(value) is int and value >= least, f"{self.units.get(name, 'a whole number')}, {least} or more"
        return "str" not in annotation or isinstance(value, str), "a string"


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
    units: Mapping[str, str] = getattr(cls, "units", {})
    all_fields: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    known = {field.name: field for field in all_fields}
    unknown = sorted(map(str, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{origin}: unknown field {', '.join(unknown)}; allowed fields: {', '.join(sorted(known))}")
    missing = [f.name for f in all_fields if f.default is MISSING and f.name not in values]
    if missing:
        listed = ", ".join(f"{name} ({units[name]})" if name in units else name for name in missing)
        raise ConfigError(f"{origin}: {listed} missing")
    try:
        return cls(**{name: _number(known[name], value) for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _number(field: Field[Any], value: Any) -> Any:
    if isinstance(value, str) and "float" in str(field.type):
        with suppress(ValueError):  # the dataclass rejects it with a message that names the field
            return float(value)
    return value
