"""Layer: one process, real files. Every file of a corpus against a plain decode from its start, and the ffmpeg command.

The frames that are read are those that the decoder shows, in its order, each once, whatever the number of ranks and
threads or the part that is read.
"""

import shutil
import subprocess
from bisect import bisect_right
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from corpus import CORPUS, QUICK, Case
from PIL import Image

from mllm_seqpar.data import FramePlan, plan_frames, probe, read_frames, scan
from selections import slow_unless

PLANS: list[dict[str, Any]] = [{}, {"fps": 7}, {"num_frames": 5}, {"start": 0.3, "end": 0.7}]
FILES = pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, CORPUS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def made(name: str, folder: Path) -> Path:
    try:
        return CORPUS[name].make(folder / name, folder)
    except (ValueError, av.error.FFmpegError) as error:
        pytest.skip(f"this PyAV cannot write the file: {error!s:.80}")


def decoded(path: Path, case: Case) -> list[tuple[int | None, np.ndarray]]:
    """Return (presentation time, upright image) of every frame that a decoder with one thread shows from the start."""
    if path.suffix == ".webp":
        with Image.open(path) as file:
            return [(40 * n, frame_of(file, n)) for n in range(file.n_frames)]
    found = []
    with av.open(str(path)) as file:
        stream = file.streams.video[case.stream]
        codec = stream.codec_context
        codec.thread_count, size = 1, (codec.width, codec.height)
        reformatter = av.video.reformatter.VideoReformatter()
        for packet in [*(packet for packet in file.demux(stream) if packet.size), None]:
            for frame in codec.decode(packet):
                image = reformatter.reformat(frame, *size, "rgb24", interpolation="BICUBIC").to_ndarray()
                found.append((frame.pts, case.upright(image)))
    return found


def frame_of(file: Image.Image, number: int) -> np.ndarray:
    file.seek(number)
    return np.array(file.convert("RGB"))


def shown_by_command(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    command = ["ffmpeg", "-v", "quiet", "-i", str(path), "-fps_mode", "passthrough", "-f", "rawvideo"]
    output = subprocess.run([*command, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True).stdout
    return np.frombuffer(output, np.uint8).reshape(-1, *shape)


def read(plan: FramePlan, *bounds: int, threads: int) -> list[np.ndarray]:
    return [x for part in read_frames(plan, *bounds, threads=threads) for x in part.permute(0, 2, 3, 1).numpy()]


@FILES
def test_the_frames_are_those_of_a_decode_from_the_start(folder: Path, name: str) -> None:
    case, path = CORPUS[name], made(name, folder)
    expected = decoded(path, case)
    images = [image for _, image in expected]
    assert len({image.tobytes() for image in images}) >= len(images) / 2 - 2, "the frames differ"
    if case.frames != -1:
        assert len(images) == case.frames
    if case.command and shutil.which("ffmpeg"):
        by_command = shown_by_command(path, images[0].shape)
        assert len(by_command) == len(images)
        assert np.abs(by_command.astype(int) - np.stack(images)).mean() < 8  # another version of FFmpeg

    info, scanned = probe(path), scan(path)
    assert (info.distrust is not None, scanned.distrust) == (case.counted, info.distrust)
    assert info.frames == scanned.frames == len(images)
    assert info.fps == pytest.approx(info.frames / info.duration)
    ticks = scanned.ticks
    assert (
        ticks is not None and len(ticks) == len(images) and all(a < b for a, b in zip(ticks, ticks[1:], strict=False))
    )
    if not case.counted:
        assert list(ticks) == [time for time, _ in expected]
    for options in PLANS:
        plan = plan_frames(info, **options)
        assert options or len(plan) == len(images)
        wanted = [images[max(0, bisect_right(ticks, tick) - 1)] for tick in plan.ticks]
        for ranks in (1, 2, 3):
            for threads in (1, 4):
                cuts = [len(plan) * rank // ranks for rank in range(ranks + 1)]
                parts = zip(cuts, cuts[1:], strict=False)
                found = [image for a, b in parts for image in read(plan, a, b, threads=threads)]
                wrong = [i for i, pair in enumerate(zip(found, wanted, strict=True)) if not np.array_equal(*pair)]
                assert not wrong, (options, ranks, threads, wrong)
        for entry in {len(plan) - 1, 0, len(plan) // 2, 31, 12, 13, 11} & {*range(len(plan))}:  # in any order
            assert np.array_equal(read(plan, entry, entry + 1, threads=1)[0], wanted[entry]), (options, entry)


@FILES
def test_torchcodec_gives_the_frames_of_pyav(folder: Path, name: str) -> None:
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchcodec cannot be loaded: {error!s:.80}")
    path = made(name, folder)
    for options in PLANS[:3]:
        plan = plan_frames(probe(path), **options)
        expected = torch.cat(list(read_frames(plan)))
        assert torch.equal(torch.cat(list(read_frames(plan, decoder="torchcodec", batch=7))), expected), options
