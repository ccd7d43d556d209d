"""Import of the function of a command, named as "module:function"."""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Callable
from typing import Any


def load_entry(entry: str) -> Callable[..., Any]:
    """Return the function that `entry` ("module:function") names.

    The import runs without garbage collection: torch and transformers create a million objects that stay, and
    scanning them repeatedly would take a sixth of the start-up time. Later collections skip them as well (`gc.freeze`).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(entry)
        return function
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
