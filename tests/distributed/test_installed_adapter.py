"""Layer: gloo ranks. The adapter of an installed package is found by its entry point alone."""

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from captioner_cases import CASES, compare
from ranks import ranks

EXAMPLE = Path(__file__).resolve().parents[1] / "example_adapter"


def install(folder: Path) -> None:
    """Write what an installer would: the example's modules, and the entry points of its `pyproject.toml`."""
    described = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    project = described["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for module in described["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", folder)


def compare_all(rank: int, world: int) -> list[bool]:
    """Return whether the adapter was imported before, and after the cases."""
    imported = ["captioner_adapter" in sys.modules]
    for case in CASES.values():
        compare(*case)
    return [*imported, "captioner_adapter" in sys.modules]


def test_adapter_of_an_installed_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # the workers take it over
    assert ranks(2).run(compare_all) == [[False, True]] * 2
