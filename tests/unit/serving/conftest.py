from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A server on a free port, with its queue, its worker, its log, and clients."""
    from live_app import running_service

    with running_service(tmp_path) as running:
        yield running
