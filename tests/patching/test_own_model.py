"""Layer: gloo ranks. The README's model of one's own and its adapter, installed as a package and registered."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from launch import launch
from mllm_seqpar import patch_model, register_adapter
from mllm_seqpar.errors import AdapterError, AgreementError, ConfigError, ShapeError
from mllm_seqpar.patching import registry as adapters
from ranks import ranks

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "example_adapter"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the example to."""
    source, target = tmp_path_factory.mktemp("source") / "captioner", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", target]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *map(str, options), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's modules can be imported in this process, and nothing stays registered."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr(adapters, "_registered", {})
    yield


def test_the_installed_package_is_found_by_its_entry_point(installed: Path) -> None:
    done = launch(2, HERE / "own_model.py", env={"PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.output
    assert len(re.findall(r"rank \d of 2: .* equal", done.output)) == 6, done.output


def registered(rank: int, world: int, example: str, **options: object) -> dict[str, float]:
    sys.path[:0] = [example, str(HERE)]
    import own_model
    from captioner_adapter import CaptionerAdapter

    register_adapter(CaptionerAdapter())
    try:
        return {name: own_model.compare(*case, **options) for name, case in own_model.CASES.items()}
    finally:
        del adapters._registered["Captioner"]


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {}), (3, {}), (3, {"strategy": "ring", "recompute_visual": False, "text_layout": "striped"})],
)
def test_registered_in_the_process(world: int, options: dict) -> None:
    for found in ranks(world).run(registered, str(EXAMPLE), **options):
        assert max(found.values()) < 1e-5, found


def test_the_readme_shows_the_tested_code() -> None:
    readme = (HERE.parent.parent / "README.md").read_text()
    section = readme.split("\n## Your own model\n")[1].split("\n## ")[0]
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```\n", section, re.DOTALL))
    adapter, project = (EXAMPLE / "captioner_adapter.py").read_text(), (EXAMPLE / "pyproject.toml").read_text()
    assert blocks["python"] == adapter
    assert blocks["toml"] in project
    assert len(adapter.splitlines()) < 60


def test_the_example_is_written_with_what_is_meant_for_it() -> None:
    imported = re.findall(r"^from (mllm_seqpar\S*) import (.*)$", (EXAMPLE / "captioner_adapter.py").read_text(), re.M)
    assert [module for module, _ in imported] == ["mllm_seqpar.adapting"]
    from mllm_seqpar import adapting

    assert set(imported[0][1].split(", ")) <= set(adapting.__all__)
    assert all(hasattr(adapting, name) for name in adapting.__all__)


def test_without_the_adapter_the_error_says_how_to_add_one(example: None) -> None:
    from captioner import Captioner

    with pytest.raises(AdapterError, match=r"no adapter knows captioner\.Captioner.*mllm_seqpar\.register_adapter"):
        patch_model(Captioner())


def test_an_option_that_the_adapter_refuses(example: None) -> None:
    from captioner import Captioner
    from captioner_adapter import CaptionerAdapter

    register_adapter(CaptionerAdapter())
    model = Captioner()
    with pytest.raises(ConfigError, match="always dealt"):
        patch_model(model, self_attention="local")
    assert "forward" not in vars(model)
    patch_model(model, self_attention="star")
    with pytest.raises(ConfigError, match='self_attention="star" needs the cache of a transformers model'):
        model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 4, 5, 12))


def disagreeing(rank: int, world: int, example: str) -> None:
    sys.path[:0] = [example]
    from captioner import Captioner
    from captioner_adapter import CaptionerAdapter

    register_adapter(CaptionerAdapter())
    try:
        patch_model(Captioner())(torch.zeros(1, 5 + rank, dtype=torch.long), torch.zeros(1, 4, 5, 12))
    finally:
        del adapters._registered["Captioner"]


def test_ranks_that_pass_different_texts_are_told() -> None:
    for error in ranks(2).errors(disagreeing, str(EXAMPLE)):
        assert isinstance(error, AgreementError) and "text tokens: rank 0 has 5, rank 1 has 6" in str(error)


def test_features_that_do_not_fit_the_mask() -> None:
    from mllm_seqpar.adapting import FrameMask, SeqParConfig, SeqParContext, sharded_call
    from mllm_seqpar.comm import as_communicator

    context, row = SeqParContext(as_communicator(), SeqParConfig()), torch.zeros(1, 4, dtype=torch.long)
    mask = FrameMask.from_intervals(row, row + 3, 5, 3)
    with pytest.raises(ShapeError, match=r"features are \(2, 5, 8\); rank 0 of 1 holds 3 of 3 frames"):
        sharded_call(context, torch.zeros(2, 5, 8), mask)
    with pytest.raises(ShapeError, match=r"valid is \(1, 3\), the mask is for \(1, 4\) tokens"):
        sharded_call(context, torch.zeros(3, 5, 8), mask, valid=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="not a multiple of units_per_frame=2"):
        sharded_call(context, torch.zeros(3, 5, 8), mask, units_per_frame=2)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("no_such_module:Adapter", "", r"cannot be loaded \(ModuleNotFoundError: .*uninstall the package"),
        ("broken_adapter:make", "def make(): raise RuntimeError('half done')", r"\(RuntimeError: half done\)"),
        ("broken_adapter:Half", "class Half:\n    name = 'half'", r"no adapter: Half lacks matches, check, install"),
    ],
)
def test_a_broken_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, code: str, message: str
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mllm_seqpar.adapters]\nbroken = {value}\n")
    (tmp_path / "broken_adapter.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_adapter", raising=False)
    with pytest.raises(AdapterError, match=rf"entry point broken = {value} of the group .*{message}"):
        patch_model(nn.Linear(2, 2))


def test_what_is_no_adapter_cannot_be_registered(example: None) -> None:
    from captioner_adapter import CaptionerAdapter

    with pytest.raises(AdapterError, match="object lacks name, matches, check, install"):
        register_adapter(object())  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="the class CaptionerAdapter was given where an instance"):
        register_adapter(CaptionerAdapter)  # type: ignore[arg-type]
