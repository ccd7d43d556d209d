"""Layer: one process of mypy. The public toolkit has types in another package, where a wrong adapter is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import ROOT

CONFIG = f"""
[mypy]
mypy_path = {ROOT}
check_untyped_defs = True
no_implicit_reexport = True

[mypy-torch.*,transformers.*,accelerate.*,numpy.*,av.*,PIL.*,huggingface_hub.*,safetensors.*,tqdm.*,yaml,peft.*]
follow_imports = skip
ignore_missing_imports = True

[mypy-mllm_seqpar.*]
follow_imports = silent
"""
"""As another project may set it, with its installed packages read as Any, for speed."""
WRONG = """
from mllm_seqpar import patch_modle  # attr-defined
from mllm_seqpar.adapting import Family, ForwardInputs, FrameMask, KVProjektion, Patch  # attr-defined
from mllm_seqpar.models.mplug_owl3 import MPlugOwl  # attr-defined


class MyFamily(Family[ForwardInputs]):
    def visibility(self, inputs: ForwardInputs, units: int) -> FrameMask:  # override
        return FrameMask.from_intervals(inputs.first, inputs.tokens, 1, units)  # attr-defined

    def install_more(self, patch: Patch) -> None:
        patch.set(self.model, "forward")  # call-arg
"""


@pytest.mark.slow
def test_wrong_adapters_are_type_errors_and_the_documented_ones_are_not(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "add_a_family.md").read_text()
    (family,) = re.findall(r"```python\n(import functools\n.*?)```\n", guide, re.DOTALL)
    (tmp_path / "family.py").write_text(family)
    for name in ("captioner.py", "captioner_adapter.py"):
        shutil.copy(ROOT / "tests" / "example_adapter" / name, tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        "cache",
        "--hide-error-context",
    ]
    done = subprocess.run([*command, *tmp_path.glob("*.py")], cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r"^(.*?):(\d+): error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    lines = enumerate(WRONG.split("\n"), 1)
    assert found == [("wrong.py", str(number), line.split("# ")[1]) for number, line in lines if "# " in line], done
