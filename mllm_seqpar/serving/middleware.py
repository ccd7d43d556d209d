"""What every request passes before its route: a record with a log line and metrics, and checks.

`Monitor` is the outermost middleware. It gives each request an id, and a `RequestRecord` that the routes fill in.

`Guard` checks host, origin, API key and size. A page of another site must not use a server that only its machine can
reach. Browsers state the page's site in Origin. The site's name may lead to this machine (DNS rebinding), and Origin
and Host are then equal. A request that arrives at a loopback address is therefore accepted only under a name of this
machine.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.generation import Answer

from .protocol import ApiError

CLIENT_GONE = ApiError(499, "the client has closed the connection")
"""The error, in log and metrics, of a request whose client does so before it has the whole response."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_KEY = "mllm_seqpar.record"

LARGE = ("/v1/chat/completions", "/v1/files")
"""The paths whose bodies may contain media."""

SMALL = 100_000
"""The largest number of bytes of another body."""

PATIENCE = 60.0
"""Seconds without any bytes of a body that has not ended, after which the request has failed."""


@dataclass(kw_only=True)
class RequestRecord:
    """The facts of one request."""

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0  # of the response; of its end, if a stream ends with an error
    reason: str = ""  # of an error
    queue: float | None = None  # seconds until the model started on the request
    first_token: float | None = None  # seconds until the first text
    reply: Answer | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.began

    def fail(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason

    def line(self) -> str:
        """Return the line of the log."""
        values: dict[str, Any] = {"status": self.status, "seconds": self.seconds}
        values |= {"queue": self.queue, "first_token": self.first_token}
        if self.reply is not None:
            values |= {"prompt_tokens": self.reply.prompt_tokens, "cached_tokens": self.reply.cached_tokens}
            values |= {"completion_tokens": len(self.reply.tokens), "finish": self.reply.finish_reason}
        if self.reason:
            values["error"] = json.dumps(self.reason[:500])  # in one line, whatever a client sent
        shown = (f"{name}={f'{x:.3f}' if isinstance(x, float) else x}" for name, x in values.items() if x is not None)
        path = self.path if self.path.isprintable() and " " not in self.path else json.dumps(self.path)
        return " ".join([time.strftime("%Y-%m-%dT%H:%M:%S%z"), self.id, self.method, path[:200], *shown])


def record_of(scope: Any) -> RequestRecord:
    """Return the record of a request, by its ASGI scope."""
    return scope[_KEY]


class Monitor:
    """ASGI middleware that counts, and calls `log` with a line for each request."""

    def __init__(self, app: Any, *, metrics: Metrics, log: Callable[[str], object]) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = RequestRecord(id=secrets.token_hex(12), method=scope["method"], path=scope["path"])

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            record.fail(500, f"{type(error).__name__}: {error}")
            raise
        finally:
            if record.method != "GET" or record.status >= 400:
                self._log(record.line())
            if record.path == "/v1/chat/completions":
                self._metrics.add(record)


class Metrics:
    """Counts of the requests for an answer, and `gauges`: (description, function that returns the value) by name."""

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        disable_created_metrics()  # of the whole process, which is the server's
        self._registry = CollectorRegistry()
        place: dict[str, Any] = {"namespace": "mllm_seqpar", "registry": self._registry}
        self._requests = Counter("requests", "Requests for an answer that have ended, by status.", ["status"], **place)
        self._tokens = {
            name: Counter(f"{name}_tokens", text, **place)
            for name, text in {
                "prompt": "Tokens of prompts.",
                "cached_prompt": "Tokens of prompts that were in the KV cache.",
                "completion": "Generated tokens.",
            }.items()
        }
        self._seconds = {
            name: Histogram(f"{name}_seconds", text, buckets=_BUCKETS, **place)
            for name, text in {
                "request": "Seconds from the request to the end of its answer.",
                "queue": "Seconds from the request until the model started to answer it.",
                "first_token": "Seconds from the request to the first text of its answer.",
            }.items()
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, **place).set_function(value)

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.status).inc()
        if record.reply is not None:
            self._tokens["prompt"].inc(record.reply.prompt_tokens)
            self._tokens["cached_prompt"].inc(record.reply.cached_tokens)
            self._tokens["completion"].inc(len(record.reply.tokens))
            self._seconds["request"].observe(record.seconds)
        for name in ("queue", "first_token"):
            if (value := getattr(record, name)) is not None:
                self._seconds[name].observe(value)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


def error_response(scope: Any, error: Exception) -> JSONResponse:
    """Return the response to an error, in OpenAI's format, and record it."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif isinstance(error, ClientDisconnect):
        error = CLIENT_GONE
    elif isinstance(error, SeqParError):
        error = ApiError(400, str(error))
    elif not isinstance(error, ApiError):
        record_of(scope).fail(500, f"{type(error).__name__}: {error}")
        error = ApiError(500, "the server failed; its log says why", kind="server_error")
    if not record_of(scope).reason:
        record_of(scope).fail(error.status, str(error))
    return JSONResponse(error.body(), error.status, error.headers)


class Guard:
    """ASGI middleware that refuses requests which must not reach a route, and limits their bodies (`Service`).

    A GET of the `public` paths, of the page and the state of the server, needs no key.
    """

    def __init__(
        self, app: Any, *, api_key: str | None, public: Set[str], max_bytes: int, origins: Set[str] = frozenset()
    ) -> None:
        self._app, self._key, self._public, self._max_bytes, self._origins = app, api_key, public, max_bytes, origins

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
        if host is not None and _is_loopback(address) and not _is_loopback(_parts(f"//{host}").hostname or ""):
            raise ApiError(
                403,
                f"requests for the host {host[:80]} are refused; this server is 127.0.0.1 or localhost",
                code="host",
            )
        if origin is not None and _parts(origin).netloc != host and not self._origins & {origin, "*"}:
            text = f"requests from pages of {origin[:80]} are refused; the server's --allowed_origins allows origins"
            raise ApiError(403, text, code="origin")
        if self._key is not None and not (scope["method"] == "GET" and scope["path"] in self._public):
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


def _parts(url: str) -> SplitResult:
    """Return the parts of a URL; empty ones if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


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
        self._complete = False

    def require(self, size: int) -> None:
        """Raise ApiError 413 if a body of this size is too large."""
        if size > self._limit:
            text = f"the request has more than the allowed {self._limit} bytes{self._option}"
            raise ApiError(413, text, code="too_large")

    async def __call__(self) -> Any:
        message = await self._next()
        if self._received > self._limit:
            await self.drain()
        self.require(self._received)
        return message

    async def _next(self) -> Any:
        """Return the next message; raise ApiError 408 if the body stops arriving."""
        try:
            message = await asyncio.wait_for(self._receive(), None if self._complete else PATIENCE)
        except TimeoutError as error:
            self._complete = True
            text = f"no bytes of the request have arrived for {PATIENCE:g} s; send it again"
            raise ApiError(408, text, code="timeout", headers={"Connection": "close"}) from error
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body")
        return message

    async def drain(self) -> None:
        """Read the rest of a refused body, up to twice the limit: a client may read the response only then."""
        with suppress(ApiError):  # the client is told of its first fault
            while self._received <= 2 * self._limit and not self._complete:
                await self._next()
