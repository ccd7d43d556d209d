"""Descriptions: frozen dataclasses whose fields are checked, and the files that they are read from.

Errors name the file, the field, the value that was found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from mllm_seqpar.errors import ConfigError, did_you_mean, placed
from mllm_seqpar.models.hub import local_config

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


class Description:
    """A frozen dataclass whose fields are checked by their annotations, and by what `number` and `one_of` allow."""

    _types: ClassVar[dict[str, tuple[type, ...]]]
    """The types that each field may have."""

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls).items()
        unions = {name: (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,) for name, hint in hints}
        cls._types = {name: tuple(get_origin(part) or part for part in union) for name, union in unions.items()}

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            valid, expected = _check(self._types[item.name], item, value)
            if not valid:
                raise ConfigError(f"{item.name} is {value!r}; expected {expected}")

    @classmethod
    def build(cls, values: Mapping[str, Any], origin: str) -> Self:
        """Return the description with these fields, which may be nested; ConfigErrors begin with their `origin`.

        YAML reads 25e9, without a dot, as text; such values of float fields are converted to numbers.
        """
        known: dict[str, Field[Any]] = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(map(str, set(values) - set(known))):
            listed = ", ".join(name + did_you_mean(name, known) for name in unknown)
            raise ConfigError(f"{origin}: unknown field {listed}; allowed fields: {', '.join(sorted(known))}")
        missing = [item for item in known.values() if item.default is MISSING and item.name not in values]
        if missing:
            units = [(item.name, item.metadata.get("unit")) for item in missing]
            names = ", ".join(f"{name} ({unit})" if unit else name for name, unit in units)
            raise ConfigError(f"{origin}: {names} missing")
        converted = dict(values)
        for name, value in values.items():
            types = cls._types[name]
            if isinstance(value, str) and float in types:
                with suppress(ValueError):  # rejected below, with a message that names the field
                    converted[name] = float(value)
            elif isinstance(value, list) and tuple in types:
                converted[name] = tuple(value)
            elif isinstance(value, dict) and issubclass(types[0], Description):
                converted[name] = types[0].build(value, f"{origin}, {name}")
        with placed(origin, ConfigError):
            return cls(**converted)


def _check(types: tuple[type, ...], item: Field[Any], value: Any) -> tuple[bool, str]:
    """Return whether a field may hold `value`, and what it may hold."""
    choices, least, unit = map(item.metadata.get, ("choices", "least", "unit"))
    if choices is not None:
        return value in choices, f"one of {', '.join(map(str, choices))}"
    if (value is None and NoneType in types) or tuple in types:
        return True, ""
    if float in types or int in types:
        whole = float not in types
        least = 1 if whole and least is None else least
        valid = type(value) is int or (isinstance(value, float) and not whole)
        valid = valid and (value > 0 if least is None else value >= least) and value < float("inf")
        allowed = "above 0" if least is None else f"{least} or more"
        return valid, f"{unit or ('a whole number' if whole else 'a number')}, {allowed}"
    names = {bool: "true or false", str: "a string"}
    return isinstance(value, types), names.get(types[0], "fields, `name: value`")


def find_file(what: str, name: str) -> Path:
    """Return the path `name`, or the file that `name` stands for ("a100-80g-4x4" in configs/clusters).

    `what` is "model" or "cluster". A model may be a directory, or an id on the Hub, of which only the config.json is
    downloaded. A ConfigError lists the known names.
    """
    path, known = Path(name), CONFIGS / f"{what}s" / f"{name}.yaml"
    if path.is_file() or (what == "model" and path.is_dir()):
        return path
    if known.is_file():
        return known
    if what == "model" and (config := local_config(name)) != name:
        return Path(config)
    near = did_you_mean(name, known_files(what).split(", "))
    raise ConfigError(f"{what}: {name!r} is neither a file nor a known name{near}; known names: {known_files(what)}")


def known_files(what: str) -> str:
    """Return the names that `find_file` accepts, separated by commas."""
    return ", ".join(sorted(path.stem for path in (CONFIGS / f"{what}s").glob("*.yaml"))) or "none"


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; raise ConfigError if it is invalid or not a mapping."""
    import yaml  # imported here, because simulating needs no YAML

    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: {path} holds a {type(values).__name__}; expected fields, `name: value`")
    return values
