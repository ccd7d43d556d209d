"""http(s) URLs of hosts that the operator allows.

The host "*" stands for every public address; the address is checked after the connection is made, so that a name cannot
resolve to another address between check and use. Redirects are checked like the first URL. No proxy is used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request
from typing import Any
from urllib.parse import urlsplit

SECONDS = 30.0
"""Seconds that a host may take to answer, and between two blocks of its answer."""


def open_url(url: str, hosts: set[str]) -> Any:
    """Open a URL; `hosts` are the allowed ones, in lower case.

    Raises:
        NotAllowed: the host, or that of a redirect, is not allowed. OSError: the URL cannot be read.
    """
    _require_allowed(hosts, url)
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(hosts),
        _Connections(hosts),
    ):
        opener.add_handler(handler)
    return opener.open(urllib.request.Request(url, headers={"User-Agent": "mllm-seqpar"}), timeout=SECONDS)


class NotAllowed(Exception):
    """A URL whose host or address the operator has not allowed."""


def _require_allowed(hosts: set[str], url: str) -> None:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or not ("*" in hosts or host in hosts):
        raise NotAllowed(
            f"URLs of {host or url[:40]} are not allowed; upload the file, or start the server with --allow_urls {host}"
        )


def _connect(hosts: set[str], connection: Any) -> socket.socket:
    """Connect, and close the connection again if it leads to an address that is not allowed."""
    opened = socket.create_connection((connection.host, connection.port), SECONDS)
    address = ipaddress.ip_address(opened.getpeername()[0].partition("%")[0])
    if connection.host.lower() not in hosts and not address.is_global:
        opened.close()
        raise NotAllowed(f"{connection.host} has the address {address}, which is not public")
    return opened


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens http and https URLs of allowed hosts."""

    def __init__(self, hosts: set[str]) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, req: Any) -> Any:
        hosts, secure = self._hosts, req.type == "https"

        class Connection(http.client.HTTPSConnection if secure else http.client.HTTPConnection):  # type: ignore[misc]
            def connect(self) -> None:
                self.sock = _connect(hosts, self)
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
