"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def lazy_names(package: str, defined_in: Mapping[str, str]) -> None:
    """Give a package the names that other modules define, by a `__getattr__` (PEP 562).

    The function sets it where type checkers do not see it: they would otherwise accept every name.

    Args:
        package: `__name__` of the package.
        defined_in: for each name, the module that defines it, relative to the package.
    """

    def import_name(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{defined_in[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    sys.modules[package].__dict__["__getattr__"] = import_name
