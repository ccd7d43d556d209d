"""Layer: one process, real files. Frame plans and the frames that are read, against a decode of the whole file."""

import collections
import importlib.util
import os
import threading
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from clips import decode_all, shown_at, write_clip
from mllm_seqpar.data import FramePlan, ImageListSource, VideoSource, plan_frames, probe, read_frames, scan
from mllm_seqpar.errors import ConfigError, VideoError
from mllm_seqpar.videos import cursors
from mllm_seqpar.videos.video import VideoInfo

UNEVEN = [5000 + int(t) for t in np.cumsum(np.random.default_rng(1).integers(10, 300, 60))]


def read(plan: FramePlan, *bounds: int, **options: Any) -> Tensor:
    return torch.cat(list(read_frames(plan, *bounds, **options)))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def long_clip(clips: Path) -> Path:
    return write_clip(clips / "long.mp4", frames=300, container={"movflags": "faststart"})


def damage(data: bytes) -> bytes:
    """Return the same bytes with zeros in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(3000) + data[middle + 3000 :]


class Decoded:
    """Counts the frames that come out of the decoders, by thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: collections.Counter[int] = collections.Counter()
        decode = cursors.TimeCursor._decode

        def counted(cursor: cursors.TimeCursor, *arguments: Any) -> Iterator[tuple[int, Any]]:
            for frame in decode(cursor, *arguments):
                self.threads[threading.get_ident()] += 1
                yield frame

        monkeypatch.setattr(cursors.TimeCursor, "_decode", counted)


def test_frames_that_nothing_refers_to_are_decoded_only_if_wanted(
    long_clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, decoded = plan_frames(probe(long_clip), fps=2), Decoded(monkeypatch)
    frames = read(plan, threads=1)
    assert decoded.threads.total() < 0.6 * 300  # two thirds of the frames are B-frames, most of them not referred to
    whole = decode_all(long_clip)
    assert torch.equal(frames, torch.stack([shown_at(whole, tick) for tick in plan.ticks]))


class CountedPackets:
    """Counts the packets that are given to the decoders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = 0
        open_video = cursors.open_video

        @contextmanager
        def opened(path: str) -> Iterator[tuple[Any, Any]]:
            with open_video(path) as (container, stream):
                yield Watched(container, demux=lambda of: map(self.packet, container.demux(of))), stream

        monkeypatch.setattr(cursors, "open_video", opened)

    def packet(self, packet: Any) -> Any:
        def decode() -> Any:
            self.decoded += packet.size > 0
            return packet.decode()

        return Watched(packet, decode=decode)


class Watched:
    """An object, some of whose methods are replaced."""

    def __init__(self, of: Any, **methods: Any) -> None:
        self._of, self._methods = of, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._of, name)


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_decoded_between_a_wanted_frame_and_a_seek(
    clips: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The decoder returns frames late, because it sorts them. It is told that no more packets come."""
    options = {"bf": "2", "g": "12", "sc_threshold": "0"}
    path = write_clip(clips / "groups.mp4", frames=120, options=options)
    decoded = decode_all(path)
    plan = scan(path).plan(time for time, _ in decoded[::12])
    packets = CountedPackets(monkeypatch)
    assert torch.equal(read(plan, threads=threads), torch.stack([image for _, image in decoded[::12]]))
    assert packets.decoded == 10


def test_a_long_group_of_pictures_without_an_index_is_decoded_once(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_clip(clips / "one_group.mkv", frames=500, options={"bf": "0", "g": "500", "sc_threshold": "0"})
    plan = plan_frames(probe(path), fps=1 / 3)
    decoded = decode_all(path)
    expected = torch.stack([shown_at(decoded, tick) for tick in plan.ticks])
    packets = CountedPackets(monkeypatch)
    assert len(plan) == 7 and torch.equal(read(plan, threads=1), expected)
    assert packets.decoded <= 500


def test_threads_decode_different_groups_of_pictures(long_clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, decoded = plan_frames(probe(long_clip)), Decoded(monkeypatch)
    read(plan, threads=3)
    assert len(decoded.threads) == 3 and decoded.threads.total() < 300 + 3 * 25


@pytest.mark.parametrize("fps", [2, 30])
@pytest.mark.parametrize("threads", [1, 3])
def test_two_ranges_are_read_by_one_reader(
    long_clip: Path, monkeypatch: pytest.MonkeyPatch, threads: int, fps: int
) -> None:
    plan = plan_frames(probe(long_clip), fps=fps)
    chunk = len(plan) // 8
    ranges = [range(chunk, 2 * chunk), range(6 * chunk, 7 * chunk)]
    expected = torch.cat([read(plan, part.start, part.stop, threads=threads) for part in ranges])
    opened, open_video = [], cursors.open_video
    monkeypatch.setattr(cursors, "open_video", lambda path: opened.append(path) or open_video(path))
    (whole,) = read_frames(plan, ranges=ranges[:1], batch=1000, threads=threads)
    for_one, decoded = len(opened), Decoded(monkeypatch)
    found = torch.cat([*read_frames(plan, ranges=ranges, batch=7, threads=threads)])
    assert torch.equal(found, expected) and torch.equal(found[:chunk], whole)
    assert len(opened) - for_one <= max(for_one, 1 + threads), "the file is opened once for both ranges"
    group = 25  # frames from keyframe to keyframe
    assert decoded.threads.total() <= 2 * (300 // 8 + group) + threads * group
    with pytest.raises(ConfigError, match="requested from a source"):
        list(read_frames(plan, ranges=[range(0, 2), range(5, len(plan) + 1)]))


def test_reading_can_stop_at_any_frame(long_clip: Path) -> None:
    plan = plan_frames(probe(long_clip))
    for threads in (1, 3):
        frames = read_frames(plan, batch=1, threads=threads)
        assert next(frames).shape == (1, 3, 48, 64)
        frames.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_options_of_reading_are_checked(long_clip: Path) -> None:
    plan = plan_frames(probe(long_clip), fps=1)
    for options, message in (
        ({"threads": 0}, "^threads: 0 is not allowed; give 1 or more"),
        ({"decoder": "opencv"}, "^decoder: 'opencv' is not allowed; give one of pyav, torchcodec"),
        ({"device": "cuda"}, "'pyav' decodes on the CPU only, got device cuda; use decoder='torchcodec'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(plan, **options)
    if importlib.util.find_spec("torchcodec") is None:
        with pytest.raises(ConfigError, match=r"is not installed; run: pip install 'mllm-seqpar\[torchcodec\]'"):
            read(plan, decoder="torchcodec")


def test_the_first_frame_that_is_read_of_av1_may_be_one_that_no_frame_refers_to(clips: Path) -> None:
    """The decoder of AV1 (dav1d) reads the frames to skip when it is opened, and never again."""
    if "libsvtav1" not in av.codec.codecs_available:
        pytest.skip("this PyAV has no encoder of AV1")
    path = write_clip(clips / "av1.mp4", codec="libsvtav1", frames=40, options={"preset": "12", "g": "20"})
    info = scan(path)
    for number, (time, image) in enumerate(decode_all(path)):
        assert torch.equal(read(info.plan([time]), threads=1)[0], image), number


def test_tick_between_frames_shows_the_earlier_frame(clips: Path) -> None:
    path = write_clip(clips / "between.mkv", times=UNEVEN)
    decoded, info = decode_all(path), scan(path)
    assert info.ticks is not None
    edges = [info.start - 100, info.ticks[30] - 1, info.ticks[30], info.ticks[30] + 1, info.ticks[-1] + 10_000]
    plan = FramePlan(str(path), tuple(edges), info.time_base, info.start)
    expected = [decoded[0][1], decoded[29][1], decoded[30][1], decoded[30][1], decoded[59][1]]
    assert torch.equal(read(plan), torch.stack(expected))
    for i in range(5):
        assert torch.equal(read(plan, i, i + 1)[0], expected[i]), i


def test_metadata_agree_with_a_scan_and_plan_options_choose_the_times(clips: Path) -> None:
    path = write_clip(clips / "facts.mp4")
    info, scanned = probe(path), scan(path)
    assert info.ticks is None and scanned.ticks is not None  # the metadata of an ordinary mp4 are complete
    assert replace(scanned, ticks=None) == info
    assert (info.frames, info.fps, info.duration, info.height, info.width) == (60, 25.0, 2.4, 48, 64)
    for options, seconds in (({"fps": 1}, [0.0, 1.0, 2.0]), ({"num_frames": 4}, [0.3, 0.9, 1.5, 2.1])):
        plan = plan_frames(info, **options)
        assert [plan.seconds(i) for i in range(len(plan))] == pytest.approx(seconds)
    assert len(plan_frames(info)) == len(plan_frames(info, num_frames=1000)) == len(plan_frames(info, fps=1000)) == 60
    assert len(plan_frames(info, fps=10)) == 24 and len(plan_frames(info, fps=10, max_frames=8)) == 8
    assert len(plan_frames(info, fps=0.01)) == 1
    with pytest.raises(ConfigError, match="fps: 1, but num_frames is 3"):  # of `FrameChoice`, which has its own tests
        plan_frames(info, fps=1, num_frames=3)
    assert [plan_frames(info, fps=fps).ticks for fps in (1e-9, 1e-300)] == [(info.start,)] * 2


def test_a_clip_has_the_frames_between_its_times(clips: Path) -> None:
    """A clip shows what a file that was cut there would show, at the times of the whole video."""
    path = write_clip(clips / "clip.mp4")
    decoded = decode_all(path)
    for info in (probe(path), scan(path)):  # 60 frames in 2.4 s
        for options, seconds in (
            ({"fps": 2, "start": 0.5}, [0.5, 1.0, 1.5, 2.0]),
            ({"fps": 2, "end": 1.0}, [0.0, 0.5]),
            ({"fps": 4, "start": 0.4, "end": 1.2, "max_frames": 2}, [0.6, 1.0]),
            ({"num_frames": 2, "start": 0.4, "end": 99.0}, [0.9, 1.9]),
            ({"start": 2.3}, [2.32, 2.36]),
            ({"start": 1.001, "end": 1.002}, [1.001]),
            ({"fps": 1000, "start": 1.0, "end": 1.1}, [1.0, 1.04, 1.08]),
        ):
            plan = plan_frames(info, **options)
            assert [plan.seconds(i) for i in range(len(plan))] == pytest.approx(seconds, abs=2e-4), options
            assert torch.equal(read(plan), torch.stack([shown_at(decoded, tick) for tick in plan.ticks]))
        assert plan_frames(info, fps=5, start=0.0, end=2.4) == plan_frames(info, fps=5)
    uneven = plan_frames(scan(write_clip(clips / "uneven clip.mkv", times=UNEVEN)), start=0.0, end=1.0, max_frames=4)
    assert len(uneven) == 4
    with pytest.raises(VideoError, match=r"clip.mp4: the clip starts at 2.4 s, but the video has 2.400 s"):
        plan_frames(info, fps=1, start=2.4)


def test_rounding_does_not_choose_the_frame_at_the_end_of_a_clip() -> None:
    info = VideoInfo(path="a.mkv", frames=60, width=16, height=16, start=0, length=60, time_base=Fraction(1, 30))
    fps = 30 / 18.55  # the second frame is due at tick 18.55, and the clip ends before tick 18.6
    assert plan_frames(info, fps=fps, start=0.0, end=0.62).ticks == (0, 18)
    assert plan_frames(info, fps=fps, start=0.0, end=0.64).ticks == plan_frames(info, fps=fps).ticks[:2] == (0, 19)


def test_jittered_times_do_not_repeat_or_drop_frames(clips: Path) -> None:
    path = write_clip(clips / "jitter.mkv", times=[round(1000 * i / 30) for i in range(60)])  # 33, 67, 100 ms ...
    assert plan_frames(probe(path), fps=29.99).ticks[:4] == (0, 33, 67, 100)


def test_only_needed_parts_are_decoded(long_clip: Path) -> None:
    """A damaged part of the file affects only its own frames, so the other frames are reached by seeking."""
    plan = plan_frames(scan(long_clip))
    broken = long_clip.with_name("damaged.mp4")
    broken.write_bytes(damage(long_clip.read_bytes()))
    damaged = replace(plan, path=str(broken))
    whole = torch.stack([image for _, image in decode_all(long_clip)])
    sparse = replace(damaged, ticks=(*plan.ticks[:5], *plan.ticks[-5:]))
    assert torch.equal(read(sparse), torch.cat([whole[:5], whole[-5:]]))
    assert torch.equal(read(damaged, 200, 210), whole[200:210])
    message = r"damaged\.mp4: frame 1\d\d of 300 planned \(at [56]\.\d+ s\) cannot be decoded"
    with pytest.raises(VideoError, match=message):
        read(damaged)


def cut_at(share: float) -> Callable[[Path], bytes]:
    return lambda path: path.read_bytes()[: int(share * os.path.getsize(path))]


def cut_between_frames(path: Path) -> bytes:
    with av.open(str(path)) as file:
        ends = [p.pos + p.size for p in file.demux(video=0) if p.size]
    return path.read_bytes()[: ends[179]]


def concealed(path: Path) -> bytes:
    """Return a file of a codec whose decoder conceals damage."""
    avi = write_clip(path.with_name("patched.avi"), codec="mpeg4", frames=300, options={"g": "25"})
    return damage(avi.read_bytes())


@pytest.mark.parametrize(
    ("broken", "plan_of", "frames", "readable", "first", "message"),
    [
        (cut_at(0.6), probe, 20, 11, 0, r"frame 1[12] of 20 planned \(at [67]\.\d+ s\) cannot be deco"),
        (cut_at(0.6), probe, 20, 11, 19, "frame 19 of 20 planned"),
        (cut_between_frames, probe, 20, 11, 15, "cannot be decoded"),  # not padded with the last frame
        (concealed, scan, None, 0, 0, "is damaged"),
    ],
)
def test_lost_frames_of_a_broken_file_are_named(
    long_clip: Path, tmp_path: Path, broken: Any, plan_of: Any, frames: Any, readable: int, first: int, message: str
) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(broken(long_clip))
    plan = plan_frames(plan_of(path), num_frames=frames)
    assert len(plan) == (frames or len(plan))  # the index is complete
    assert len(list(read_frames(plan, 0, readable, batch=1))) == readable
    with pytest.raises(VideoError, match=rf"cut\.mp4: .*{message}"):
        read(plan, first)


def test_size_and_batches(clips: Path) -> None:
    plan = plan_frames(probe(write_clip(clips / "size.mp4")))
    parts = list(read_frames(plan, 3, 20, size=(20, 30), batch=8))
    assert [tuple(t.shape) for t in parts] == [(8, 3, 20, 30), (8, 3, 20, 30), (1, 3, 20, 30)]
    assert all(t.dtype == torch.uint8 for t in parts)
    assert list(read_frames(plan, 7, 7)) == []
    for bad in ((0, 61), (-1, 3), (5, 4)):
        with pytest.raises(ConfigError, match="requested from a source that has 60"):
            read(plan, *bad)


def test_rotated_recording_is_read_upright(clips: Path) -> None:
    if not hasattr(av.video.stream.VideoStream, "set_display_rotation"):
        pytest.skip("this PyAV cannot write a rotation")
    path = write_clip(clips / "rotated.mp4", rotation=90)
    flat = decode_all(path)[5][1]
    plan = plan_frames(probe(path))
    assert torch.equal(read(plan, 5, 6), torch.rot90(flat, 1, (1, 2))[None]) and flat.shape == (3, 48, 64)
    assert next(read_frames(plan, 5, 6, size=(32, 24))).shape == (1, 3, 32, 24)


def test_unusable_file_is_named(clips: Path) -> None:
    whole = write_clip(clips / "tail_index.mp4").read_bytes()
    contents = {"empty.mp4": b"", "junk.mp4": bytes(range(256)) * 40, "head.mp4": whole[: len(whole) // 2]}
    for name, content in contents.items():
        (clips / name).write_bytes(content)
    with wave.open(str(clips / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    for path, message in (
        (clips / "missing.mp4", "no such file"),
        (clips / "empty.mp4", "the file is empty"),
        (clips / "junk.mp4", "not a readable video"),
        (clips / "head.mp4", "not a readable video"),
        (clips, "a directory"),
        (clips / "sound.wav", r"contains no video stream \(found: audio\)"),
    ):
        with pytest.raises(VideoError, match=f"^{path}: {message}[^\n]*$"):
            VideoSource.open(path, fps=1)


def hls(target: str) -> str:
    return f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:5\n#EXTINF:2.0,\n{target}\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize("name", ["list.m3u8", "list.mp4", "list"])
def test_file_that_names_another_file_is_refused_under_any_name(clips: Path, tmp_path: Path, name: str) -> None:
    other = write_clip(clips / "other.ts", codec="mpeg2video", frames=30)
    session = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    playlists = [hls(f"file://{other}"), hls(str(other)), hls(os.path.relpath(other, tmp_path))]
    playlists += [f"ffconcat version 1.0\nfile '{other}'\n", session + "a=rtpmap:96 H264/90000\n"]
    for content in playlists:
        (tmp_path / name).write_text(content)
        with pytest.raises(VideoError, match=r"name other files or hosts .* are refused|not a readable video"):
            VideoSource.open(tmp_path / name, fps=1)
        with pytest.raises(VideoError, match="not a readable image"):
            list(ImageListSource([tmp_path / name]).read(0, 1))
    (tmp_path / "list.m3u8").write_text(hls(str(other)))
    with pytest.raises(VideoError, match="not in a supported container format"):
        VideoSource.open(tmp_path / "list.m3u8", fps=1)


def test_name_of_a_file_is_not_read_as_a_protocol(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clips)
    for name in ("concat:clip.mp4", "a:b|c.mp4", "100%.mp4", "no suffix"):
        write_clip(clips / "plain.mp4", frames=5).rename(name)
        assert len(VideoSource.open(name)) == 5


def test_picture_that_another_program_would_draw_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(VideoError, match="cannot identify image file"):
        list(ImageListSource([tmp_path / "a.png"]).read(0, 1))


def test_image_list_yields_batches_of_one_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in [(8, 6), (8, 6), (4, 6), (8, 6)]]
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
    source = ImageListSource([tmp_path / f"{i}.png" for i in range(4)])
    parts = list(source.read(0, 4))
    assert [len(t) for t in parts] == [2, 1, 1]
    for image, picture in zip([x for t in parts for x in t], pictures, strict=True):
        assert torch.equal(image, torch.from_numpy(picture).permute(2, 0, 1))
    assert [t.shape for t in source.read(1, 4, size=(5, 7))] == [(3, 3, 5, 7)]
    with pytest.raises(VideoError, match="9.png: no such file"):
        ImageListSource([tmp_path / "9.png"])
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(VideoError, match=r"bad.png: not a readable image \(cannot identify image file\); replace"):
        list(ImageListSource([tmp_path / "bad.png"]).read(0, 1))
    (tmp_path / "empty.png").touch()
    with pytest.raises(VideoError, match=r"empty.png: the file is empty \(0 bytes\)"):
        ImageListSource([tmp_path / "empty.png"]).sizes()
    with pytest.raises(VideoError, match="without images"):
        ImageListSource([])
    assert ImageListSource(torch.zeros(2, 3, 4, 6)).sizes() == [(4, 6)] * 2  # type: ignore[arg-type]
