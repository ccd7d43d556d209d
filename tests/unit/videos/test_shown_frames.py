"""Layer: one process, real files. Counted frames: their times, what is said about them, and what an error advises."""

import logging
import math
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from corpus import CORPUS, FRAMES, X264, base, encode, joined, once, streams

from chats import chat, video, write_rows
from clips import write_clip
from mllm_seqpar.cli.check_data import check
from mllm_seqpar.data import VideoSource, plan_frames, probe, read_frames, scan
from mllm_seqpar.errors import VideoError
from mllm_seqpar.videos.decode_cost import frames_to_decode
from mllm_seqpar.videos.shown_frames import BestEffort, ascending, shown_frames

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the ffmpeg command is not installed")


def make(name: str, folder: Path) -> Path:
    return CORPUS[name].make(folder / name, folder)


def ffmpeg(*arguments: Any) -> None:
    subprocess.run(["ffmpeg", "-v", "error", "-y", *map(str, arguments)], check=True, capture_output=True)


def test_times_are_made_ascending() -> None:
    assert ascending([0, 40, 80], 40, math.inf) == (0, 40, 80)
    assert ascending([None, None, None], 40, math.inf) == (0, 40, 80)
    assert ascending([7, None, 100], 40, math.inf) == (7, 47, 100)
    assert ascending([0, 40, 40, 39, 120], 40, math.inf) == (0, 40, 41, 42, 120)
    assert ascending([1000, 1040, 0, 40, 80], 40, math.inf) == (1000, 1040, 1080, 1120, 1160)  # joined
    assert ascending([0, 40, 90_000, 90_040], 40, 10_000) == (0, 40, 80, 120)  # another clock
    assert ascending([0, 40, 9_000, 9_040], 40, 10_000) == (0, 40, 9_000, 9_040)  # a pause


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffprobe is not installed")
@pytest.mark.parametrize(
    "name", ["h264.mp4", "uneven.mkv", "mpeg4.avi", "copied.mp4", "joined_h264.ts", "inside_mpeg2.ts"]
)
def test_best_effort_times_are_those_of_ffmpeg(tmp_path: Path, name: str) -> None:
    path = make(name, tmp_path)
    entries = ["-show_entries", "frame=best_effort_timestamp", "-of", "csv=p=0"]
    command = ["ffprobe", "-v", "quiet", "-select_streams", "v:0", *entries, str(path)]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace(",", " ").split()
    guess = BestEffort()
    times = [guess(frame.pts, frame.dts) for frame in shown_frames(str(path), 1)]
    assert len(times) == len(rows)
    # At the end of a file without presentation times, some versions of FFmpeg have none.
    assert [time for time, row in zip(times, rows, strict=True) if row != "N/A"] == [int(x) for x in rows if x != "N/A"]


def test_counted_frames_have_the_rate_and_duration_of_what_is_shown(tmp_path: Path) -> None:
    for name, seconds in (("h264.avi", 1.44), ("raw.h264", 1.44), ("joined_h264.ts", 2.88), ("hidden.webm", 1.44)):
        info = probe(make(name, tmp_path))
        assert info.distrust and info.duration == pytest.approx(seconds, abs=0.05), name
        assert info.frames == len(info.ticks or ()) and info.fps == pytest.approx(info.frames / info.duration)
    webp = probe(make("animation.webp", tmp_path))
    assert (webp.frames, webp.fps, webp.duration, webp.width, webp.height) == (FRAMES, 25.0, 1.44, 64, 48)


def test_check_data_counts_frames_of_a_counted_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("h264.avi", tmp_path)
    plan = plan_frames(probe(path), num_frames=3)
    first, middle, last = plan.numbers or ()
    assert 0 < first < middle < last < FRAMES and frames_to_decode(plan) == last + 1
    assert plan.only(1).numbers == (middle,) and frames_to_decode(plan.only(1)) == middle + 1
    data = write_rows(tmp_path / "data.jsonl", [chat(video(path, num_frames=3))])
    assert check([str(data)]) == 0
    assert f"{(last + 1) / 3:.1f} frames of the videos for each frame that is used" in capsys.readouterr().out


def test_a_counted_file_is_decoded_once_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mllm_seqpar.videos import video as module

    path, counts = make("raw.h264", tmp_path), []
    monkeypatch.setattr(module, "shown_frames", lambda *a, **k: counts.append(1) or shown_frames(*a, **k))
    assert probe(path) == scan(path) == probe(path) and len(counts) == 1
    joined(path, once(tmp_path, "other.h264", "libx264", X264, frames=20))
    assert probe(path).frames == 20 and len(counts) == 2


def test_streams_that_are_left_out_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = once(tmp_path, "large.mp4", "libx264", X264, size=(96, 64))
    path = streams(tmp_path / "two.mkv", [base(tmp_path), large], default=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            VideoSource.open(path, fps=1).sizes()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}: has 2 video streams; stream 0 (64 x 48) is read, stream 1 (96 x 64) is left out"
    )


@pytest.mark.parametrize("suffix", ["ts", "flv", "mkv", "h264", "avi"])
def test_a_file_that_was_cut_off_has_the_frames_that_are_left(tmp_path: Path, suffix: str) -> None:
    whole = once(tmp_path, f"whole.{suffix}", "libx264", X264, frames=60)
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(whole.read_bytes()[: int(0.7 * whole.stat().st_size)])
    info = probe(path)
    assert 25 < info.frames < 50 and info.duration == pytest.approx(info.frames / 25, abs=0.1)
    frames = torch.cat([*read_frames(plan_frames(info, end=0.8))])
    assert torch.equal(frames, torch.cat([*read_frames(plan_frames(probe(whole), end=0.8))]))


def test_what_cannot_be_decoded_is_said_once_and_skipped_by_any_number_of_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = once(tmp_path, "whole.mp4", "libx264", X264, container={"movflags": "frag_keyframe+empty_moov"}, frames=60)
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole.read_bytes()[: int(0.7 * whole.stat().st_size)])
    counted = [len(list(shown_frames(str(path), threads))) for threads in (1, 2, 4, 0)]
    assert len(set(counted)) == 1 and probe(path).frames == counted[0]
    for _ in range(2):
        probe(path)
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records})


def test_a_stream_without_a_frame_that_can_be_decoded_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.h264"
    data = encode(tmp_path / "whole.h264", "libx264", X264).read_bytes()
    second = data.index(b"\0\0\1", len(data) // 6)
    path.write_bytes(data[second : second + len(data) // 12])
    with pytest.raises(VideoError, match=f"^{path}: [^\n]*$"):
        list(read_frames(plan_frames(probe(path))))


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "avi", "webm", "webp", "gif", "flv", "h264", "mpg"])
def test_whatever_a_decoder_raises_names_the_file(tmp_path: Path, suffix: str) -> None:
    codec = {"avi": "mpeg4", "webm": "libvpx-vp9", "mpg": "mpeg2video", "gif": "gif"}.get(suffix, "libx264")
    if suffix == "webp":
        whole = make("animation.webp", tmp_path)
    else:
        whole = encode(tmp_path / f"whole.{suffix}", codec, frames=12, pixels="rgb8" if suffix == "gif" else "yuv420p")
    data, rng = whole.read_bytes(), np.random.default_rng(0)
    for number in range(12):
        damaged = bytearray(data)
        for place in rng.integers(12, len(data), 4 << number % 6):
            damaged[place] = rng.integers(256)
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(damaged[: len(data) * (7 + number % 4) // 10])
        try:
            for threads in (1, 3):
                list(read_frames(plan_frames(probe(path), num_frames=4), threads=threads))
        except VideoError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


@needs_ffmpeg
def test_the_conversion_that_a_refused_playlist_advises_leads_to_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base(tmp_path, "ts")
    Path("list.m3u8").write_text(
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:5\n#EXTINF:1.44,\nbase.ts\n#EXT-X-ENDLIST\n"
    )
    with pytest.raises(VideoError, match=r"convert it, e.g. (ffmpeg -i IN OUT.mp4)$") as refused:
        probe("list.m3u8")
    command = str(refused.value).rpartition("e.g. ")[2].replace("IN", "list.m3u8").split()
    subprocess.run([*command, "-v", "error"], check=True, capture_output=True)
    assert_like(Path("OUT.mp4"), Path("base.ts"))


@needs_ffmpeg
@pytest.mark.parametrize("name", ["h264.avi", "raw.h264", "copied.mp4", "inside_h264.ts", "hidden.webm", "h264.mpg"])
def test_encoding_a_counted_file_again_makes_an_ordinary_one(tmp_path: Path, name: str) -> None:
    path = make(name, tmp_path)
    ffmpeg("-i", path, tmp_path / "OUT.mp4")
    assert probe(path).distrust and probe(tmp_path / "OUT.mp4").distrust is None
    if name not in ("hidden.webm", "copied.mp4"):  # of which ffmpeg repeats or drops frames, for a constant rate
        assert_like(tmp_path / "OUT.mp4", path)


@needs_ffmpeg
@pytest.mark.parametrize("name", ["raw.h264", "raw.hevc", "raw.m4v", "h264.mpg", "h264.avi", "mpeg4.avi"])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_copies_of_streams_without_times_have_their_frames(tmp_path: Path, name: str, suffix: str) -> None:
    """The ffmpeg command makes the times of such copies up. Some hide the first frames by an edit list."""
    path, copy = make(name, tmp_path), tmp_path / f"copy.{suffix}"
    try:
        ffmpeg("-i", path, "-c", "copy", copy)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ffmpeg does not copy it: {error.stderr[-80:]!r}")
    expected = torch.cat([*read_frames(plan_frames(probe(path)))])
    found = torch.cat([*read_frames(plan_frames(probe(copy)))])
    with av.open(str(copy)) as file:
        assert len(found) == sum(1 for _ in file.decode(video=0))
    numbers = [next(n for n, frame in enumerate(expected) if torch.equal(frame, image)) for image in found]
    assert numbers == sorted(set(numbers)) and len(numbers) >= FRAMES - 2


def assert_like(path: Path, expected: Path) -> None:
    """Check that a lossy copy has the frames of a video in their order; ffmpeg repeats some for a constant rate."""
    frames, wanted = (torch.cat([*read_frames(plan_frames(probe(x)))]).float() for x in (path, expected))
    assert frames.shape[1:] == wanted.shape[1:] and len(wanted) <= len(frames) <= len(wanted) + 4
    differences = torch.stack([(wanted - frame).abs().mean((1, 2, 3)) for frame in frames])
    nearest = differences.argmin(1).tolist()
    assert nearest == sorted(nearest) and set(nearest) == set(range(len(wanted)))
    assert differences.min(1).values.mean() < 12


def test_a_seek_that_finds_no_place_to_decode_from_is_the_last_one(tmp_path: Path) -> None:
    for name in ("no_stss.mp4", "refresh.mp4"):
        path = make(name, tmp_path)
        info = scan(path)
        expected = torch.cat([*read_frames(plan_frames(info), threads=1)])
        assert info.distrust is None
        for number in (35, 13, 24, 5):
            (image,) = next(read_frames(info.plan([(info.ticks or ())[number]]), threads=1))
            assert torch.equal(image, expected[number]), (name, number)


def test_the_clock_of_a_plan_is_that_of_the_video(tmp_path: Path) -> None:
    plan = plan_frames(probe(make("animation.webp", tmp_path)), fps=5)
    assert plan.time_base == Fraction(1, 1000) and [plan.seconds(i) for i in range(3)] == pytest.approx([0, 0.2, 0.4])
    assert write_clip(tmp_path / "ordinary.mp4") and plan_frames(probe(tmp_path / "ordinary.mp4")).numbers is None
