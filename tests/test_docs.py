"""Layer: pure Python, and loopback ranks. Pages of docs/: their links lead somewhere, figures are what is drawn now."""

import importlib
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from mllm_seqpar.config import CHOICES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def scripts():
    """Imports a module of scripts/docs."""
    sys.path.insert(0, str(ROOT / "scripts" / "docs"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "scripts" / "docs"))
        for name in ("figures", "grid", "panels", "sent"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def figures(scripts):
    """The module that draws them."""
    return scripts("figures")


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
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "choose(" in block]
    exec(compile(code.replace('"configs/', f'"{ROOT}/configs/'), "auto.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text()))
    assert {page.name for page in PAGES} - {"README.md"} <= listed


def test_every_choice_of_attention_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    named = {f'"{value}"' for option in ("strategy", "self_attention") for value in CHOICES[option]}
    assert not {name for name in named if name not in index}


def test_the_index_has_the_bytes_that_formulas_give(scripts) -> None:
    sent, index = scripts("sent"), (DOCS / "README.md").read_text()
    for case in sent.CASES:
        assert sent.table(case) in index, f"{case}: the table is another now: python scripts/docs/sent.py"


def test_figures_are_what_is_drawn_now(figures) -> None:
    drawn = {f"{name}.svg": make() for name, make in figures.FIGURES.items()}
    kept = {path.name: path.read_text() for path in (DOCS / "figures").glob("*.svg")}
    assert sorted(drawn) == sorted(kept)
    old = [name for name in drawn if drawn[name] != kept[name]]
    assert not old, f"{old} of docs/figures are not what the schedules are now: python scripts/docs/figures.py"


def test_every_figure_is_shown_on_a_page(figures) -> None:
    shown = {target for page in PAGES for target in LINK.findall(page.read_text()) if target.startswith("figures/")}
    assert {f"figures/{name}.svg" for name in figures.FIGURES} <= shown


@pytest.mark.parametrize("backward", [False, True])
def test_a_tile_of_ones_own(figures, backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tile.svg"
    options = ["--tile", "2", "4", "--output", str(path), *(["--backward"] if backward else [])]
    monkeypatch.setattr(sys, "argv", ["figures.py", *options])
    figures.main()
    words = [node.text or "" for node in xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    blocks = sum(
        bool(re.fullmatch(r"Q\d", a) and re.fullmatch(r"KV\d", b)) for a, b in zip(words, words[1:], strict=False)
    )
    # 8 ranks with a block of each of 2 rows and 4 columns; in the backward pass the own one has two parts
    assert blocks == 8 * (2 * 4 + backward)
    # a row, and 3 columns, leave a rank, and as many results come home; forward, columns have none
    leaving = sum(word.startswith("\N{RIGHTWARDS ARROW}") for word in words)
    assert leaving == 8 * (1 + 3 + 1 + 3 * backward)
