"""Opening of video files: the containers that are read, the stream that is the video, its packets and its index."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import PASSED, VideoError, reason

from .media_files import require_content

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
warn_once = lru_cache(maxsize=1024)(_log.warning)
"""A warning about a file that is opened in every epoch is logged once."""


def require_av() -> Any:
    return optional_import("av", extra="video", needed_for="reading videos")


@contextmanager
def open_video(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Open a file and yield (container, video stream); raise VideoError if it has no readable video stream."""
    av = require_av()
    name = os.fspath(path)
    require_content(name, "a video file")
    try:
        # "file:" keeps a name such as concat:a.mp4 from being read as a protocol
        container = av.open(f"file:{name}", options=VIDEO_OPTIONS)
    except MemoryError:
        raise
    except Exception as error:
        fault = f"not a readable video ({reason(error)}); is it a complete video file?"
        if getattr(error, "errno", None) == errno.EINVAL:  # the format is not in the whitelist
            fault = (
                "not in a supported container format (mp4, mov, mkv, webm, avi, mpegts and others that are "
                "self-contained); playlists and descriptions that name other files or hosts (HLS, DASH, concat, SDP) "
                "are refused; convert it, e.g. ffmpeg -i IN OUT.mp4"
            )
        raise VideoError(f"{name}: {fault}") from error
    with container:
        yield container, _video_stream(name, container)


def _video_stream(name: str, container: Any) -> Any:
    """Return the video stream that the ffmpeg command would take: the default one, then that of the most pixels.

    A cover picture is none, and a still picture (the first stream of an animated AVIF) only if there is no other.
    """
    moving = [stream for stream in container.streams.video if not _has_disposition(stream, "attached_pic")]
    streams = [stream for stream in moving if stream.codec_context is not None]
    if not streams:
        kinds = {"a cover picture" if stream.type == "video" else str(stream.type) for stream in container.streams}
        listed = ", ".join(sorted(kinds)) or "nothing"
        fault = f"contains no video stream (found: {listed}); give a file with moving images"
        if moving:
            fault = "this build of FFmpeg has no decoder for its video; convert it, e.g. to H.264"
        raise VideoError(f"{name}: {fault}")

    def rank(stream: Any) -> tuple[bool, int]:
        pixels = stream.codec_context.width * stream.codec_context.height
        still = stream.frames == 1 or _has_disposition(stream, "still_image")
        return not still, pixels + 5_000_000 * _has_disposition(stream, "default")  # the weights of the ffmpeg command

    chosen = max(streams, key=rank)
    others = [f"{x.index} ({x.codec_context.width} x {x.codec_context.height})" for x in streams if x is not chosen]
    if others:
        warn_once(
            "%s: has %d video streams; stream %d (%d x %d) is read, stream %s is left out",
            *(name, len(streams), chosen.index, chosen.codec_context.width, chosen.codec_context.height),
            ", ".join(others),
        )
    return chosen


def _has_disposition(stream: Any, name: str) -> bool:
    """Return whether a stream has a flag of FFmpeg's dispositions."""
    flag = getattr(type(stream.disposition), name, None)
    return flag is not None and bool(stream.disposition & flag)


def demuxed(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream that have data. An error of the container ends them, as in FFmpeg's programs."""
    try:
        for packet in container.demux(stream):
            if packet.size:
                yield packet
    except PASSED:
        raise
    except Exception as error:  # noqa: BLE001 - the packets before it are used
        warn_once("%s: cannot be read to its end (%s)", container.name.removeprefix("file:"), reason(error))


def has_fragments(path: Any) -> bool:
    """Return whether a file of the mp4 family has fragments, whose frames its header does not count."""
    with open(path, "rb") as file:
        while len(head := file.read(16)) >= 8:
            size, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if kind == b"moof":
                return True
            size = int.from_bytes(head[8:16], "big") if size == 1 else size
            if size < 8 or not kind.isalnum():  # the last box, or another format
                return False
            file.seek(size - len(head), os.SEEK_CUR)
    return False


def index_of(stream: Any) -> Any:
    """Return the container's index of a stream if it lists every frame, otherwise an empty tuple."""
    entries = getattr(stream, "index_entries", ())  # Newer PyAV only; without it, packets are scanned.
    return entries if stream.frames and len(entries) == stream.frames else ()
