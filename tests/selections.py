"""The parameters of a test that the quick suite keeps."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters of a test, slow ones unless `quick(value)`; a tuple is a row of parameters."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*row, marks=() if quick(value) else pytest.mark.slow) for value, row in rows]
