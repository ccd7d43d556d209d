"""Time reading the sampled frames of a video: this library against torchcodec and decord, in one run.

    python scripts/bench/video.py [--kinds h264-720p ...] [--fps 0.5 1 4 all] [--seconds 60] [--threads 2] [--repeats 3]
        [--folder DIR] [--out rows.jsonl]

The files are made by ffmpeg, which must be on PATH: moving test patterns with noise, 30 frames a second. A kind is a
codec, a height and, after a "k", the number of frames between keyframes (otherwise the encoder's default). Every reader
decodes to RGB tensors on the CPU. The other libraries are timed with the same number of threads as this library, and
with their default (torchcodec: one; decord: all cores). A library that is not installed, or cannot read a file, is left
out. The benchmark fails if torchcodec reads other frames of an H.264 file than this library. decord's frames are
compared by their number only, because its colours are converted differently.

Seconds are medians. `ratio` is the time of this library over that of the fastest other reader with the same number of
threads, and `default_ratio` over that of the fastest with its default. `cpu_ratio` is the ratio of processor time at
the same number of threads, which depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from mllm_seqpar.data import FramePlan, plan_frames, probe, read_frames

CODECS = {
    "h264": ["-c:v", "libx264", "-preset", "veryfast", "-crf", "26"],
    "hevc": ["-c:v", "libx265", "-preset", "ultrafast", "-crf", "28", "-x265-params", "log-level=error"],
    "vp9": ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-b:v", "2M"],
    "av1": ["-c:v", "libsvtav1", "-preset", "12", "-crf", "40"],
}
KINDS = ["h264-720p", "h264-720p-k30", "h264-1080p", "h264-1080p-k30", "hevc-720p", "vp9-720p", "av1-720p"]


def main() -> None:
    harness.run(parse(), rows_of)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if shutil.which("ffmpeg") is None:
        raise SystemExit("video.py: ffmpeg, which makes the files, is not on PATH; install it")
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.kinds:
            path = make_file(kind, args.seconds, args.folder or Path(scratch))
            for fps in args.fps:
                yield measure(kind, path, fps, args)


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=3, device=False)
    parser.add_argument("--kinds", nargs="+", default=KINDS, metavar="CODEC-HEIGHTp[-kN]")
    parser.add_argument("--fps", nargs="+", default=["0.5", "1", "4", "all"], help='frames per second, or "all"')
    parser.add_argument("--seconds", type=int, default=60, help="length of the files")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every reader")
    parser.add_argument("--folder", type=Path, help="keep the files here, and use those that are already there")
    return parser.parse_args()


def make_file(kind: str, seconds: int, folder: Path) -> Path:
    """Encode the test video of a kind, unless the folder has it."""
    codec, size, *gop = kind.split("-")
    height = int(size.removesuffix("p"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{seconds}s.{'webm' if codec == 'vp9' else 'mp4'}"
    if not path.exists():
        pattern = f"testsrc2=s={height * 16 // 9}x{height}:r=30:d={seconds},noise=alls=12:allf=t"
        keyframes = ["-g", gop[0].removeprefix("k")] if gop else []
        source = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", pattern, "-pix_fmt", "yuv420p"]
        subprocess.run([*source, *CODECS[codec], *keyframes, str(path)], check=True)
    return path


def measure(kind: str, path: Path, fps: str, args: argparse.Namespace) -> dict[str, Any]:
    plan = plan_frames(probe(path), fps=None if fps == "all" else float(fps))
    same, default = peers(plan, args.threads), peers(plan, None)
    readers = {"ours": lambda: ours(plan, args.threads), **same}
    readers |= {f"{name}_default": read for name, read in default.items()}
    found = {}
    for name, read in list(readers.items()):
        try:
            found[name] = read()
        except Exception as error:
            if name == "ours":
                raise
            print(f"{name} cannot read {path.name}: {str(error).splitlines()[0]}", flush=True)
            del readers[name]
    if len({frames for frames, _ in found.values()}) > 1:
        raise SystemExit(f"{path.name}: the readers return different numbers of frames: {found}")
    equal = found.get("torchcodec", found["ours"]) == found["ours"]
    if not equal and kind.startswith("h264"):
        raise SystemExit(f"{path.name}: torchcodec reads other frames than this library at fps {fps}")
    wall, processor = median_seconds(readers, args.repeats)
    row = {"kind": kind, "seconds": args.seconds, "fps": fps, "frames": len(plan), "threads": args.threads}
    row |= {f"{name}_s": round(seconds, 3) for name, seconds in wall.items()}
    row |= {"ratio": ratio(wall, same), "default_ratio": ratio(wall, [f"{name}_default" for name in default])}
    row |= {f"{name}_cpu_s": round(processor[name], 3) for name in ("ours", *same) if name in processor}
    compared = {"equal_frames": equal} if "torchcodec" in found else {}
    return row | {"cpu_ratio": ratio(processor, same)} | compared


def median_seconds(readers: dict[str, Callable[[], object]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds and the median seconds of processor time of each reader, in changing order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for name, _ in harness.rounds(readers, repeats, warm_up=0):
        wall, processor = time.perf_counter(), time.process_time()
        readers[name]()
        times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    first, second = ({name: median(pair[i] for pair in pairs) for name, pairs in times.items()} for i in (0, 1))
    return first, second


def ratio(seconds: dict[str, float], others: Iterable[str]) -> float:
    """Return the time of this library over that of the fastest of the other readers."""
    return round(seconds["ours"] / min((seconds[name] for name in others if name in seconds), default=nan), 3)


def ours(plan: FramePlan, threads: int) -> tuple[int, str]:
    return _digest(read_frames(plan, threads=threads))


def peers(plan: FramePlan, threads: int | None) -> dict[str, Callable[[], tuple[int, str]]]:
    """Return the readers of other libraries that are installed; without `threads`, with their default."""
    found: dict[str, Callable[[], tuple[int, str]]] = {}
    times = [float((2 * tick + 1) * plan.time_base / 2) for tick in plan.ticks]
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError):  # the last two without FFmpeg's libraries
        pass
    else:

        def torchcodec() -> tuple[int, str]:
            options = {} if threads is None else {"num_ffmpeg_threads": threads}
            video = VideoDecoder(plan.path, seek_mode="approximate", **options)
            parts = (times[i : i + 16] for i in range(0, len(times), 16))
            return _digest(video.get_frames_played_at(part).data for part in parts)

        found["torchcodec"] = torchcodec
    try:
        import decord
    except ImportError:
        return found

    def with_decord() -> tuple[int, str]:
        video = decord.VideoReader(plan.path, **({} if threads is None else {"num_threads": threads}))
        rate = video.get_avg_fps()
        numbers = [min(int(time * rate), len(video) - 1) for time in times]
        parts = (numbers[i : i + 16] for i in range(0, len(numbers), 16))
        return _digest(torch.from_numpy(video.get_batch(part).asnumpy()).permute(0, 3, 1, 2) for part in parts)

    return found | {"decord": with_decord}


def _digest(parts: Any) -> tuple[int, str]:
    """Return the number of frames, and a digest of a few pixels of each, which costs no time."""
    count, digest = 0, hashlib.blake2b(digest_size=8)
    for frames in parts:
        count += len(frames)
        digest.update(frames[:, :, ::16, ::16].contiguous().numpy().tobytes())
    return count, digest.hexdigest()


if __name__ == "__main__":
    main()
