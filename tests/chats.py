"""Conversations of tests, in our own form, and JSONL files of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def asks(*parts: Any) -> dict[str, Any]:
    """Return a message of the user; a text among the parts is a text part."""
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def says(value: str) -> dict[str, str]:
    return {"role": "assistant", "content": value}


def chat(*parts: Any, answer: str = "red") -> dict[str, Any]:
    return {"messages": [asks(*parts), says(answer)]}


def video(path: object, **sampling: Any) -> dict[str, Any]:
    return {"type": "video", "path": str(path), **sampling}


def image(path: object) -> dict[str, str]:
    return {"type": "image", "path": str(path)}


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write records as JSONL; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
