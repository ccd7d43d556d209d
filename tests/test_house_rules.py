"""Layer: pure Python. The rules of the house that no linter knows: direction of imports, no `global`, shell scripts."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each part of the package may import besides the standard library. A part that is not listed belongs to the core.
CORE = {"torch", "core", "planner"}
MAY_IMPORT = {
    "core": CORE,
    "models": CORE
    | {"numpy", "PIL", "safetensors", "tokenizers", "transformers", "models", "open_clip", "open_flamingo"},
    "data": CORE | {"numpy", "PIL", "safetensors", "av", "tokenizers", "transformers", "data"},
    "planner": CORE | {"yaml", "planner"},
    "running": CORE | {"safetensors", "transformers", "tqdm", "models", "running"},
    "training": CORE | {"numpy", "accelerate", "peft", "transformers", "data", "running", "training"},
    "inference": CORE | {"transformers", "data", "running", "inference"},
    "patches": CORE | {"transformers", "models", "patches"},
}
OUTER_PARTS = MAY_IMPORT.keys() - {"core"}

PYTHON_FILES = [
    path for folder in ("mllm_seqpar", "patches", "scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
]
PACKAGE_FILES = [path for path in PYTHON_FILES if path.relative_to(ROOT).parts[0] in ("mllm_seqpar", "patches")]
SHELL_SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: "mllm_seqpar.models.mplug_owl3" -> "models"."""
    below = module.split(".")[1:2]
    return below[0] if below and below[0] in OUTER_PARTS else "core"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mllm_seqpar", *parts) if parts[0] == "patches" else parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports, inside functions and for type checkers too."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield node.lineno, base
            if base == "mllm_seqpar":  # `from mllm_seqpar import models` imports a part
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_dependencies_point_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    if path == ROOT / "mllm_seqpar" / "__init__.py":
        part = "training"  # it names what is public, all parts' names among them, and imports nothing by itself
    wrong = []
    for line, imported in imports_of(path):
        top = imported.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        target = part_of(imported) if top == "mllm_seqpar" else top
        if target not in MAY_IMPORT[part]:
            wrong.append(f"{name_of(path)}:{line} imports {imported}; {part} may import {sorted(MAY_IMPORT[part])}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_no_global_statement(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]
    assert not lines, (
        f"{name_of(path)}: `global` on lines {lines}; pass the state as an argument or keep it in an object"
    )


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=name_of)
def test_shell_scripts_stop_at_the_first_error(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines, f"{name_of(path)} goes on after an error"
    assert os.access(path, os.X_OK), f"{name_of(path)} is not executable: git update-index --chmod=+x"
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_every_package_folder_is_a_package() -> None:
    missing = sorted({name_of(path.parent) for path in PACKAGE_FILES if not (path.parent / "__init__.py").exists()})
    assert not missing, f"no __init__.py in {missing}: the search of setup.py would leave them out of the wheel"


def test_what_installs_is_all_there(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    named = {*(path.relative_to(ROOT) for path in PACKAGE_FILES), *configs, Path("mllm_seqpar/py.typed")}
    expected = {path if path.parts[0] == "mllm_seqpar" else Path("mllm_seqpar") / path for path in named}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == expected


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("mllm_seqpar", ["torch", "transformers", "accelerate"]),
        ("mllm_seqpar.attention", ["transformers", "accelerate"]),
        ("mllm_seqpar.patching", ["transformers", "accelerate"]),
        ("mllm_seqpar.data", ["transformers", "av"]),
    ],
)
def test_importing_stays_light(imported: str, absent: list[str]) -> None:
    code = f"import sys, {imported}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"import {imported} also imports {done.stdout}"


def test_every_public_name_exists() -> None:
    import mllm_seqpar

    missing = [name for name in mllm_seqpar.__all__ if not hasattr(mllm_seqpar, name)]
    assert not missing
    assert set(mllm_seqpar.__all__) == set(mllm_seqpar._HOME)
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        _ = mllm_seqpar.ring


def test_oldest_versions_are_written_once() -> None:
    from mllm_seqpar._compat import MINIMUM

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(line.split(">=") for line in project["dependencies"])
    assert {package: asked[package] for package in MINIMUM} == MINIMUM
