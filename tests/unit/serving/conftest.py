from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def service(tmp_path: Path, openai: Any) -> Iterator[SimpleNamespace]:
    """A server on a free port, with its queue, its worker, its log, and clients."""
    from live_app import running_service

    with running_service(tmp_path) as running:
        yield running


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A video of 4 seconds that gets brighter, small enough for the limits of the server."""
    import av
    import numpy as np

    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 60 * number, dtype=np.uint8))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path
