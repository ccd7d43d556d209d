"""Layer: pure Python. Pages of docs/: links lead somewhere, named files exist, examples print what they show."""

import importlib
import re
from pathlib import Path

import pytest

from launch import ROOT
from mllm_seqpar.config import CHOICES

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    """Return the text of a page without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def test_links_lead_somewhere() -> None:
    dead = []
    for page in [*PAGES, *TOP_PAGES]:
        for target in LINK.findall(prose(page)):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if path.startswith(("http:", "https:", "mailto:")):
                continue
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
                dead.append(f"{page.name}: {target}")
    assert not dead, dead


def test_named_files_and_functions_exist() -> None:
    """A named file lies at the top of the repository or in the package; after a colon, it defines that function."""
    wrong = []
    for page in [*PAGES, *TOP_PAGES]:
        for path, name in re.findall(r"`([a-z_]+/[\w/]+\.(?:py|sh|yaml|yml)):?(\w*)`", page.read_text()):
            found = next((file for top in (ROOT, ROOT / "mllm_seqpar") if (file := top / path).exists()), None)
            if found is None or (name and f"def {name}(" not in found.read_text()):
                wrong.append(f"{page.name}: {path}:{name}")
        for path in re.findall(r"\b(?:scripts|configs)/[\w/.-]+\.(?:py|sh|yaml)\b", page.read_text()):
            if not (ROOT / path).exists():
                wrong.append(f"{page.name}: {path}")
    assert not wrong, wrong


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES}


def test_every_strategy_is_described() -> None:
    page = (DOCS / "guides" / "choose_strategy.md").read_text()
    assert not [
        name for option in ("strategy", "self_attention") for name in CHOICES[option] if f'"{name}"' not in page
    ]


def test_selection_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "concepts" / "auto.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "select_strategy(" in block]
    exec(compile(code.replace('"configs/', f'"{ROOT}/configs/'), "auto.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_reference_pages_name_existing_objects() -> None:
    directive = re.compile(r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\])?", re.MULTILINE)
    wrong = []
    for page in (DOCS / "reference").glob("*.md"):
        for module, members in directive.findall(page.read_text()):
            found = importlib.import_module(module)
            wrong += [f"{module}.{name}" for name in re.findall(r"\w+", members) if not hasattr(found, name)]
    assert not wrong, wrong
