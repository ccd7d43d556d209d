"""Layer: real launch. The launch helper of the tests: a hang ends with the output so far.

That output and exit status of all ranks come back is shown by the tests that launch the scripts.
"""

import sys
from pathlib import Path

import pytest

from launch import LaunchHang, launch


def test_a_hang_shows_the_output_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('about to hang'); time.sleep(600)")
    monkeypatch.setattr("launch._launcher", lambda *_: [sys.executable])
    with pytest.raises(LaunchHang, match=r"did not end within 2 s; it wrote:\n(.*\n)*about to hang"):
        launch(1, script, timeout=2)
