"""Layer: one process, loopback ranks. The documented adapter for one's own model, and adapters that are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from captioner_cases import CASES, compare
from launch import ROOT
from mllm_seqpar import SeqParConfig, adapting, patch_model, register_adapter
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.errors import AdapterError, AgreementError, ConfigError, ShapeError
from mllm_seqpar.patching import registry as adapters

EXAMPLE = ROOT / "tests" / "example_adapter"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example importable, and forget all adapters that the test registers."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr(adapters, "_registered", {})


@pytest.fixture
def new_captioner(example: None) -> Callable[[], nn.Module]:
    from captioner import Captioner
    from captioner_adapter import CaptionerAdapter

    register_adapter(CaptionerAdapter())
    return Captioner


@pytest.mark.usefixtures("new_captioner")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {}), (3, {"strategy": "ring", "recompute_visual": False, "text_layout": "striped"})],
)
def test_registered_adapter_equals_unpatched(ranks: int, options: dict[str, Any]) -> None:
    for case in CASES.values():
        run_loopback(ranks, lambda comm, case=case: compare(*case, group=comm, **options))


def test_documentation_shows_the_tested_example_which_imports_only_the_public_toolkit() -> None:
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    adapter, project = (EXAMPLE / "captioner_adapter.py").read_text(), (EXAMPLE / "pyproject.toml").read_text()
    (page,) = (page for page in pages if f"```python\n{adapter}```\n" in page)
    blocks = re.findall(r"```toml\n(.*?)```\n", page, re.DOTALL)
    assert any(block in project for block in blocks)
    assert len(adapter.splitlines()) <= 52
    imported = re.findall(r"^from (mllm_seqpar\S*) import (.*)$", adapter, re.MULTILINE)
    assert [module for module, _ in imported] == ["mllm_seqpar.adapting"]
    assert all(hasattr(adapting, name) for name in imported[0][1].split(", "))


@pytest.mark.usefixtures("example")
def test_model_without_an_adapter_is_refused_with_advice() -> None:
    from captioner import Captioner

    with pytest.raises(AdapterError, match=r"no adapter matches captioner\.Captioner.*mllm_seqpar\.register_adapter"):
        patch_model(Captioner())


@pytest.mark.parametrize(
    ("option", "message"),
    [("star", "needs the cache of a transformers model"), ("local", 'does not shard the text; .* choose "ring"')],
)
def test_self_attention_that_does_not_suit_sharded_text_is_refused(
    new_captioner: Callable[[], Any], option: str, message: str
) -> None:
    model = patch_model(new_captioner(), self_attention=option)
    with pytest.raises(ConfigError, match=f'self_attention="{option}" {message}'):
        model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 4, 5, 12))


def test_ranks_with_different_texts_are_refused(new_captioner: Callable[[], Any]) -> None:
    def run(comm: Any) -> None:
        model = patch_model(new_captioner(), group=comm)
        with pytest.raises(AgreementError, match="text tokens: rank 0: 5; rank 1: 6"):
            model(torch.zeros(1, 5 + comm.rank, dtype=torch.long), torch.zeros(1, 4, 5, 12))

    run_loopback(2, run)


def test_features_that_do_not_fit_the_mask_are_refused() -> None:
    context = adapting.SeqParContext(as_communicator(), SeqParConfig())
    row = torch.zeros(1, 4, dtype=torch.long)
    mask = adapting.FrameMask.from_intervals(row, row + 3, 5, 3)
    with pytest.raises(ShapeError, match=r"features are \(2, 5, 8\); rank 0 of 1 holds 3 of 3 frames"):
        adapting.sharded_call(context, torch.zeros(2, 5, 8), mask)
    with pytest.raises(ShapeError, match=r"valid is \(1, 3\), the mask is for \(1, 4\) tokens"):
        adapting.sharded_call(context, torch.zeros(3, 5, 8), mask, valid=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="2 frames were passed to be encoded, and the mask has 3; pass"):
        adapting.sharded_call(context, torch.zeros(2, 5, 8), mask, encode=torch.nn.Identity())
    with pytest.raises(ShapeError, match="not a multiple of units_per_frame=2"):
        adapting.sharded_call(context, torch.zeros(3, 5, 8), mask, units_per_frame=2)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("no_such_module:Adapter", "", r"cannot be loaded \(ModuleNotFoundError: .*uninstall the package"),
        ("broken_adapter:make", "def make(): raise RuntimeError('half done')", r"\(RuntimeError: half done\)"),
        ("broken_adapter:Half", "class Half:\n    name = 'half'", r"an adapter: Half lacks matches, check, install"),
    ],
)
def test_broken_entry_point_is_named(
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


def test_error_in_an_encoder_stops_all_ranks(new_captioner: Callable[[], Any]) -> None:
    def run(comm: Any) -> None:
        model = patch_model(new_captioner(), group=comm)
        if comm.rank == 1:
            model.tower.forward = None
        with pytest.raises((TypeError, AgreementError), match="not callable"):
            model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 4, 5, 12))

    run_loopback(2, run)


def test_frames_that_one_rank_cannot_read_stop_all_ranks() -> None:
    """Frames may be read when they are sliced."""

    class Unreadable:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, frames: slice) -> torch.Tensor:
            raise OSError("a damaged frame")

    stop = torch.tensor([[1, 2, 3, 3]])
    mask = adapting.FrameMask.from_intervals(torch.zeros_like(stop), stop, 5, 3)

    def run(comm: Communicator) -> None:
        frames: Any = Unreadable() if comm.rank == 1 else torch.zeros(3, 5, 8)
        with pytest.raises((OSError, AgreementError), match="a damaged frame"):
            adapting.sharded_call(adapting.SeqParContext(comm, SeqParConfig()), frames, mask, encode=lambda x: x)

    run_loopback(2, run)


def test_object_without_adapter_protocol_is_refused() -> None:
    with pytest.raises(AdapterError, match="object lacks name, matches, check, install"):
        register_adapter(object())  # type: ignore[arg-type]

    class Half(adapting.Adapter):
        name = "half"

        def matches(self, model: Any) -> bool:
            return False

    with pytest.raises(TypeError, match="abstract method '?install"):
        Half()  # type: ignore[abstract]
    with pytest.raises(AdapterError, match="the class str was given where an instance"):
        register_adapter(str)  # type: ignore[arg-type]


def test_wrong_frames_of_one_rank_are_found_before_an_encoder_communicates() -> None:
    """Parameters that FSDP2 shards are gathered in the encoder's forward."""

    def run(comm: Communicator) -> str:
        context = adapting.SeqParContext(comm, SeqParConfig())
        row = torch.zeros(1, 4, dtype=torch.long)
        mask = adapting.FrameMask.from_intervals(row, row + 4, 5, 4)

        def encode(frames: torch.Tensor) -> torch.Tensor:
            comm.all_reduce(torch.ones(1), "parameters")
            return frames

        with pytest.raises((ShapeError, AgreementError)) as error:
            adapting.sharded_call(context, torch.zeros(4 - comm.rank, 5, 8), mask, encode=encode)
        return str(error.value)

    found = run_loopback(2, run)
    assert all("3 frames were passed to be encoded, and the mask has 4" in text for text in found)


def test_facts_of_frames_are_where_the_encoder_leaves_the_features() -> None:
    context = adapting.SeqParContext(as_communicator(), SeqParConfig())
    row = torch.zeros(1, 4, dtype=torch.long)
    mask = adapting.FrameMask.from_intervals(row, row + 3, 5, 3)
    state = adapting.sharded_call(context, torch.zeros(3, 5, 8), mask, encode=lambda frames: frames.to("meta"))
    assert state.frames is not None and state.frames.source.index.device.type == "meta"  # type: ignore[union-attr]
