"""Layer: one process, real files. What holds for the stores of frames, tower outputs and features alike."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clips import write_clip
from mllm_seqpar.chats.frame_store import FrameStore
from mllm_seqpar.chats.store import TowerStore, open_features, save_features
from mllm_seqpar.data import FramePlan, plan_frames, probe, read_frames
from mllm_seqpar.errors import DataError

ROWS = torch.randn(10, 3, 8)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> FramePlan:
    return plan_frames(probe(write_clip(tmp_path_factory.mktemp("clips") / "a.mp4")), fps=10)


@dataclass(frozen=True)
class Kind:
    """How a kind of store is used, and what its messages say.

    Attributes:
        write: writes the rows of one clip, made with a setting.
        read: opens a store with a setting, and returns the rows.
        files: pattern of the files of rows.
        index: the name of the index.
        contents, other, cut: messages about a damaged index, another setting, and a file without its last byte.
        full: the end of the message if nothing can be written.
    """

    write: Callable[[Path, FramePlan, int], None]
    read: Callable[[Path, FramePlan, int], Tensor]
    files: str
    index: str
    contents: str
    other: str
    cut: str
    full: str


def write_frames(folder: Path, plan: FramePlan, setting: int) -> None:
    store = FrameStore.create(folder, shorter_side=setting)
    store.write(plan, read_frames(plan))
    store.finish()


def read_stored_frames(folder: Path, plan: FramePlan, setting: int) -> Tensor:
    FrameStore.create(folder, shorter_side=setting).finish()
    return torch.cat([*FrameStore.open(folder).find(plan).read(range(len(plan)), 16)])


def write_outputs(folder: Path, plan: FramePlan, setting: int) -> None:
    store = TowerStore(folder, {"setting": setting})
    store.create((3, 8), torch.float32, [0, 1, 2])
    store.write("clip", 0, ROWS)


def read_outputs(folder: Path, plan: FramePlan, setting: int) -> Tensor:
    store = TowerStore(folder, {"setting": setting})
    assert store.has("clip", 0, 10) and not store.has("clip", 0, 11) and not store.has("other", 0, 1)
    return store.read("clip", 0, 10)


def write_features(folder: Path, plan: FramePlan, setting: int) -> None:
    save_features(folder, ROWS, start=0, total=10, rank=0, world=1, meta={"setting": setting})


def read_features(folder: Path, plan: FramePlan, setting: int) -> Tensor:
    store = open_features(folder)
    store.require(setting=setting)
    return store.read((0, 10))


KINDS = {
    "frames": Kind(
        write_frames,
        read_stored_frames,
        files="videos/*/*.frames",
        index="frames.json",
        contents="not an index of frames .*; delete the directory, and run `mllm-seqpar check-data --store`",
        other="has frames as raw pixels with a shorter side of 48, not as raw pixels with a shorter side of 64; give",
        cut=r"json: damaged \(.*frames does not have the bytes of 24 frames\); delete the file, and run",
        full="free some space or give another directory, and run the same command again",
    ),
    "tower": Kind(
        write_outputs,
        read_outputs,
        files="frames/clip/0-10.safetensors",
        index="tower.json",
        contents="not an index of features .*; delete the directory, or give --features another directory",
        other="made with setting = 48, and now it is 64; give --features another directory, or use what",
        cut=r"0-10.safetensors: damaged \(.*\); delete it, and its frames are encoded again",
        full="free some space, or give --features another directory",
    ),
    "features": Kind(
        write_features,
        read_features,
        files="features-00000-of-00001.safetensors",
        index="features.json",
        contents="not an index of features .*; encode the video again with --save_features",
        other="made with setting = 48, and now it is 64; encode the video again with --save_features, or use what",
        cut=r"1 of 1 shards cannot be used: features-00000-of-00001.safetensors \(damaged: .*; encode the video again",
        full="free some space, or give --save_features another directory",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_rows_are_read_as_they_were_written(kind: Kind, plan: FramePlan, tmp_path: Path) -> None:
    kind.write(tmp_path, plan, 48)
    rows = kind.read(tmp_path, plan, 48)
    assert torch.equal(rows, torch.cat([*read_frames(plan)]) if kind.index == "frames.json" else ROWS)
    assert [path.name for path in tmp_path.iterdir() if path.is_file() and path.suffix == ".json"] == [kind.index]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"quality": 1}', "\x00"])
def test_damaged_index_is_refused(kind: Kind, plan: FramePlan, tmp_path: Path, content: str) -> None:
    kind.write(tmp_path, plan, 48)
    (tmp_path / kind.index).write_text(content)
    with pytest.raises(DataError, match=rf"^{tmp_path / kind.index}: {kind.contents}"):
        kind.read(tmp_path, plan, 48)


def test_rows_made_with_another_setting_are_refused(kind: Kind, plan: FramePlan, tmp_path: Path) -> None:
    kind.write(tmp_path, plan, 48)
    with pytest.raises(DataError, match=f"^{tmp_path}: .*{kind.other}"):
        kind.read(tmp_path, plan, 64)
    kind.read(tmp_path, plan, 48)  # not changed by the attempt


def test_damaged_rows_are_refused_and_can_be_written_again(kind: Kind, plan: FramePlan, tmp_path: Path) -> None:
    kind.write(tmp_path, plan, 48)
    rows, (file,) = kind.read(tmp_path, plan, 48), tmp_path.glob(kind.files)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=kind.cut):
        kind.read(tmp_path, plan, 48)
    kind.write(tmp_path, plan, 48)
    assert torch.equal(kind.read(tmp_path, plan, 48), rows)


@pytest.mark.parametrize("kind", [KINDS["tower"], KINDS["features"]], ids=["tower", "features"])
def test_rows_of_another_run_are_refused(kind: Kind, plan: FramePlan, tmp_path: Path) -> None:
    for setting in (48, 64):
        kind.write(tmp_path / str(setting), plan, setting)
    (file,) = (tmp_path / "64").glob(kind.files)
    (tmp_path / "48" / file.relative_to(tmp_path / "64")).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="from another run"):
        kind.read(tmp_path / "48", plan, 48)


@pytest.mark.parametrize("written", [False, True], ids=["new", "existing"])
def test_full_disk_is_one_sentence_and_leaves_the_store(
    kind: Kind, plan: FramePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    if written:
        kind.write(tmp_path, plan, 48)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(DataError, match=rf"{tmp_path}: the \w+ cannot be written .No space .*; {kind.full}"):
            kind.write(tmp_path, plan, 48)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    kind.write(tmp_path, plan, 48)
    kind.read(tmp_path, plan, 48)


def test_writers_at_the_same_time_leave_a_complete_store(kind: Kind, plan: FramePlan, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kind.write(tmp_path, plan, 48), range(12)))
    assert len(kind.read(tmp_path, plan, 48)) and not list(tmp_path.rglob("*.tmp"))


def test_training_does_not_store_outputs_beside_features(plan: FramePlan, tmp_path: Path) -> None:
    write_features(tmp_path, plan, 48)
    with pytest.raises(DataError, match="it has features that `mllm-seqpar ask` stored, of one video; give --features"):
        TowerStore(tmp_path, {})


def test_outputs_of_several_ranks_are_read_in_any_range(tmp_path: Path) -> None:
    """The longest of the files that overlap is read; files of another process are found without opening the store."""
    writer, reader = TowerStore(tmp_path, {}), TowerStore(tmp_path, {})
    for store in (writer, reader):
        store.create((3, 8), torch.float32, [0, 1, 2])
    writer.write("clip", 0, ROWS[:4])
    assert reader.has("clip", 1, 4) and not reader.has("clip", 1, 5)
    writer.write("clip", 2, ROWS[2:7])
    writer.write("clip", 8, ROWS[8:])
    assert torch.equal(reader.read("clip", 1, 7), ROWS[1:7]) and reader.has("clip", 9, 10)
    assert not reader.has("clip", 6, 9) and reader.read("clip", 5, 5).shape == (0, 3, 8)
    with pytest.raises(DataError, match=r"have shape \(3, 8\) and dtype torch.float32, but the vision tower returns"):
        reader.create((3, 9), torch.float32, [0, 1, 2])
