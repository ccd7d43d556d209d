"""Progress bars on stderr."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int, unit: str, what: str, done: int = 0) -> Any:
    """A tqdm bar that stands at `done` of `total`."""
    from tqdm import tqdm

    # In a log file a bar that moves ten times a second is noise.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, initial=done, unit=unit, desc=what, mininterval=pause)
