import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of scripts/ or scripts/bench/ by name; it is forgotten after the test."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    # Libraries that probe for an optional package "kernels" find the folder tests/unit/kernels and import it.
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if str(SCRIPTS) in file and str(SCRIPTS / "lib") not in file:
            del sys.modules[name]
