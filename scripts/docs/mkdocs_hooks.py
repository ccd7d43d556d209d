"""Insert CONTRIBUTING.md, which lies outside docs/, into the documentation site."""

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page; links to docs/ become relative to docs/."""
    if page.file.src_path != "contributing.md":
        return markdown
    text = (Path(config["config_file_path"]).parent / "CONTRIBUTING.md").read_text()
    return text.replace("](docs/", "](")
