"""Media by name: what a data set or a caller calls a video or an image, and the file that has its content.

`local_media` returns the path of the file for a path, a URL, or a data URL. What is not in a file yet, because a URL or
a table contains it, is stored in the media cache.
"""

from __future__ import annotations

import os
import re
import urllib.error
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mllm_seqpar.digests import digest_of
from mllm_seqpar.errors import PASSED, VideoError, first_line, reading

from .downloads import blocks, data_blocks, open_url
from .files import atomic_write

CACHE_VARIABLE = "MLLM_SEQPAR_CACHE"
"""Environment variable with the directory of the cache; default: mllm-seqpar below the user's cache directory."""

SIZE_VARIABLE = "MLLM_SEQPAR_CACHE_GB"
"""Environment variable with the largest size of the whole cache in GB; default: 200. One file may take a tenth of
it."""

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # at least two letters, because C: is a drive
_URLS = {
    **dict.fromkeys(("http", "https"), "https://HOST/NAME.mp4"),
    "file": "file:///FOLDER/NAME.mp4",
    "data": "data:image/png;base64,...",
}

VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".ogv"}
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm"})


def media_size(name: str) -> int:
    """Return the number of bytes of a file, or -1 if there is none."""
    return os.path.getsize(name) if os.path.isfile(name) else -1


def require_content(name: str | os.PathLike[str], kind: str) -> None:
    """Raise VideoError unless a file exists and is not empty; `kind` says what it should be."""
    size = media_size(os.fspath(name))
    if size <= 0:
        fault = f"{'a directory' if os.path.isdir(name) else 'no such file'}; give the path of {kind}"
        raise VideoError(f"{name}: {fault if size else 'the file is empty (0 bytes); was the download interrupted?'}")


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
    with reading(f"{name:.100}: not a valid URL", f"expected {_URLS.get(kind)}", VideoError):
        if kind == "data":
            content = b"".join(data_blocks(name))
        elif kind in _URLS:
            path = unquote(urlsplit(name).path)
    if kind in ("http", "https"):
        return str(media_cache().download(name))
    if kind == "data":
        subtype = name[:100].partition(",")[0].removeprefix("data:").partition(";")[0].partition("/")[2]
        return str(media_cache().store(content, "." + re.sub(r"\W.*", "", subtype) if subtype else ""))
    if kind == "file":
        return path
    if "://" in name:
        raise VideoError(f"{name:.200}: {kind} URLs cannot be read; give a path, or an http, https or data URL")
    return name


def media_cache() -> MediaCache:
    """Return the media cache of the environment; its directory may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(os.environ.get(CACHE_VARIABLE) or Path(base, "mllm-seqpar")) / "media"
    text = os.environ.get(SIZE_VARIABLE, "200")
    with reading(f"{SIZE_VARIABLE}={text!r} is not a number of GB", "set a number such as 200", VideoError):
        return _cache_in(directory, int(float(text) * 1e9))


class MediaCache:
    """A directory of media files, each named by a digest.

    A file is written under a temporary name and renamed, so it is complete or absent. Processes of one machine lock the
    name, so one of them writes. Nothing is deleted: if the cache is full, an error is raised.

    Args:
        directory: created with the first file.
        limit: the largest number of bytes of all files; one file may have a tenth of it.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._counted: int | None = None  # the bytes of all files when they were counted
        self._written = 0  # the bytes that this process has written since then

    def download(self, url: str) -> Path:
        """Return the file of a URL, which is downloaded if it is not in the cache.

        Raises:
            VideoError: there is no network, the server refuses or is too slow, the file is a web page, is incomplete,
                or is too large.
        """
        suffix = Path(urlsplit(url).path).suffix[:8]
        return self.file(digest_of(url) + suffix, url, lambda: self._blocks_of(url))

    def store(self, content: bytes, suffix: str) -> Path:
        """Return the file that has this content; `suffix` only helps people who inspect the cache."""
        what = f"{len(content)} bytes of an image or a data URL"
        return self.file(digest_of(content) + suffix, what, lambda: iter([content]))

    def file(self, name: str, what: str, chunks: Callable[[], Iterator[bytes]]) -> Path:
        """Return the file with this name; if there is none, it is written from `chunks`.

        Raises:
            VideoError: it cannot be written, or is too large; begins with `what`.
        """
        from filelock import FileLock

        path = self.directory / name
        if path.is_file():
            return path
        remedy = f"free some space, or set {CACHE_VARIABLE} to another directory"
        with reading(f"{what}: cannot be stored in {self.directory}", remedy, VideoError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not path.is_file():
                    self._write(path, what, chunks())
        return path

    def _write(self, path: Path, what: str, chunks: Iterator[bytes]) -> None:
        used = self._used()
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            for chunk in chunks:
                written = file.tell() + len(chunk)
                if written > self.limit / 10 or used + written > self.limit:
                    raise VideoError(
                        f"{what}: with this file, the cache {self.directory} would exceed its limit of "
                        f"{self.limit / 1e9:g} GB, of which one file may have a tenth; delete files there, or set "
                        f"{SIZE_VARIABLE} to a larger number"
                    )
                file.write(chunk)
            self._written += file.tell()

    def _used(self) -> int:
        """Return the bytes of all files. Counting takes long if there are many, so it is not done for each file, unless
        the cache is almost full."""
        counted, written = self._counted, self._written
        if counted is None or written > self.limit / 100 or counted + written > 0.9 * self.limit:
            counted, written = sum(map(_size, os.scandir(self.directory))), 0
            self._counted, self._written = counted, written
        return counted + written

    def _blocks_of(self, url: str) -> Iterator[bytes]:
        try:
            with open_url(url) as answer:
                if answer.headers.get_content_type() == "text/html":
                    raise VideoError(f"{url}: it is a web page, not a media file; give the URL of the file itself")
                if answer.length and answer.length > self.limit / 10:
                    raise VideoError(
                        f"{url}: it has {answer.length / 1e9:g} GB; a file of the cache may have "
                        f"{self.limit / 1e10:g}, a tenth of the whole; download it yourself and give its path, or set "
                        f"{SIZE_VARIABLE}"
                    )
                yield from blocks(answer)
        except urllib.error.HTTPError as error:
            raise VideoError(f"{url}: the server answered {error.code} ({error.reason}); check the URL") from error
        except PASSED:
            raise
        except Exception as error:
            why = getattr(error, "reason", None) or first_line(error)
            raise VideoError(
                f"{url}: cannot be downloaded ({why}); without a network, download it elsewhere and give its path"
            ) from error


def file_version(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return numbers that change if a file is written again, for keys of caches; none if there is no such file."""
    try:
        facts = os.stat(path)
    except OSError:  # whoever opens the file says what is wrong
        return ()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


_cache_in = lru_cache(MediaCache)
"""One cache for each directory and limit, which counts what this process writes."""


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # a temporary file of another process or thread, which has been renamed since
        return 0
