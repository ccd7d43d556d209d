"""Layer: pure Python. Pages of docs/: their links lead somewhere."""

import re
from pathlib import Path

import pytest

from mllm_seqpar.config import CHOICES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        found = page if not path else (page.parent / path).resolve()
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            dead.append(target)
    assert not dead, f"{page.name}: nothing is at {dead}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_is_named_is_there(page: Path) -> None:
    """A name with a folder lies at the top of the repository, or in the package; after a colon, it defines that."""
    wrong = []
    for path, name in re.findall(r"`([a-z_]+/[\w/]+\.py):?(\w*)`", page.read_text()):
        found = next((file for top in (ROOT, ROOT / "mllm_seqpar") if (file := top / path).exists()), None)
        if found is None or (name and f"def {name}(" not in found.read_text()):
            wrong.append(f"{path}:{name}")
    assert not wrong, f"{page.name} names {wrong}"


def test_what_auto_says_is_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "auto.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "select_strategy(" in block]
    exec(compile(code.replace('"configs/', f'"{ROOT}/configs/'), "auto.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text()))
    assert {page.name for page in PAGES} - {"README.md"} <= listed


def test_every_choice_of_attention_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    named = {f'"{value}"' for option in ("strategy", "self_attention") for value in CHOICES[option]}
    assert not {name for name in named if name not in index}
