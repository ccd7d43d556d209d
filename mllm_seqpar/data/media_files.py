"""Media files by name: a path, a range of bytes in a tar shard, a URL, or a data URL.

A source names its file by one string. `local_media` turns the name that a data set or a caller gives into the name of
something that can be read here: it downloads a URL into the cache and writes the contents of a data URL there. A range
of bytes is written in the form of FFmpeg's subfile protocol, `subfile,,start,A,end,B,,:PATH`, so that a video inside an
uncompressed tar shard is decoded in place, with random access, and nothing is extracted.

A media file may come from anyone, so it is opened only if it is self-contained. FFmpeg also reads playlists (HLS, DASH,
concat, SDP) that name other files and hosts, and Pillow also reads formats that run other programs (EPS).
`video_options` and `images.IMAGE_FORMATS` exclude these. The format is determined by the content, never by the name
of the file.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from mllm_seqpar.errors import VideoError

from .downloads import data_blocks, download, store_bytes

_SLICE = re.compile(r"^subfile,,start,(\d+),end,(\d+),,:(.+)$", re.DOTALL)
_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # at least two letters, because C: is a drive
_SAMPLES, _SAMPLE_BYTES = 64, 4096

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".ogv"}
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm"})

_CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2 matroska,webm avi mpegts mpeg flv ogg asf mxf nut ivf dv rm gif apng wav mp3 aac flac"
)
_STREAMS = "h264 hevc av1 obu m4v mpegvideo h263 yuv4mpegpipe"
_PICTURES = "png_pipe jpeg_pipe webp_pipe bmp_pipe tiff_pipe"


def video_options(name: str) -> dict[str, str]:
    """Return options with which FFmpeg reads the file `name` and no other file.

    Only self-contained containers are opened, and only the protocol of local files is allowed.
    """
    formats = ",".join((_CONTAINERS + " " + _STREAMS + " " + _PICTURES).split())
    return {"format_whitelist": formats, "protocol_whitelist": "file,subfile" if _SLICE.match(name) else "file"}


def file_slice(path: str | os.PathLike[str], start: int, stop: int) -> str:
    """Return the name of bytes start <= i < stop of a file."""
    return f"subfile,,start,{start},end,{stop},,:{os.fspath(path)}"


def underlying_file(name: str) -> str:
    """Return the path of the file that has the bytes of a name."""
    found = _SLICE.match(name)
    return found[3] if found else name


def media_size(name: str) -> int:
    """Return the number of bytes, or -1 if there is no such file."""
    found = _SLICE.match(name)
    if not os.path.isfile(underlying_file(name)):
        return -1
    return int(found[2]) - int(found[1]) if found else os.path.getsize(name)


def open_media(name: str) -> BinaryIO:
    """Open a name for reading; a range of bytes is read whole, since only images are opened this way."""
    found = _SLICE.match(name)
    if found is None:
        return open(name, "rb")
    with open(found[3], "rb") as file:
        file.seek(int(found[1]))
        return io.BytesIO(file.read(int(found[2]) - int(found[1])))


def media_digest(name: str) -> str:
    """Return a digest of the size and of evenly spaced samples, so that a long video is not read whole."""
    found, size = _SLICE.match(name), media_size(name)
    first, digest = int(found[1]) if found else 0, hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(underlying_file(name), "rb") as file:
        for sample in range(_SAMPLES):
            file.seek(first + max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(min(_SAMPLE_BYTES, size)))
    return digest.hexdigest()


def is_remote(name: str) -> bool:
    """Return whether a name is a URL, of a file elsewhere or with the data in it."""
    scheme = _SCHEME.match(name)
    return scheme is not None and scheme[1].lower() in ("http", "https", "data")


def local_media(name: str | os.PathLike[str]) -> str:
    """Return the name of local bytes for a path, a range of bytes, or a URL (http, https, file, data).

    Raises:
        VideoError: a URL of another kind, or one that cannot be downloaded.
    """
    name = os.fspath(name)
    scheme = _SCHEME.match(name)
    if scheme is None or _SLICE.match(name) or os.path.exists(name):
        return name
    kind = scheme[1].lower()
    if kind in ("http", "https"):
        return str(download(name))
    if kind == "data":
        return str(_store_data_url(name))
    if kind == "file":
        try:
            return unquote(urlsplit(name).path)
        except ValueError as error:
            raise VideoError(f"{name:.200}: not a valid URL ({error})") from error
    if "://" in name:
        raise VideoError(f"{name:.200}: {kind} URLs cannot be read; give a path, or an http, https or data URL")
    return name


def _store_data_url(name: str) -> Path:
    try:
        content = b"".join(data_blocks(name))
    except ValueError as error:
        raise VideoError(f"{name:.60}...: not a data URL ({error}); expected data:image/png;base64,...") from error
    kind = name[:100].partition(",")[0].removeprefix("data:").partition(";")[0].partition("/")[2]
    return store_bytes(content, "." + re.sub(r"\W.*", "", kind) if kind else "")
