"""The media cache, for media that are not local files: downloads, and images and videos stored inside tables.

Each file is named by a digest, written under a temporary name and renamed, so it is complete or absent. Processes of
one machine lock the name, so one of them downloads. Nothing is deleted: if the cache is full, an error is raised.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mllm_seqpar.errors import VideoError

from .store_files import atomic_write
from .urls import blocks, open_url

CACHE_VARIABLE = "MLLM_SEQPAR_CACHE"
"""Environment variable with the directory of the cache; default: mllm-seqpar below the user's cache directory."""

SIZE_VARIABLE = "MLLM_SEQPAR_CACHE_GB"
"""Environment variable with the largest size of the whole cache in GB; default: 200. One file may take a tenth of
it."""


def media_cache() -> Path:
    """Return the directory of the cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(base, "mllm-seqpar")) / "media"


def cache_limit() -> int:
    """Return the largest size of the cache in bytes."""
    text = os.environ.get(SIZE_VARIABLE, "200")
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError) as error:
        raise VideoError(f"{SIZE_VARIABLE}={text!r} is not a number of GB; set a number such as 200") from error


def download(url: str) -> Path:
    """Return the file of a URL, from the cache or downloaded into it.

    Raises:
        VideoError: there is no network, the server refuses or is too slow, the file is a web page, is incomplete, or is
            too large.
    """
    try:
        suffix = Path(urlsplit(url).path).suffix[:8]
    except ValueError as error:
        raise VideoError(f"{url}: not a valid URL ({error})") from error
    return _cached(hashlib.sha256(url.encode()).hexdigest()[:40] + suffix, url, lambda: _blocks_of(url))


def store_bytes(content: bytes, suffix: str) -> Path:
    """Return the file of the cache that has this content; `suffix` only helps people who inspect the cache."""
    name = hashlib.sha256(content).hexdigest()[:40] + suffix
    return _cached(name, f"{len(content)} bytes of a table or data URL", lambda: iter([content]))


def _cached(name: str, what: str, chunks: Callable[[], Iterator[bytes]]) -> Path:
    from filelock import FileLock

    path = media_cache() / name
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                _write(path, what, chunks())
    except OSError as error:
        raise VideoError(
            f"{what}: cannot be stored in {path.parent} ({error.strerror or error}); free some space, or set "
            f"{CACHE_VARIABLE} to another directory"
        ) from error
    return path


def _write(path: Path, what: str, chunks: Iterator[bytes]) -> None:
    limit = cache_limit()
    used = sum(entry.stat().st_size for entry in os.scandir(path.parent) if entry.is_file())
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for chunk in chunks:
            written = file.tell() + len(chunk)
            if written > limit / 10 or used + written > limit:
                raise VideoError(
                    f"{what}: with this file, the cache {path.parent} would exceed its limit of {limit / 1e9:g} GB, "
                    "of which "
                    f"one file may have a tenth; delete files there, or set {SIZE_VARIABLE} to a larger number"
                )
            file.write(chunk)


def _blocks_of(url: str) -> Iterator[bytes]:
    try:
        with open_url(url) as answer:
            if answer.headers.get_content_type() == "text/html":
                raise VideoError(f"{url}: it is a web page, not a media file; give the URL of the file itself")
            if answer.length and answer.length > cache_limit() / 10:
                raise VideoError(
                    f"{url}: it has {answer.length / 1e9:g} GB; a file of the cache may have {cache_limit() / 1e10:g}, "
                    f"a tenth of the whole; download it yourself and give its path, or set {SIZE_VARIABLE}"
                )
            yield from blocks(answer)
    except urllib.error.HTTPError as error:
        raise VideoError(f"{url}: the server answered {error.code} ({error.reason}); check the URL") from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise VideoError(
            f"{url}: cannot be downloaded ({why}); without a network, download it elsewhere and give its path"
        ) from error
