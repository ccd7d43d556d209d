"""Names of a module that are imported when they are first used, so that importing the module stays cheap.

A stub beside the module, `NAME.pyi`, is the one table of these names: type checkers read it, and so does `lazy_names`.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any


def lazy_names(module: str, file: str) -> list[str]:
    """Give a module the names that its stub imports from other modules, by a `__getattr__` (PEP 562).

    The function sets it where type checkers do not see it: they would otherwise accept every name.

    Args:
        module: `__name__` of the module.
        file: `__file__` of the module, which the stub lies beside.

    Returns:
        The names, for `__all__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    defined_in = {alias.name: f"{'.' * node.level}{node.module}" for node in imports for alias in node.names}

    def import_name(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(defined_in[name], module), name)
        setattr(sys.modules[module], name, value)  # the next use finds it without this function
        return value

    sys.modules[module].__dict__["__getattr__"] = import_name
    return sorted(defined_in)
