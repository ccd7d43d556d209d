"""Layer: one process, loopback ranks. The family that the guide builds on one page equals the unpatched model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from family_harness import check_exact, check_tokens
from mllm_seqpar import register_adapter
from mllm_seqpar.patching import registry
from tiny_models.idefics import Case

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "add_a_family.md"
OPTIONS: dict[str, dict[str, Any]] = {"lv-xattn": {}, "ring": {"strategy": "ring", "mlp_chunk_size": 3}}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the class that the page defines, registered before the family of this package."""
    (code,) = re.findall(r"```python\n(import functools\n.*?)```\n", GUIDE.read_text(), re.DOTALL)
    module = ModuleType("family_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_registered", {})
    exec(compile(code, str(GUIDE), "exec"), vars(module))
    register_adapter(module.adapter)
    return module.adapter


@pytest.mark.parametrize("options", OPTIONS)
def test_family_of_the_guide_equals_unpatched(family: Any, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(family, "install_more", _counting(family.install_more, installed))
    case = Case(frames=(2, 3), mask="before", length=13, options=OPTIONS[options])
    for size in (1, 2, 3):
        check_exact("idefics", size, case)
    assert len(installed) == 6, "another family patched the model"


def test_family_of_the_guide_generates_the_tokens_of_unpatched(family: Any) -> None:
    case = Case(frames=(2, 1), mask="before", labels=None)
    for given in ({}, {"num_beams": 2}):
        check_tokens("idefics", 2, case, given)


def test_class_with_instance_methods_is_no_adapter() -> None:
    class Instances:
        name = "instances"

        def matches(self, model: Any) -> bool:
            return False

        check = install = matches

    with pytest.raises(registry.AdapterError, match="class Instances was given where an instance"):
        register_adapter(Instances)  # type: ignore[arg-type]


def _counting(method: Any, calls: list[Any]) -> Any:
    def call(self: Any, patch: Any) -> None:
        calls.append(self)
        method(self, patch)

    return call
