"""Monitoring of the server: a log line for each request, and metrics for Prometheus.

`Monitor` is the outermost middleware. It gives each request an id, and a `RequestRecord` that the routes fill in.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from starlette.exceptions import HTTPException

from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.generation import Answer

from .protocol import ApiError

CLIENT_GONE = 499
"""The status, in log and metrics, of a request whose client closes the connection before the answer is complete."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_KEY = "mllm_seqpar.record"


@dataclass(kw_only=True)
class RequestRecord:
    """The facts of one request.

    Attributes:
        status: of the response; of its end, if a stream ends with an error.
        reason: of an error.
        queue, first_token: seconds until the model started on the request, and until the first text.
    """

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    reason: str = ""
    queue: float | None = None
    first_token: float | None = None
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
    """ASGI middleware that writes the log and counts.

    Args:
        app: the application.
        metrics: counts answers.
        log: is called with each line.
    """

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
    """Counts of the requests for an answer.

    Args:
        gauges: further metrics, (description, function that returns the value) by name.
    """

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
        error = ApiError(error.status_code, str(error.detail))
    elif isinstance(error, SeqParError):
        error = ApiError(400, str(error))
    elif not isinstance(error, ApiError):
        record_of(scope).fail(500, f"{type(error).__name__}: {error}")
        error = ApiError(500, "the server failed; its log says why", kind="server_error")
    if not record_of(scope).reason:
        record_of(scope).fail(error.status, str(error))
    return JSONResponse(error.body(), error.status)
