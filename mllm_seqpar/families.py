"""Lazy access to the model families in `mllm_seqpar.patches`: a family is described here and imported on first use.

Only the standard library is imported, so that the core, the data code and the planner can look up a family without
importing its model code. The convention of a family folder is written down in `mllm_seqpar.patches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One entry of the registry `mllm_seqpar.patches.FAMILIES`.

    Attributes:
        folder: the family's package in `mllm_seqpar.patches`.
        processors: class names of the processors whose chat format the family's `chat` module implements.
        model_types: values of `model_type` in a `config.json` that the family's `planner` module reads.
    """

    folder: str
    processors: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()

    def module(self, name: str) -> ModuleType:
        """Import and return the family's module `name`: "adapter", "chat" or "planner"."""
        return import_module(f"mllm_seqpar.patches.{self.folder}.{name}")


def family_specs() -> tuple[FamilySpec, ...]:
    """Return the families of this package, in the order in which adapters are tried."""
    specs: tuple[FamilySpec, ...] = import_module("mllm_seqpar.patches").FAMILIES
    return specs
