"""The model families in `mllm_seqpar.patches`, found by the index there, each imported on first use.

Only the standard library is imported, so that the core and the planner can look up a family without importing its
model code, and a lookup imports no other family. The convention of a family is written down in `mllm_seqpar.patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any


def family_index() -> Mapping[str, Any]:
    """Return `FAMILIES` of `mllm_seqpar.patches`."""
    index: Mapping[str, Any] = import_module("mllm_seqpar.patches").FAMILIES
    return index


def _imported(place: str) -> Any:
    return resolve_name(f"mllm_seqpar.patches.{place}")


def built_in_families(model_classes: Collection[str] | None = None) -> list[Any]:
    """Import and return the families whose models have a class of these names, or all, in the order of the index."""
    entries = family_index().values()
    return [_imported(x.family) for x in entries if model_classes is None or x.model_class in model_classes]


def built_in_chats(processor_classes: Collection[str]) -> list[tuple[Any, Any]]:
    """Import and return (family, chat format) of the families whose processors have a class of these names."""
    entries = family_index().values()
    return [(_imported(x.family), _imported(x.chats)) for x in entries if x.processor in processor_classes]


def built_in_sizes() -> Mapping[str, Callable[[dict[str, Any], str], Any]]:
    """Return `Family.sizes` of the families of this package, without importing their classes."""
    sizes: Mapping[str, Callable[[dict[str, Any], str], Any]] = import_module("mllm_seqpar.patches.sizes").SIZES
    return sizes
