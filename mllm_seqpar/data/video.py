"""Video metadata, and the plan of the frames to read.

Every rank computes the same plan from the same file without decoding: from the container's metadata if it states the
number of frames, otherwise from a scan of the packets (demultiplexing only). Times are integer ticks of the stream's
time base, so ranks cannot round differently. A planned tick stands for the frame with the greatest presentation time
not after it, or for the first frame if there is none. `reader.read_frames` decodes the plan.
"""

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError, VideoError

from .frame_choice import FrameChoice
from .media_files import media_size
from .store_files import digest_of, file_digest

_CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2 matroska,webm avi mpegts mpeg flv ogg asf mxf nut ivf dv rm gif apng wav mp3 aac flac"
)
_STREAMS = "h264 hevc av1 obu m4v mpegvideo h263 yuv4mpegpipe"
_PICTURES = "png_pipe jpeg_pipe webp_pipe bmp_pipe tiff_pipe"

VIDEO_OPTIONS = {
    "format_whitelist": ",".join(f"{_CONTAINERS} {_STREAMS} {_PICTURES}".split()),
    "protocol_whitelist": "file",
}
"""Options with which FFmpeg opens self-contained files only, by their content, never by the name of the file.

A file may come from anyone, and FFmpeg also reads playlists (HLS, DASH, concat, SDP) that name other files and hosts.
"""

_log = get_logger(__name__)


def require_av() -> Any:
    return optional_import("av", extra="video", needed_for="reading videos")


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """Metadata of a video, read without decoding.

    Attributes:
        fps: average frames per second.
        duration: seconds from the start of the first frame to the end of the last.
        width, height: pixels of a coded frame, before a phone's rotation is applied.
        start, length: presentation time of the first frame, and `duration`, in ticks of `time_base` seconds.
        ticks: presentation time of every frame, ascending, if the packets were scanned; otherwise None.
    """

    path: str
    frames: int
    fps: float
    duration: float
    width: int
    height: int
    start: int
    length: int
    time_base: Fraction
    ticks: tuple[int, ...] | None = field(default=None, repr=False)

    def plan(self, ticks: Iterable[int]) -> "FramePlan":
        return FramePlan(self.path, tuple(ticks), self.time_base, self.start)


@dataclass(frozen=True)
class FramePlan:
    """The frames to use of one video: entry i is the frame shown at `ticks[i]`.

    `ticks` are in units of `time_base` seconds on the stream's own clock, on which the first frame has time `start`.
    """

    path: str
    ticks: tuple[int, ...] = field(repr=False)
    time_base: Fraction
    start: int

    def __post_init__(self) -> None:
        if not self.ticks or any(b < a for a, b in zip(self.ticks, self.ticks[1:], strict=False)):
            raise ConfigError(f"{self.path}: a plan needs at least one tick, in ascending order; got {self.ticks[:8]}")

    def __len__(self) -> int:
        return len(self.ticks)

    def seconds(self, index: int) -> float:
        return self.time(self.ticks[index])

    def time(self, tick: int) -> float:
        """Return the time of a tick in seconds after the first frame."""
        return float((tick - self.start) * self.time_base)


def source_meta(plan: FramePlan) -> dict[str, Any]:
    """Return metadata that identifies the frames of a plan: path, size, mtime and digest of the file; the times."""
    times = digest_of(repr((plan.ticks, plan.time_base)))
    return {
        "source_path": os.path.abspath(plan.path),
        "source_size": media_size(plan.path),
        "source_mtime": int(os.stat(plan.path).st_mtime),
        "source_digest": file_digest(plan.path),
        "frames": len(plan),
        "frame_times": times,
    }


@contextmanager
def open_video(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Open a file and yield (container, video stream); raise VideoError if it has no readable video stream."""
    av = require_av()
    name = os.fspath(path)
    if media_size(name) < 0:
        found = "a directory" if os.path.isdir(name) else "no such file"
        raise VideoError(f"{name}: {found}; give the path of a video file")
    if media_size(name) == 0:
        raise VideoError(f"{name}: the file is empty (0 bytes); was the download interrupted?")
    try:
        # "file:" keeps a name such as concat:a.mp4 from being read as a protocol
        container = av.open(f"file:{name}", options=VIDEO_OPTIONS)
    except (av.error.FFmpegError, OSError) as error:
        if getattr(error, "errno", None) == errno.EINVAL:  # the format is not in the whitelist
            raise VideoError(
                f"{name}: not in a supported container format (mp4, mov, mkv, webm, avi, mpegts and others "
                "that are self-contained); playlists and descriptions that name other files or hosts (HLS, DASH, "
                "concat, SDP) are refused; convert it, e.g. ffmpeg -i IN -c copy OUT.mp4"
            ) from error
        raise VideoError(f"{name}: not a readable video ({reason(error)}); is it a complete video file?") from error
    with container:
        streams = [s for s in container.streams.video if "attached_pic" not in str(getattr(s, "disposition", None))]
        if not streams:
            kinds = ", ".join(sorted({str(s.type) for s in container.streams})) or "nothing"
            raise VideoError(f"{name}: contains no video stream (found: {kinds}); give a file with moving images")
        yield container, streams[0]


def probe(path: str | os.PathLike[str]) -> VideoInfo:
    """Return the metadata of a video, from the container if it is complete, otherwise from a scan of the packets.

    A VideoError says that the file is missing, corrupt, empty, without video, or without presentation times.
    """
    with open_video(path) as (container, stream):
        # A fragmented mp4 that was not read to its end counts only the frames of the fragments read so far.
        index_agrees = not hasattr(stream, "index_entries") or len(index_of(stream)) > 0
        if stream.frames > 0 and stream.duration and stream.start_time is not None and index_agrees:
            return _info(path, stream, stream.frames, stream.start_time, stream.duration, None)
        return _scan(path, container, stream)


def scan(path: str | os.PathLike[str]) -> VideoInfo:
    """Return the metadata of a video from a scan of all packets, so that `ticks` is set; otherwise like `probe`."""
    with open_video(path) as (container, stream):
        return _scan(path, container, stream)


def plan_frames(
    info: VideoInfo,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int | None = None,
    start: float | None = None,
    end: float | None = None,
) -> FramePlan:
    """Choose frames of a video or of a clip of it: `fps` per second, `num_frames` evenly spaced, or all of them.

    Args:
        fps: take frames at 0, 1/fps, 2/fps, ... seconds; every frame once if the video's rate is not higher.
        num_frames: take the frames in the middle of this many equal parts; every frame once if there are not more.
        max_frames: if `fps` (or all frames) gives more than this, take this many as by `num_frames`.
        start, end: seconds after the first frame at which the clip begins, and before which it ends; None: those of
            the video, which is not extended by an `end` after its own. Times of the plan remain those of the video.

    Raises:
        ConfigError: see `FrameChoice`.
        VideoError: the clip begins after the end of the video.
    """
    FrameChoice(fps=fps, num_frames=num_frames, max_frames=max_frames, start=start, end=end)  # checks them
    first, length = _clip(info, start, end)
    native = Fraction(info.frames) / (info.length * info.time_base)
    if fps is not None and fps < native:
        rate = Fraction(fps).limit_denominator(1_000_000) or Fraction(
            fps
        )  # below half a millionth, the fraction would be 0
        step = 1 / (rate * info.time_base)  # ticks between planned frames
        count = -(-length // step)  # ceil: all k with k * step < length
        if max_frames is None or count <= max_frames:
            return info.plan(round(first + k * step) for k in range(int(count)))
    frames = info.frames if length == info.length else math.ceil(native * length * info.time_base)
    limit = min(n for n in (num_frames, max_frames, math.inf) if n is not None)
    if limit >= frames:
        ticks = (info if info.ticks is not None else scan(info.path)).ticks or ()
        if length == info.length:
            return info.plan(ticks)
        ticks = tuple(tick for tick in ticks if first <= tick < first + length) or (int(first),)
        if len(ticks) <= limit:  # not if the clip has more frames a second than the video has on average
            return info.plan(ticks)
    step = length / Fraction(limit)
    return info.plan(int(first + (i + Fraction(1, 2)) * step) for i in range(int(limit)))


def _clip(info: VideoInfo, start: float | None, end: float | None) -> tuple[Fraction, Fraction]:
    """Return the first tick and the number of ticks of the clip from `start` to `end` seconds; see `plan_frames`."""
    begin = Fraction(start or 0).limit_denominator(1_000_000) / info.time_base
    if begin >= info.length:
        raise VideoError(f"{info.path}: the clip starts at {start:g} s, but the video has {info.duration:.3f} s")
    stop = info.length if end is None else Fraction(end).limit_denominator(1_000_000) / info.time_base
    return info.start + begin, min(Fraction(info.length), Fraction(stop)) - begin


def _scan(path: str | os.PathLike[str], container: Any, stream: Any) -> VideoInfo:
    av = require_av()
    found: list[tuple[int, int]] = []
    try:
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            time = packet.pts if packet.pts is not None else packet.dts
            if time is None:
                raise VideoError(
                    f"{path}: its packets have no presentation times, so frames cannot be found by time; "
                    "put it in a container that has them, e.g. ffmpeg -i IN -c copy OUT.mp4"
                )
            found.append((time, packet.duration or 0))
    except av.error.FFmpegError as error:
        raise VideoError(f"{path}: cannot be read after packet {len(found)} ({reason(error)})") from error
    if not found:
        raise VideoError(f"{path}: its video stream has no frames; was the recording interrupted?")
    found.sort()
    start, (last, tail) = found[0][0], found[-1]
    if not tail:  # Some containers do not state the duration of a frame; use the average.
        tail = (last - start) // (len(found) - 1) if len(found) > 1 else round(1 / (25 * stream.time_base))
    info = _info(path, stream, len(found), start, last + max(tail, 1) - start, tuple(t for t, _ in found))
    stated = (container.duration or 0) / av.time_base
    if info.duration < 0.9 * stated:
        _log.warning("%s: its video ends at %.1f s of the %.1f s that the file states", path, info.duration, stated)
    return info


def _info(path: Any, stream: Any, frames: int, start: int, length: int, ticks: tuple[int, ...] | None) -> VideoInfo:
    duration = length * stream.time_base
    return VideoInfo(
        path=os.fspath(path),
        frames=frames,
        fps=float(frames / duration),
        duration=float(duration),
        width=stream.codec_context.width,
        height=stream.codec_context.height,
        start=start,
        length=length,
        time_base=stream.time_base,
        ticks=ticks,
    )


def write_video(
    path: str | os.PathLike[str],
    frames: Iterable[Any],
    *,
    rate: int,
    options: Mapping[str, str],
    fallback: Mapping[str, str] = MappingProxyType({}),
    threads: int = 0,
) -> None:
    """Write images (height, width, 3), uint8, as H.264, or as MPEG-4 if this build of PyAV has no x264.

    Args:
        options, fallback: of the encoder of H.264, and of that of MPEG-4.
        threads: of the encoder; 0 leaves the number to it.
    """
    av = require_av()
    codec, chosen = "libx264", options
    try:
        av.codec.Codec(codec, "w")
    except ValueError:
        codec, chosen = "mpeg4", fallback  # which every build has
    with av.open(os.fspath(path), "w") as file:
        stream = file.add_stream(codec, rate=rate, options=dict(chosen))
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", threads
        for number, image in enumerate(frames):
            if not number:
                stream.height, stream.width = image.shape[:2]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode())


def index_of(stream: Any) -> Any:
    """Return the container's index of a stream if it lists every frame, otherwise an empty tuple."""
    entries = getattr(stream, "index_entries", ())  # Newer PyAV only; without it, packets are scanned.
    return entries if stream.frames and len(entries) == stream.frames else ()


def reason(error: Exception) -> str:
    """Return the text of an FFmpeg error without errno and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
