from pathlib import Path

import pytest

from family_directories import MAKERS, family_folder


@pytest.fixture(params=["gated", *(pytest.param(name, marks=pytest.mark.slow) for name in MAKERS)])
def case(request: pytest.FixtureRequest, inference_files: Path) -> tuple[Path, str]:
    """A model directory and a video."""
    if request.param == "gated":
        return inference_files / "gated", str(inference_files / "clip.mp4")
    return family_folder() / request.param, str(family_folder() / "clip.mp4")
