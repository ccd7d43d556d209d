"""The contents of http(s) and data: URLs, block by block.

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
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

SECONDS = 60.0
"""Seconds that a host may take to answer, and between two blocks of its answer."""

LEAST_RATE = 10_000.0
"""Bytes per second that a host must send, on average over each `SECONDS`."""

_BLOCK = 1 << 20  # a multiple of four, so that a block of base64 is complete

_UNICAST = ipaddress.ip_network("2000::/3")
"""All public IPv6 addresses, and none with an IPv4 address in its last bits (::ffff:0:0/96, 64:ff9b::/96)."""

_NOT_PUBLIC = [ipaddress.ip_network(block) for block in ("192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")]
"""Blocks that `is_global` of some versions of Python lets pass: gateways to IPv4, and documentation."""


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
    addresses = list[str]()
    try:
        addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        if named:
            raise
    addresses = [address for address in addresses if named or is_public(address)]
    if not addresses:  # one message for both cases, so that it reveals nothing about names of the server's own network
        raise NotAllowed(f"{host} has no public address")
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), SECONDS)
    return socket.create_connection((addresses[-1], port), SECONDS)


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
