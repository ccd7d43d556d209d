"""Downloads: the contents of http(s) and data: URLs, and the media cache, which keeps them.

Each file of the cache is named by a digest, written under a temporary name and renamed, so it is complete or absent.
Processes of one machine lock the name, so one of them downloads. Nothing is deleted: if the cache is full, an error is
raised.

The URLs of a data set are opened without a check, through the proxies of the environment. The URLs of requests to a
server need `hosts`, those that its operator allows. The host "*" stands for every host with a public address. Its name
is resolved once, addresses that are not public are dropped, and the connection uses one of the others. No refused
address is ever contacted, and the name cannot resolve to another address between check and use. Redirects are checked
like the first URL. No proxy is used.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from mllm_seqpar.errors import VideoError

from .store_files import atomic_write, digest_of

CACHE_VARIABLE = "MLLM_SEQPAR_CACHE"
"""Environment variable with the directory of the cache; default: mllm-seqpar below the user's cache directory."""

SIZE_VARIABLE = "MLLM_SEQPAR_CACHE_GB"
"""Environment variable with the largest size of the whole cache in GB; default: 200. One file may take a tenth of
it."""

SECONDS = 60.0
"""Seconds that a host may take to answer, and between two blocks of its answer."""

LEAST_RATE = 10_000.0
"""Bytes per second that a host must send, on average over each `SECONDS`."""

_BLOCK = 1 << 20  # a multiple of four, so that a block of base64 is complete

_UNICAST = ipaddress.ip_network("2000::/3")
"""All public IPv6 addresses, and none with an IPv4 address in its last bits (::ffff:0:0/96, 64:ff9b::/96)."""

_NOT_PUBLIC = [ipaddress.ip_network(block) for block in ("192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")]
"""Blocks that `is_global` of some versions of Python lets pass: gateways to IPv4, and documentation."""


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
    return stored(digest_of(url) + suffix, url, lambda: _blocks_of(url))


def store_bytes(content: bytes, suffix: str) -> Path:
    """Return the file of the cache that has this content; `suffix` only helps people who inspect the cache."""
    return stored(
        digest_of(content) + suffix, f"{len(content)} bytes of an image or a data URL", lambda: iter([content])
    )


def stored(name: str, what: str, chunks: Callable[[], Iterator[bytes]]) -> Path:
    """Return the file of the cache with this name; if there is none, it is written from `chunks`.

    Raises:
        VideoError: it cannot be written, or is too large; begins with `what`.
    """
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
    used = _used(path.parent, limit)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for chunk in chunks:
            written = file.tell() + len(chunk)
            if written > limit / 10 or used + written > limit:
                raise VideoError(
                    f"{what}: with this file, the cache {path.parent} would exceed its limit of {limit / 1e9:g} GB, "
                    f"of which one file may have a tenth; delete files there, or set {SIZE_VARIABLE} to a larger number"
                )
            file.write(chunk)
        counted, since = _counts[path.parent]
        _counts[path.parent] = counted, since + file.tell()


_counts: dict[Path, tuple[int, int]] = {}
"""Of each directory: the bytes of its files when they were counted, and those that this process has written since."""


def _used(directory: Path, limit: int) -> int:
    """Return the bytes of the files in a directory. Counting takes long if there are many, so it is not done for each
    file, unless the directory is almost full."""
    counted, since = _counts.get(directory, (0, limit))
    if since > limit / 100 or counted + since > 0.9 * limit:
        counted, since = sum(map(_size, os.scandir(directory))), 0
        _counts[directory] = counted, since
    return counted + since


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # a temporary file of another process or thread, which has been renamed since
        return 0


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


def open_url(url: str, hosts: set[str] | None = None) -> Any:
    """Open an http(s) URL; return the answer, with `headers`, for `blocks`.

    Args:
        url: of the file.
        hosts: the allowed ones, in lower case; None allows all, and uses proxies.

    Raises:
        NotAllowed: the host, or that of a redirect, is not allowed.
        OSError, http.client.HTTPException, ValueError: the URL cannot be read.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "mllm-seqpar"})
    if hosts is None:
        return urllib.request.urlopen(request, timeout=SECONDS)
    _require_allowed(hosts, url)
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(hosts),
        _Connections(hosts),
    ):
        opener.add_handler(handler)
    return opener.open(request, timeout=SECONDS)


def blocks(answer: Any, longest: float | None = None) -> Iterator[bytes]:
    """Yield the bytes that a host sends, as they come.

    Args:
        answer: of `open_url`.
        longest: seconds that all of them may take; None: as long as the host sends `LEAST_RATE`.

    Raises:
        OSError: they come too slowly, or end before the stated length.
    """
    began = counted = time.monotonic()
    received = 0
    while block := answer.read1(_BLOCK):
        now, received = time.monotonic(), received + len(block)
        if longest is not None and now - began > longest:
            raise OSError(f"the download takes more than {longest:.0f} s")
        if now - counted >= SECONDS:
            if received < LEAST_RATE * (now - counted):
                rate = received / (now - counted)
                raise OSError(f"the host sends {rate:.3g} bytes per second; {LEAST_RATE:g} are required")
            counted, received = now, 0
        yield block
    if answer.length:
        raise OSError(f"it ended {answer.length} bytes early")


def data_blocks(url: str) -> Iterator[bytes]:
    """Yield the bytes in a data: URL, block by block, because the decoder of base64 keeps all threads waiting.

    Raises:
        ValueError: it has no data, or not base64 although it says so.
    """
    start = url.find(",") + 1
    if not start or start == len(url):
        raise ValueError("it has no data")
    if not url[:start].endswith(";base64,"):
        yield unquote_to_bytes(url[start:])
        return
    for first in range(start, len(url), _BLOCK):
        yield base64.b64decode(url[first : first + _BLOCK], validate=True)


class NotAllowed(Exception):
    """A URL whose host or address the operator has not allowed."""


def _require_allowed(hosts: set[str], url: str) -> None:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or not ("*" in hosts or host in hosts):
        raise NotAllowed(
            f"URLs of {host or url[:40]} are not allowed; upload the file, or start the server with --allow_urls {host}"
        )


def is_public(address: str) -> bool:
    """Return whether an IP address leads to the public internet, and to no IPv4 address inside an IPv6 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not ip.is_global or ip.is_multicast or (ip.version == 6 and ip not in _UNICAST):
        return False
    return not any(ip in block for block in _NOT_PUBLIC if block.version == ip.version)


def _connect(hosts: set[str], host: str, port: int) -> socket.socket:
    """Return a connection to the first address of a host that is allowed and accepts it."""
    named = host.lower() in hosts
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        if named:
            raise
        found = []
    addresses = [str(address) for address in found if named or is_public(str(address))]
    if not addresses:  # one message for both cases, so that it reveals nothing about names of the server's own network
        raise NotAllowed(f"{host} has no public address")
    for number, address in enumerate(addresses, 1):
        try:
            return socket.create_connection((address, port), SECONDS)
        except OSError:
            if number == len(addresses):
                raise
    raise AssertionError("a loop over addresses that neither returns nor raises")


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens http and https URLs of allowed hosts."""

    def __init__(self, hosts: set[str]) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, req: Any) -> Any:
        hosts, secure = self._hosts, req.type == "https"

        class Connection(http.client.HTTPSConnection if secure else http.client.HTTPConnection):  # type: ignore[misc]
            def connect(self) -> None:
                self.sock = _connect(hosts, self.host, self.port)
                if secure:
                    context = ssl.create_default_context()
                    self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

        return self.do_open(Connection, req)

    def https_open(self, req: Any) -> Any:
        return self.http_open(req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to allowed hosts."""

    def __init__(self, hosts: set[str]) -> None:
        self._hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _require_allowed(self._hosts, newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
