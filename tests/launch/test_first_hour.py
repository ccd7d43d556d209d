"""Layer: real launch. Every command of docs/first_hour.md, with the wheel and outside the repository."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mllm_seqpar
from launch import ROOT
from mllm_seqpar.inference.evidence import clock


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=inherited | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. It borrows the dependencies of this one, without its editable installs."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("mllm_seqpar-*.whl")
    assert wheel.name.startswith(f"mllm_seqpar-{mllm_seqpar.__version__}-")
    venv.create(folder / "clean", with_pip=False)
    python = folder / "clean" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    borrowed = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (packages / "dependencies.pth").write_text("\n".join(borrowed))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    return folder / "clean"


@pytest.mark.slow
@pytest.mark.launch
def test_commands_of_the_first_hour_do_what_the_page_says(clean: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first_hour.md").read_text()
    install, *commands = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert install.startswith("pip install") and len(commands) == 6
    path = f"{clean / 'bin'}{os.pathsep}{os.environ['PATH']}"
    imported = run(clean / "bin" / "python", "-c", "import mllm_seqpar; print(mllm_seqpar.__file__)", cwd=tmp_path)
    assert Path(imported.strip()).is_relative_to(clean.resolve())
    variables = {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    said = [run("bash", "-e", "-c", command, cwd=tmp_path, **variables) for command in commands]
    version, example, _, accuracy, answer, chat = said
    assert version.startswith(f"mllm-seqpar {mllm_seqpar.__version__}\n") and "WRONG" not in version
    assert re.search(r"^- +ranks +2 processes, gloo: ", version, re.MULTILINE), version
    exact = [re.findall(r"^ok +exactness +(.*): relative error", text, re.MULTILINE) for text in (version, page)]
    assert exact[0] == exact[1] != [], version
    facts = json.loads(example.splitlines()[0])
    assert f"{facts['frames']}, and the marker is in frame {facts['marker']}" in page
    assert "192 samples, 0 broken" in example
    correct = [json.loads(line)["correct"] for line in (tmp_path / "hour" / "answers.jsonl").read_text().splitlines()]
    assert f"({sum(correct)} of 48)" in accuracy and sum(correct) >= 44
    assert answer.strip() == facts["answer"] and facts["answer"] in chat
    assert clock(facts["marker"]) in (tmp_path / "hour" / "report.html").read_text()
