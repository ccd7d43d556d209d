"""Media files by name: a path, a URL, or a data URL.

`local_media` turns the name that a data set or a caller gives into the path of a file. A file that a URL names, or
contains, is stored in the media cache (`downloads`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mllm_seqpar.errors import VideoError

from .downloads import data_blocks, download, store_bytes

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # at least two letters, because C: is a drive

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".ogv"}
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm"})


def media_size(name: str) -> int:
    """Return the number of bytes of a file, or -1 if there is none."""
    return os.path.getsize(name) if os.path.isfile(name) else -1


def is_remote(name: str) -> bool:
    """Return whether a name is a URL, of a file elsewhere or with the data in it."""
    scheme = _SCHEME.match(name)
    return scheme is not None and scheme[1].lower() in ("http", "https", "data")


def local_media(name: str | os.PathLike[str]) -> str:
    """Return the path of the file for a path or a URL (http, https, file, data).

    Raises:
        VideoError: a URL of another kind, or one that cannot be downloaded.
    """
    name = os.fspath(name)
    scheme = _SCHEME.match(name)
    if scheme is None or os.path.exists(name):
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
