import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from launch import ROOT

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of scripts/, scripts/docs/ or scripts/bench/ by name; it is forgotten after the test."""
    for folder in ("", "docs", "bench"):
        monkeypatch.syspath_prepend(str(SCRIPTS / folder))
    # Libraries that probe for an optional package "kernels" find the folder tests/unit/kernels and import it.
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if str(SCRIPTS) in file and str(SCRIPTS / "lib") not in file:
            del sys.modules[name]
