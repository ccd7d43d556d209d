"""Layer: pure Python. Rules that no linter checks: imports, cycles, private names of other packages, shell scripts."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mllm_seqpar
from import_graph import MODULES, files_in, imports_of, module_of, parsed, statements
from launch import PYTHON, ROOT
from mllm_seqpar._compat import INTERNALS, MINIMUM

ORDER = (
    "errors _lazy_names _compat _logging _transfers digests fsdp_units schedules comm sharding config masks kernels "
    "attention recomputation chunked_mlp runtime families patching models integrations videos chats data processors "
    "planner cli inference serving training adapting patches __main__"
).split()
"""Parts of the package. A part imports only parts before it; see CONTRIBUTING.md."""

PROGRAMS = {"videos", "chats", "data", "processors", "planner", "cli", "inference", "serving", "training", "__main__"}
"""The parts that know chats, files and users. All others are the library, which knows models, tensors and ranks."""

THIRD_PARTY = {
    "kernels": "triton",
    "integrations": "accelerate numpy transformers",
    "models": "numpy PIL safetensors tokenizers transformers open_clip open_flamingo huggingface_hub",
    "processors": "numpy PIL transformers",
    "videos": "numpy PIL av filelock",
    "chats": "numpy PIL safetensors tokenizers transformers pyarrow",
    "planner": "yaml",
    "cli": "matplotlib safetensors tqdm transformers yaml",
    "inference": "lmms_eval transformers",
    "serving": "anyio fastapi prometheus_client pydantic pydantic_core python_multipart starlette transformers uvicorn",
    "training": "accelerate huggingface_hub matplotlib peft transformers yaml",
    "patches": "numpy PIL tokenizers transformers open_flamingo",
}
"""What a part may import besides torch and the standard library. Parts that are not listed may import nothing else."""

LAZY = {("patching", "mllm_seqpar.planner.auto"), ("families", "mllm_seqpar.patches"), ("patches", "mllm_seqpar")}
LAZY |= {("__main__", "mllm_seqpar"), ("cli", "mllm_seqpar"), ("training", "mllm_seqpar")}  # the version
"""Imports inside functions that connect a part with one above it, and names that the package loads on first use."""

NO_TORCH = {"errors", "schedules"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def package() -> dict[Path, ast.Module]:
    """Return the modules of the package, parsed."""
    return {path: parsed(path) for path in MODULES.values()}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "mllm_seqpar"


@functools.cache
def imports_at_run_time(path: Path) -> list[tuple[int, str]]:
    """Return the line and the full name of each module that a module imports, also inside functions."""
    skipped = type_checking_only(path)
    return list(imports_of(path, (node for node in statements(path) if node not in skipped)))


def type_checking_only(path: Path) -> set[ast.AST]:
    """Return the nodes inside `if TYPE_CHECKING:`."""
    blocks = [
        node for node in statements(path) if isinstance(node, ast.If) and vars(node.test).get("id") == "TYPE_CHECKING"
    ]
    return {inner for block in blocks for inner in ast.walk(block)}


def test_imports_point_one_way() -> None:
    wrong = []
    for path in package():
        part = part_of(module_of(path))
        if part == "mllm_seqpar":  # the package itself names what is public and imports it on first use
            continue
        for line, imported in imports_at_run_time(path):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names:
                continue
            if top == "mllm_seqpar":
                target = part_of(imported)
                above = target == "mllm_seqpar" or ORDER.index(target) > ORDER.index(part)
                allowed = not above or (part, imported) in LAZY
            else:
                allowed = top in THIRD_PARTY.get(part, "").split() or (top == "torch" and part not in NO_TORCH)
            if not allowed:
                wrong.append(f"{name_of(path)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


def is_program(module: str) -> bool:
    half_of_patches = module.removeprefix("mllm_seqpar.patches.").partition(".")[0]
    return part_of(module) in PROGRAMS or (part_of(module) == "patches" and half_of_patches in ("chats", "sizes"))


def test_library_imports_no_program() -> None:
    """Imports inside functions and for type checking count, and the names that families import from the toolkit."""
    stub = ast.parse((ROOT / "mllm_seqpar/adapting.pyi").read_text())
    toolkit = {x.name: str(n.module) for n in stub.body if isinstance(n, ast.ImportFrom) for x in n.names}
    wrong = []
    for path, tree in package().items():
        if is_program(module_of(path)):
            continue
        for line, imported in imports_of(path):
            if is_program(imported) and imported != "mllm_seqpar.planner.auto":
                wrong.append(f"{name_of(path)}:{line} imports {imported}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "mllm_seqpar.adapting":
                names = [x.name for x in node.names if is_program(toolkit[x.name])]
                wrong += [f"{name_of(path)}:{node.lineno} imports {name} of {toolkit[name]}" for name in names]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_patching_imports_no_program_and_one_family() -> None:
    code = """
import sys
from tiny_models.mplug_owl3 import tiny_model
from mllm_seqpar import patch_model
patch_model(tiny_model())
print(*(name for name in sys.modules if name.startswith("mllm_seqpar.")))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts/lib")}
    done = subprocess.run(
        [*PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=True
    )
    imported = done.stdout.split()
    assert "mllm_seqpar.patches.mplug_owl3" in imported and "mllm_seqpar.patches.mllama" not in imported
    assert not [name for name in imported if is_program(name)]
    assert len(imported) <= 90, "a module that one option, strategy or device needs is imported where that is found out"


def test_adapters_import_the_public_toolkit_only() -> None:
    """What the families of this package need, a family of another package can have as well."""
    wrong = []
    for path in package():
        if part_of(module_of(path)) != "patches":
            continue
        for line, imported in imports_of(path):
            # Besides the toolkit: the native models that families patch, and the registry.
            allowed = {"adapting", "models", "patches"}
            if imported.partition(".")[0] == "mllm_seqpar" and part_of(imported) not in allowed:
                wrong.append(f"{name_of(path)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


OF_EVERY_MODULE = {"_modules", "_parameters", "_buffers"}
OF_EVERY_MODULE |= {f"_{name}hooks" for name in ("forward_", "forward_pre_", "backward_", "backward_pre_")}
"""The dictionaries of torch's `nn.Module`, which subclasses read."""

KNOWN_INTERNALS = re.compile(
    r"(_get_fsdp_state|_training_state|_pre_forward|_post_forward|_model_mapping|_option_string_actions|_prepare_cp"
    r"|_get_backend|accelerator\._models)\b"
)
"""Private names that are read from objects, where no import shows whose they are."""


def internals_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of private names that are read from imports of other packages."""
    foreign = set()
    for node in ast.walk(tree):
        module = getattr(node, "module", None) or ""
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "level", 0):
            continue
        if module.partition(".")[0] != "mllm_seqpar":
            foreign |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if "._" in module or any(alias.name.startswith("_") for alias in node.names):
                yield node.lineno, module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr) and node.attr not in OF_EVERY_MODULE:
            owner: ast.AST = node
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in foreign:
                yield node.lineno, ast.unparse(node)


def test_private_names_are_imported_from_other_packages_in_four_modules() -> None:
    allowed = {"mllm_seqpar/_compat.py", *(f"mllm_seqpar/{name}.py" for name in INTERNALS)}
    assert len(allowed) <= 4 and all((ROOT / name).exists() for name in allowed)
    wrong = []
    for path, tree in package().items():
        if name_of(path) in allowed or "kernels" in path.parts:  # names of operators begin with an underscore
            continue
        wrong += [f"{name_of(path)}:{line} uses {name}" for line, name in internals_in(tree) if name != "os._exit"]
        wrong += [f"{name_of(path)} uses {found[0]}" for found in KNOWN_INTERNALS.finditer(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    """Imports inside functions and those for type checking count."""
    graph = {}
    for path in package():
        module = module_of(path)
        graph[module] = {name for _, name in imports_of(path) if name in MODULES} - {module}
    TopologicalSorter(graph).prepare()  # a CycleError names the modules of the cycle


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for path, tree in package().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name_of(path))
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not shared, shared


def test_scripts_use_nothing_of_the_tests() -> None:
    for path in files_in("scripts"):
        if path.stem == "import_graph":  # lists the tests, and imports none
            continue
        assert '"tests"' not in path.read_text(), f"{name_of(path)}: move what scripts and tests share to scripts/lib"


def test_shell_scripts_stop_at_the_first_error() -> None:
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        lines = path.read_text().splitlines()
        assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines, name_of(path)
        assert os.access(path, os.X_OK), f"{name_of(path)} is not executable: git update-index --chmod=+x"
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.slow
def test_wheel_contains_every_module_and_config(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    named = {*(path.relative_to(ROOT) for path in package()), *configs, Path("mllm_seqpar/py.typed")}
    named |= {path.relative_to(ROOT) for path in (ROOT / "mllm_seqpar").glob("*/page/*")}
    named |= {path.relative_to(ROOT) for path in (ROOT / "mllm_seqpar").rglob("*.pyi")}
    expected = {path if path.parts[0] == "mllm_seqpar" else Path("mllm_seqpar") / path for path in named}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == expected


@pytest.mark.slow
def test_imports_stay_light() -> None:
    code = """
import sys
def absent(*names): print([name for name in names if name in sys.modules])
import mllm_seqpar; absent("torch", "transformers", "accelerate")
from mllm_seqpar.adapting import ModelSizes; absent("torch", "transformers", "accelerate")
import mllm_seqpar.attention, mllm_seqpar.kernels; absent("transformers", "accelerate", "triton")
import mllm_seqpar.patching; absent("transformers", "accelerate", "triton")
import mllm_seqpar.data; absent("transformers", "av")
from mllm_seqpar.adapting import ChatFamily, KVProjection; absent("transformers", "accelerate")
"""
    done = subprocess.run([*PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    assert done.stdout.split("\n")[:6] == ["[]"] * 6, done.stdout


def test_every_public_name_exists() -> None:
    assert not [name for name in mllm_seqpar.__all__ if not hasattr(mllm_seqpar, name)]
    with pytest.raises(AttributeError, match="no attribute 'ring'"):
        _ = mllm_seqpar.ring


def test_versions_are_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = dict(line.split(">=") for line in project["project"]["dependencies"])
    assert {package: asked[package] for package in MINIMUM} == MINIMUM
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mllm_seqpar.__version__"}
    assert f"\n## [{mllm_seqpar.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {mllm_seqpar.__version__}\n" in (ROOT / "CITATION.cff").read_text()
