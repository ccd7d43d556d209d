"""Layer: one process. Versions, optional packages, error classes and the log."""

import inspect
import logging
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
import torch.distributed as dist

from launch import ROOT
from mllm_seqpar import _compat, errors
from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError


def test_release_numbers_of_a_version() -> None:
    versions = {"2.13.0+cpu": (2, 13), "5.17.1.dev0": (5, 17, 1), "2.12.0a0+git12": (2, 12), "0": (0,)}
    assert {version: _compat.release(version) for version in versions} == versions
    with pytest.raises(ConfigError, match="'main' does not begin with numbers"):
        _compat.release("main")


def test_old_package_is_rejected_with_the_command_to_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    _compat.check_versions()
    monkeypatch.setitem(_compat.MINIMUM, "torch", "99.1")
    with pytest.raises(ConfigError, match=r"torch .*needs 99\.1 or later.*pip install --upgrade 'torch>=99\.1'"):
        _compat.check_versions()


@pytest.mark.parametrize(("version", "name"), [((5, 23), "past_key_values"), ((5, 24), "cache")])
def test_signature_has_the_name_of_the_installed_transformers(
    version: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, "installed", lambda package: version)
    monkeypatch.setattr(_compat, "cache_name", _compat.cache_name.__wrapped__)

    @_compat.takes_cache
    def forward(ids: int, cache: str | None = None, **kwargs: int) -> tuple:
        return ids, cache, kwargs

    assert list(inspect.signature(forward).parameters) == ["ids", name, "kwargs"]
    assert forward(1, past_key_values="old") == (1, "old", {}) and forward(1, cache="new", a=2) == (1, "new", {"a": 2})
    assert forward(1, cache=None, past_key_values="old") == (1, "old", {})
    assert _compat.cache_argument("kept") == {name: "kept"}


CHECKOUT = """
import pathlib, sys
assert not [finder for finder in sys.meta_path if "editable" in str(finder).lower()]
import mllm_seqpar.patches.sizes
assert "torch" not in sys.modules
from mllm_seqpar.families import built_in_families
from mllm_seqpar.planner import read_cluster
from mllm_seqpar.patching import patch_model
print(len(built_in_families()), read_cluster("h200-141g-8xN").name, pathlib.Path(mllm_seqpar.patches.__file__).parent)
"""


SCRIPTS = """
import sys
sys.path.append(sys.argv[1])
import triton_tiles, mllm_seqpar
print(triton_tiles.parse(["--compile", "9.0"]).dims, mllm_seqpar.__file__)
"""


@pytest.mark.slow
def test_checkout_works_without_installation(tmp_path: Path) -> None:
    """Also its benchmarks, which run where nothing can be installed."""
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():  # all packages but this one
        if "mllm_seqpar" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [sys.executable, "-S", "-c", CHECKOUT]  # -S: reads no .pth files
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["h200-141g-8xN", str(ROOT / "patches")]
    command = [sys.executable, "-S", "-c", SCRIPTS, str(ROOT / "scripts" / "bench")]
    found = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert done.stdout.split() == ["[128]", str(ROOT / "mllm_seqpar" / "__init__.py")], done.stderr


def test_missing_package_is_rejected_with_the_command_to_install() -> None:
    with pytest.raises(ConfigError, match="no-such-package is not installed; run: pip install 'no-such-package'"):
        _compat.installed("no-such-package")


def test_gate_applies_until_its_fix() -> None:
    def gate(fixed_in: str | None) -> _compat.Gate:
        return _compat.Gate(package="torch", fixed_in=fixed_in, reason="", delete_when="")

    assert gate(None).applies() and gate("99").applies() and not gate(metadata.version("torch")).applies()


def test_errors_about_inputs_are_value_errors() -> None:
    defined = {x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)}
    kinds = defined - {errors.TransferError, errors.DivergedError}
    assert len(kinds) > 5
    assert all(issubclass(kind, errors.SeqParError) and issubclass(kind, ValueError) for kind in kinds)
    assert issubclass(errors.TransferError, RuntimeError) and issubclass(errors.DivergedError, RuntimeError)


@pytest.mark.parametrize(
    "rank,world,expected",
    [(0, 1, ["50% done", "late"]), (0, 2, ["50% done", "[rank 0] late"]), (1, 2, ["[rank 1] late"])],
)
def test_information_is_logged_on_rank_0_and_warnings_with_the_rank(
    rank: int, world: int, expected: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", world)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    logger = get_logger("test")
    assert logger is get_logger("mllm_seqpar.test") and len(logger.filters) == 1
    with caplog.at_level(logging.INFO, logger.name):
        logger.info("%d%% done", 50)
        logger.warning("late")
    assert caplog.messages == expected
