"""Checks of a request before a route reads it: host, origin, API key and size.

A page of another site must not use a server that only its machine can reach. Browsers state the page's site in Origin.
The site's name may lead to this machine (DNS rebinding), and Origin and Host are then equal. A request that arrives at
a loopback address is therefore accepted only under a name of this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Set
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from .monitor import error_response
from .protocol import ApiError

LARGE = ("/v1/chat/completions", "/v1/files")
"""The paths whose bodies may contain media."""

SMALL = 100_000
"""The largest number of bytes of another body."""


class Guard:
    """ASGI middleware that refuses requests which must not reach a route, and limits their bodies.

    Args:
        app: the application.
        api_key: required by all requests except GET of the public paths, if it is not None.
        public: paths of the page and of the state of the server.
        max_bytes: of a body with media.
    """

    def __init__(self, app: Any, *, api_key: str | None, public: Set[str], max_bytes: int) -> None:
        self._app, self._key, self._public, self._max_bytes = app, api_key, public, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, large = Headers(scope=scope), scope["path"] in LARGE
        limit = self._max_bytes if large else min(SMALL, self._max_bytes)
        limited = _Limited(receive, limit, " (--max_upload_mb)" if large else "")
        try:
            self._check(scope, headers)
            limited.require(int(headers.get("content-length", "0")))
        except ApiError as error:
            await limited.drain()
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _check(self, scope: Any, headers: Headers) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        address = (scope.get("server") or ("", 0))[0]
        if host is not None and _is_loopback(address) and not _is_loopback(_hostname(host)):
            raise ApiError(
                403,
                f"requests for the host {host[:80]} are refused; this server is 127.0.0.1 or localhost",
                code="host",
            )
        if origin is not None and _netloc(origin) != host:
            raise ApiError(403, f"requests from pages of {origin[:80]} are refused", code="origin")
        if self._key is not None and not (scope["method"] == "GET" and scope["path"] in self._public):
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


def _netloc(origin: str) -> str:
    """Return the host of an Origin header as a Host header states it; empty if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _hostname(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


class _Limited:
    """Receives the messages of a request with at most `limit` bytes, which the user sets by `option`."""

    def __init__(self, receive: Any, limit: int, option: str) -> None:
        self._receive, self._limit, self._option, self._received = receive, limit, option, 0

    def require(self, size: int) -> None:
        """Raise ApiError 413 if a body of this size is too large."""
        if size > self._limit:
            text = f"the request has more than the allowed {self._limit} bytes{self._option}"
            raise ApiError(413, text, code="too_large")

    async def __call__(self) -> Any:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            await self.drain()
        self.require(self._received)
        return message

    async def drain(self) -> None:
        """Read the rest of a refused body, up to twice the limit: a client may read the response only then."""
        while self._received <= 2 * self._limit:
            message = await self._receive()
            self._received += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return
