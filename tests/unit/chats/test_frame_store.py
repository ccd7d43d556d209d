"""Layer: one process, real files. Frames of a store are those of the video; unusable stores are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chats import chat, video, write_rows
from clips import write_clip
from mllm_seqpar.chats import clip as clip_module
from mllm_seqpar.chats.frame_store import FrameStore
from mllm_seqpar.cli.check_data import check
from mllm_seqpar.data import ChatDataset, VideoSource
from mllm_seqpar.errors import ConfigError, DataError, VideoError
from mllm_seqpar.training.stored_tower import source_key


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of two videos, one of them rotated."""
    clips = write_clip(tmp_path / "a.mp4"), write_clip(tmp_path / "b.mp4", rotation=90)
    return write_rows(tmp_path / "data.jsonl", [chat(video(clip), "What?") for clip in clips])


@pytest.fixture
def store(data: Path) -> Path:
    """The frames of `data` at 10 per second, without loss."""
    assert check([str(data), "--store", str(data.parent / "store"), "--fps", "10"]) == 0
    return data.parent / "store"


def opened(data: Path, name: str, store: Path | None = None, **sampling: Any) -> VideoSource:
    return VideoSource.open(data.parent / name, frame_store=store, **(sampling or {"fps": 10}))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["a.mp4", "b.mp4"])
def test_any_range_of_a_lossless_store_is_that_of_the_video_and_decodes_nothing(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int
) -> None:
    video = VideoSource.open(data.parent / name, fps=10)
    ranges = [(0, len(video), 16), (3, 11, 4), (23, 24, 1), (5, 5, 2)]
    expected = [list(video.read(start, stop, batch=batch)) for start, stop, batch in ranges]
    sizes = video.sizes()
    with monkeypatch.context() as patch:
        patch.delattr(clip_module, "read_frames")
        stored = opened(data, name, store, fps=10, threads=threads)
        found = [list(stored.read(start, stop, batch=batch)) for start, stop, batch in ranges]
        assert stored.sizes() == sizes
    assert len(video) == 24 and [len(tensors) for tensors in found] == [2, 2, 1, 0]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(a.dtype == torch.uint8 and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(*(torch.cat([*x.read_ranges([range(2, 5), range(20, 24)])]) for x in (stored, video)))
    assert source_key(stored) == source_key(video)
    (scaled,) = stored.read(2, 3, size=(24, 32))  # another size is scaled from the video, as without a store
    assert torch.equal(scaled, next(iter(video.read(2, 3, size=(24, 32)))))
    with pytest.raises(ConfigError, match="requested from a source that has 24"):
        list(stored.read(0, 25))


def test_videos_are_found_by_content_and_data_sets_read_them(data: Path, store: Path) -> None:
    (data.parent / "a.mp4").rename(data.parent / "moved.mp4")
    assert opened(data, "moved.mp4", store).stored is not None
    moved = write_rows(data, [chat(video(data.parent / "moved.mp4"))])
    (source,) = ChatDataset(moved, None, fps=10, frame_store=store)[0].sources
    assert isinstance(source, VideoSource) and source.stored is not None


def test_scaled_jpeg_frames_are_close_and_have_features_of_their_own(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "small"
    options = ["--store", str(store), "--store_quality", "95", "--store_size", "24", "--fps", "10"]
    assert check([str(data), *options]) == 0
    video, stored = opened(data, "b.mp4"), opened(data, "b.mp4", store)
    assert set(video.sizes()) == {(64, 48)} and set(stored.sizes()) == {(32, 24)}
    (expected,), (found,) = video.read(0, 4, size=(32, 24)), stored.read(0, 4)
    assert found.shape == expected.shape and (found.float() - expected.float()).abs().mean() < 16  # noise, 4:2:0
    assert source_key(stored) != source_key(video) and stored != video
    raw = sum(path.stat().st_size for path in store.rglob("*.frames"))
    assert raw < 2 * 24 * 3 * 32 * 24


def test_a_run_that_stopped_is_refused_and_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, argv = tmp_path / "store", [str(data), "--store", str(tmp_path / "store"), "--fps", "10", "--workers", "1"]
    write = FrameStore.write

    def full(self: FrameStore, plan: Any, frames: Any) -> None:
        if plan.path.endswith("b.mp4"):
            frames = iter([torch.zeros(1, 3, 4, 4, dtype=torch.uint8), OSError(28, "No space left on device")])
            write(self, plan, (item if isinstance(item, torch.Tensor) else raised(item) for item in frames))
        write(self, plan, frames)

    def raised(error: Exception) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FrameStore, "write", full)
        with pytest.raises(DataError, match="cannot be written .No space left on device.; free some space"):
            check(argv)
    (kept,) = store.rglob("*.frames")
    assert not list(store.rglob("*.tmp"))
    with pytest.raises(DataError, match="is incomplete, because the run that writes it has not finished"):
        ChatDataset(data, None, fps=10, frame_store=store)
    before = kept.stat().st_mtime_ns
    assert check(argv) == 0 and kept.stat().st_mtime_ns == before and len(list(store.rglob("*.frames"))) == 2
    assert f"{store}: frames are stored as raw pixels in full size" in capsys.readouterr().out
    assert opened(data, "b.mp4", store).stored is not None


def test_a_store_without_these_frames_is_refused(data: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not have the 12 frames .*, but others \(24 from 0.00 to 2.30 s\)"):
        opened(data, "a.mp4", store, fps=5)
    other = write_clip(tmp_path / "c.mp4", frames=30)
    with pytest.raises(DataError, match=r"does not have the 12 frames from 0.00 to 1.10 s of .*c.mp4; run"):
        VideoSource.open(other, fps=10, frame_store=store)
    with pytest.raises(DataError, match=r"no frame store \(frames.json is missing\); run `mllm-seqpar check-data"):
        opened(data, "a.mp4", tmp_path / "nothing")


def test_a_damaged_store_is_refused(data: Path, store: Path) -> None:
    path = opened(data, "a.mp4", store).stored.path  # type: ignore[union-attr]
    content = path.read_bytes()
    path.write_bytes(content[: 7 * 9216] + bytes([content[7 * 9216] ^ 1]) + content[7 * 9216 + 1 :])
    with pytest.raises(DataError, match=r"damaged \(frame 7 does not have the checksum .* delete the file, and run"):
        list(opened(data, "a.mp4", store).read(4, 9))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        opened(data, "a.mp4", store)
    assert check([str(data), "--store", str(store), "--fps", "10"]) == 0 and path.read_bytes() == content
    path.with_suffix(".json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        opened(data, "a.mp4", store)


def test_a_broken_video_is_broken_in_the_store_too(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "cut.mp4", container={"movflags": "faststart"})
    clip.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    data, store = write_rows(tmp_path / "data.jsonl", [chat(video(clip))]), tmp_path / "store"
    assert check([str(data), "--store", str(store), "--fps", "10"]) == 1
    with pytest.raises(VideoError, match="cannot be decoded"):
        ChatDataset(data, None, fps=10, frame_store=store)[0]
    assert not list(store.rglob("*.frames"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store_size", "32"], "--store_size 32 would have no effect: it belongs to --store DIR"),
        (["--store", "DIR", "--store_quality", "101"], "--store_quality: 101 is not allowed; give 1 to 100"),
        (["--store", "DIR", "--store_quality", "0"], "--store_quality: 0 is not allowed"),
        (["--store", "DIR", "--store_size", "32"], "has frames as raw pixels in full size, not as raw pixels with a"),
    ],
)
def test_options_of_a_store_are_checked(data: Path, store: Path, options: list[str], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        check([str(data), *[str(store) if option == "DIR" else option for option in options]])
    FrameStore.open(store)  # still complete
