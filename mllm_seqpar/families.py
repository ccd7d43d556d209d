"""The index of the model families in `mllm_seqpar.patches`: a family is named here and imported on first use.

Only the standard library is imported, so that the core and the planner can look up a family without importing its
model code. The convention of a family is written down in `mllm_seqpar.patches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One entry of the index `mllm_seqpar.patches.FAMILIES`.

    Attributes:
        name: the name of its function in `mllm_seqpar.patches.sizes`.
        family_class: the name of its class (`Family`).
        model_types: `model_types` of the family's class, for the planner, which does not import the class.
        module: the module of `mllm_seqpar.patches` with the class; if empty, it is called `name`.
    """

    name: str
    family_class: str
    model_types: tuple[str, ...] = ()
    module: str = ""

    def load(self) -> Any:
        """Import and return the family's class."""
        return getattr(import_module(f"mllm_seqpar.patches.{self.module or self.name}"), self.family_class)

    def model_sizes(self, config: dict[str, Any], name: str) -> Any:
        """Return the `ModelSizes` of a configuration, as the family's class does, without importing the class."""
        return getattr(import_module("mllm_seqpar.patches.sizes"), self.name)(config, name)


def family_specs() -> tuple[FamilySpec, ...]:
    """Return the families of this package, in the order in which adapters are tried."""
    specs: tuple[FamilySpec, ...] = import_module("mllm_seqpar.patches").FAMILIES
    return specs
