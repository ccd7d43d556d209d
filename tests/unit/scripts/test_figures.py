"""Layer: pure Python. The figures and tables of docs/ show what the schedules are today."""

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from launch import ROOT

DOCS = ROOT / "docs"


def texts(path: Path) -> list[str]:
    nodes = xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()) for node in nodes]


def pages() -> str:
    return " ".join(path.read_text() for path in DOCS.rglob("*.md"))


def test_figures_show_the_schedules_of_today(script) -> None:
    figures = script("figures")
    for name, make in figures.FIGURES.items():
        path, data = DOCS / "figures" / f"{name}.svg", make()
        assert path.read_text() == figures.draw(data), f"docs/figures/{name}.svg: run python scripts/docs/figures.py"
        shown = texts(path)
        for panel in data.panels:
            for rank, cells in panel.rows:
                assert rank in shown
                assert all(sent.label in shown for cell in cells for sent in cell.sent)


def test_every_figure_is_shown_on_a_page() -> None:
    text, files = pages(), [*(DOCS / "figures").iterdir(), *(DOCS / "benchmarks").glob("*.png")]
    assert not [file for file in files if not re.search(rf"\]\([^)\s]*{file.parent.name}/{file.name}\)", text)]


def test_tables_of_bytes_sent_are_those_of_the_formulas(script) -> None:
    sent, text = script("sent"), pages()
    for case in sent.CASES:
        assert sent.table(case) in text, f"the table {case} has changed: run python scripts/docs/sent.py"


def test_site_links_to_the_repository_by_its_web_address(script, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = script("mkdocs_hooks")
    expected = "https://example.org/user/name"
    for remote in (
        "https://example.org/user/name.git",
        "https://someone:secret@example.org/user/name",
        "git@example.org:user/name.git",
        "ssh://git@example.org:2222/user/name.git",
    ):
        assert hooks.web_address(remote) == expected, remote
    assert hooks.web_address("/srv/name.git") is None and hooks.web_address("") is None
    config = {"config_file_path": str(ROOT / "mkdocs.yml"), "repo_url": "", "repo_name": None}
    monkeypatch.setenv("GITHUB_REPOSITORY", "user/name")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    assert hooks.on_config(config)["repo_url"] == expected and config["repo_name"] == "user/name"
