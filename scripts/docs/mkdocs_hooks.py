"""Hooks of the documentation site: the page of CONTRIBUTING.md, which lies outside docs/, and the repository's link."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Link the site to the repository that it is built from, if that has an address on the web."""
    url = repository_url(Path(config["config_file_path"]).parent)
    if url is not None and not config["repo_url"]:
        config["repo_url"], config["repo_name"] = url, "/".join(url.split("/")[-2:])
    return config


def repository_url(folder: Path) -> str | None:
    """Return the web address of a checkout's repository: that of the CI run, or of the remote `origin`; or None."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    command = ["git", "-C", str(folder), "remote", "get-url", "origin"]
    try:
        return web_address(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    except OSError:  # no git
        return None


def web_address(remote: str) -> str | None:
    """Return the https address of a remote such as git@HOST:USER/NAME.git, without a user name; None for a path."""
    pattern = r"(?:(?:https?|ssh)://(?:[^@/]*@)?|[\w.-]+@)([\w.-]+\.\w+)(?::\d+)?[/:](\S+?)(?:\.git)?/?"
    found = re.fullmatch(pattern, remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page; links to docs/ become relative to docs/."""
    if page.file.src_path != "contributing.md":
        return markdown
    text = (Path(config["config_file_path"]).parent / "CONTRIBUTING.md").read_text()
    return text.replace("](docs/", "](")
