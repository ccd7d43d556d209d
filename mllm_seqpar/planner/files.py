"""Reading YAML into frozen dataclasses, with errors that name the file, the field and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from mllm_seqpar.errors import ConfigError

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""Where files that are asked for by name lie: inside the installed package, at the top of the repository."""


def find_file(what: str, name: str) -> Path:
    """The file of a name ("a100-80g-4x4": in configs/clusters), or a path.

    Raises:
        ConfigError: neither; says which names there are.
    """
    if Path(name).exists():
        return Path(name)
    folder = CONFIGS / f"{what}s"
    named = folder / f"{name}.yaml"
    if named.is_file():
        return named
    raise ConfigError(f"{what}: {name!r} is neither a file nor a name that is known here ({known_files(what)})")


def known_files(what: str) -> str:
    """The names that `find_file` knows."""
    return ", ".join(sorted(path.stem for path in (CONFIGS / f"{what}s").glob("*.yaml"))) or "none"


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: no such file, no YAML, or something else in it.
    """
    import yaml  # here, so that simulating needs no YAML

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}; configs/{what}s holds some")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: {path} holds {type(values).__name__}; it must hold fields, `name: value`")
    return values


def build(cls: type[T], values: Mapping[str, Any], origin: str, units: Mapping[str, str] | None = None) -> T:
    """An object of a dataclass from a mapping of its fields.

    YAML reads 25e9, without a dot, as text: numbers written so are taken as numbers.

    Raises:
        ConfigError: fields that are missing or unknown, or bad values; `origin` says where they stand.
    """
    units = units or {}
    all_fields: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    known = {field.name: field for field in all_fields}
    unknown = sorted(map(str, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{origin}: unknown field {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    missing = [f.name for f in all_fields if f.default is MISSING and f.name not in values]
    if missing:
        told = ", ".join(f"{name} ({units[name]})" if name in units else name for name in missing)
        raise ConfigError(f"{origin}: {told} missing")
    try:
        return cls(**{name: _number(known[name], value) for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _number(field: Field[Any], value: Any) -> Any:
    if isinstance(value, str) and "float" in str(field.type):
        try:
            return float(value)
        except ValueError:
            return value  # refused by name in the class
    return value
