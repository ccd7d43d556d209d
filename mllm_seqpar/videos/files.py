"""What stores on disk share: atomic writing, the index as JSON, and the settings that data were made with."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import DataError, SeqParError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` unless an exception is raised."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of JSON, complete or not at all, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n")


def require_made_with(
    where: str,
    settings: Mapping[str, Any],
    expected: Mapping[str, Any],
    remedy: str,
    kind: type[SeqParError] = DataError,
) -> None:
    """Raise an error of class `kind` unless the data of `where` were made with the values of `expected`.

    `remedy` is the end of its message: what the user can do.
    """
    for name, value in expected.items():
        if settings.get(name) != value:
            raise kind(f"{where} were made with {name} = {settings.get(name)!r}, and now it is {value!r}; {remedy}")
