"""The imports among the modules of the package and its tests, read from their source.

`tests/unit/test_house_rules.py` checks their direction. As a program, it prints the test files that a change can
affect, for `scripts/test.sh --quick`: python scripts/lib/import_graph.py [revision]
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def files_in(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mllm_seqpar", *parts) if parts[0] == "patches" else parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in files_in("mllm_seqpar", "patches")}
"""The modules of the package by their full names."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    collects = gc.isenabled()
    gc.disable()  # a tree has no garbage, and collections take two thirds of the time
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if collects:
            gc.enable()


@functools.cache
def statements(path: Path) -> list[ast.stmt]:
    """Return all statements of a file, inner ones included. Expressions, which are most of a tree, import nothing."""
    found, pending = list[ast.stmt](), [parsed(path).body]
    while pending:
        for node in pending.pop():
            if isinstance(node, ast.stmt):
                found.append(node)
            blocks = ("body", "orelse", "finalbody", "handlers", "cases")
            pending += (block for name in blocks if isinstance(block := getattr(node, name, None), list))
    return found


def imports_of(path: Path, nodes: Iterable[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of each module that a file imports, by the given nodes of its tree or by all."""
    module = module_of(path)
    package = module if path.name in ("__init__.py", "__init__.pyi") else module.rpartition(".")[0]
    for node in statements(path) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else base


# Which tests a change can affect.


@functools.cache
def _by_import_name() -> dict[str, Path]:
    """Return the modules of the package, helpers of tests and scripts, by the names that are imported or launched."""
    found = dict(MODULES)
    for path in files_in("scripts", "tests"):
        found.setdefault(
            "tiny_models" if path.parent.name == "tiny_models" and path.stem == "__init__" else path.stem, path
        )
    return found


_IMPORTED_BY_NAME = {
    "mllm_seqpar.kernels.registry": r"mllm_seqpar\.kernels\.\w+",
    "mllm_seqpar.patching.registry": r"mllm_seqpar\.patches\.(?!sizes)\w+",
    "mllm_seqpar.chats.chat_family": r"mllm_seqpar\.patches\.chats\.\w+",
    "mllm_seqpar.planner.model_sizes": r"mllm_seqpar\.patches\.sizes",
}
"""The modules that import others without an import statement: the kernels, and what `mllm_seqpar.families` finds, which
names no module: the families, their chat formats and their sizes."""


@functools.cache
def _used_by(path: Path) -> frozenset[Path]:
    """Return the files that a file imports, or names in a string: modules imported on first use, and programs.

    A name that a package imports on first use stands for the module that its stub imports it from.
    """
    known, names = _by_import_name(), list[str]()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for (_, base), alias in zip(imports_of(path, [node]), node.names, strict=True):
                names += [_stub_of(base).get(alias.name, base), f"{base}.{alias.name}"]
    if path.name.startswith("test_"):
        names += re.findall(r"mllm_seqpar(?:\.\w+)+", path.read_text(encoding="utf-8"))
        names += re.findall(r"(\w+)\.py\b", path.read_text(encoding="utf-8"))
    elif (imported := _IMPORTED_BY_NAME.get(module_of(path))) is not None:
        names += [module for module in MODULES if re.fullmatch(imported, module)]
    elif path == MODULES["mllm_seqpar.__main__"]:
        names += re.findall(r"mllm_seqpar(?:\.\w+)+", MODULES["mllm_seqpar.cli.commands"].read_text(encoding="utf-8"))
    found = {known[name] for name in names if name in known}
    if known["tiny_models"] in found:  # its modules are imported by the names of families
        found |= set(known["tiny_models"].parent.glob("*.py"))
    return frozenset(found - {path})


@functools.cache
def _stub_of(module: str) -> dict[str, str]:
    """Return the names that the stub of a module imports, and the full names of the modules that define them."""
    path = MODULES.get(module)
    stub = None if path is None else path.with_suffix(".pyi")
    if stub is None or not stub.exists():
        return {}
    nodes = [node for node in parsed(stub).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: base
        for node in nodes
        for (_, base), alias in zip(imports_of(stub, [node]), node.names, strict=True)
    }


def users_of(changed: Iterable[Path], files: Iterable[Path]) -> set[Path]:
    """Return the changed files, and those that use one of them directly or through others, starting from `files`."""
    users: dict[Path, set[Path]] = {}
    pending, seen = list(files), set[Path]()
    while pending:
        path = pending.pop()
        if path not in seen:
            seen.add(path)
            pending += _used_by(path)
            for used in _used_by(path):
                users.setdefault(used, set()).add(path)
    pending, reached = list(changed), set[Path]()
    while pending:
        path = pending.pop()
        if path not in reached:
            reached.add(path)
            pending += users.get(path, ())
    return reached


def affected_tests(changed: Iterable[str]) -> list[Path] | None:
    """Return the test files that a change can affect; None: all.

    Args:
        changed: the changed files, relative to the root. A page of the server stands for the modules beside it, and a
            document for the tests that read documents. Any other file that is not a module, such as a configuration,
            affects every test.
    """
    tests = [path for path in files_in("tests") if path.name.startswith("test_")]
    sources = {ROOT / "tests/unit/test_house_rules.py"}  # reads all files
    for name in changed:
        path = ROOT / name
        if path.name == "conftest.py":
            return None
        if path.suffix in (".py", ".pyi"):
            sources.add(path.with_suffix(".py"))
        elif path.parent.name == "page":
            sources |= set(path.parent.parent.glob("*.py"))
        elif path.suffix == ".md":
            sources |= {test for test in tests if ".md" in test.read_text(encoding="utf-8")}
        else:
            return None
    reached = users_of(sources, tests)
    return [path for path in tests if path in reached]


def changed_files() -> list[str] | None:
    """Return the files that differ from the branch main; None on main itself, or without git."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    try:
        if git("rev-parse", "--abbrev-ref", "HEAD") in (["main"], ["HEAD"]):
            return None
        (base,) = git("merge-base", "HEAD", "main")
        return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


if __name__ == "__main__":
    names = sys.argv[1:] or changed_files()
    found = None if names is None else affected_tests(names)
    print("\n".join(["tests"] if found is None else [str(path.relative_to(ROOT)) for path in found]))
