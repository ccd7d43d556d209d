"""Layer: real launch. The wheel, installed into an environment without this repository, works."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mllm_seqpar

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.launch
def test_wheel_works_outside_the_repository(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("mllm_seqpar-*.whl")
    assert wheel.name.startswith(f"mllm_seqpar-{mllm_seqpar.__version__}-")
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False)
    python = clean / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # The dependencies are borrowed from this environment: only the .pth files of editable installs are left out.
    borrowed = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (packages / "dependencies.pth").write_text("\n".join(borrowed))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    said = run(python, ROOT / "tests" / "launch" / "wheel_smoke.py", cwd=tmp_path)
    assert f"mllm-seqpar {mllm_seqpar.__version__} from {packages.resolve()}" in said
