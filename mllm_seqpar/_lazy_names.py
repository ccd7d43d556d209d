"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, defined_in: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the module-level `__getattr__` of a package (PEP 562).

    Args:
        package: `__name__` of the package.
        defined_in: for each name, the module that defines it, relative to the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{defined_in[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return __getattr__
