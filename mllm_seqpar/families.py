"""The model families in `mllm_seqpar.patches`, imported on first use.

Only the standard library is imported, so that the core and the planner can look up a family without importing its
model code. The convention of a family is written down in `mllm_seqpar.patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def built_in_families() -> list[Any]:
    """Import and return the classes of the families of this package, in the order in which adapters are tried."""
    places = (place.split(":") for place in import_module("mllm_seqpar.patches").FAMILIES.values())
    return [getattr(import_module(f"mllm_seqpar.patches.{module}"), name) for module, name in places]


def built_in_sizes() -> Mapping[str, Callable[[dict[str, Any], str], Any]]:
    """Return `Family.sizes` of the families of this package, without importing their classes."""
    sizes: Mapping[str, Callable[[dict[str, Any], str], Any]] = import_module("mllm_seqpar.patches.sizes").SIZES
    return sizes
