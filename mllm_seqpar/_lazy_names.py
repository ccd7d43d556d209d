"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def lazy_names(package: str, defined_in: Mapping[str, str]) -> None:
    """Give a package the names that other modules define, by a `__getattr__` (PEP 562).

    The function sets it where type checkers do not see it: they would otherwise accept every name.

    Args:
        package: `__name__` of the package.
        defined_in: for each name, the module that defines it, relative to the package or with its full name.
    """

    def import_name(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = defined_in[name]
        absolute = module.startswith("mllm_seqpar.")
        value = getattr(importlib.import_module(module if absolute else f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    sys.modules[package].__dict__["__getattr__"] = import_name


def names_of_stub(file: str) -> dict[str, str]:
    """Return the names that the stub of a module imports, and the modules that it imports them from.

    Type checkers read the same stub, so that a table of names is written once.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
