"""The HTTP interface: routes, API key, limits, errors, and streams. It runs in a thread of rank 0.

Bad requests are answered before they wait for the model. A stream begins when the messages and media of a request have
been accepted by all ranks; comments (": ...") then report the progress of the encoding, and data follows.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException

from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.generation import Sampling

from .engine import Job
from .media import MediaStore
from .protocol import ApiError, ChatRequest, Completion, event, read_request
from .request_queue import RequestQueue, Waiting

PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; media-src 'self' blob:; img-src 'self' blob: data:; frame-ancestors 'none'"


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes use.

    Attributes:
        model: the name of the model in requests and responses.
        api_key: required by the routes below /v1 if it is not None.
        max_bytes: of the body of a request.
        sampling: the defaults of an answer.
        frames: the sampling of a video for which a request states none.
    """

    model: str
    store: MediaStore
    queue: RequestQueue
    ranks: int
    api_key: str | None
    max_bytes: int
    sampling: Sampling
    frames: dict[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))


def make_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, service=service)
    app.add_exception_handler(ApiError, _as_response)
    app.add_exception_handler(HTTPException, _as_response)
    app.add_exception_handler(SeqParError, _as_response)
    app.add_exception_handler(ClientGone, _as_response)  # the client has closed the connection
    app.add_exception_handler(Exception, _as_response)
    _add_files(app, service.store)
    _add_page(app)
    described = {"id": service.model, "object": "model", "created": service.created, "owned_by": "mllm-seqpar"}

    @app.get("/health")
    async def health() -> Response:
        queue = service.queue
        status = {"status": "shutting down" if queue.stopping else "ok", "ranks": service.ranks}
        status |= {"running": int(queue.running), "waiting": queue.waiting}
        return JSONResponse(status, 503 if queue.stopping else 200)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _require_model(service, name)
        return JSONResponse(described)

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        return await _complete(service, request)

    return app


async def _complete(service: Service, request: Request) -> Response:
    asked = read_request(await _json(request), service.sampling)
    _require_model(service, asked.model or service.model)
    waiting = await run_in_threadpool(_waiting, service, asked, asyncio.get_running_loop())
    try:
        service.queue.put(waiting)
    except ApiError:
        waiting.release()
        raise
    completion = Completion(service.model, asked.include_usage)
    events = _Events(request, waiting)
    try:
        kind, value = await anext(events)
        if asked.stream and kind != "error":
            stream = _stream(events, completion, kind, value)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        while kind not in ("reply", "error"):
            kind, value = await anext(events)
    except BaseException:  # also a task that is cancelled because its client has gone
        events.close()
        raise
    events.close()
    if kind == "error":
        raise value
    return JSONResponse(completion.whole(value))


def _waiting(service: Service, asked: ChatRequest, loop: asyncio.AbstractEventLoop) -> Waiting:
    """Return the request with the files of its media, which may have to be downloaded."""
    stack = ExitStack()
    files = stack.enter_context(service.store.files(asked.media, service.frames))
    kinds = iter(files)
    messages = [
        {
            "role": message["role"],
            "content": [{"type": next(kinds).kind} if part["type"] == "media" else part for part in message["content"]],
        }
        for message in asked.messages
    ]
    job = Job(messages=messages, media=files, sampling=asked.sampling, stop=asked.stop, evidence=asked.evidence)
    return Waiting(job=job, loop=loop, release=stack.close)


class _Events:
    """The events of a request, without the ones for streams only; raises ClientGone when its client disconnects."""

    def __init__(self, request: Request, waiting: Waiting) -> None:
        self._waiting, self._gone = waiting, asyncio.ensure_future(_disconnect(request))

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        event = asyncio.ensure_future(self._waiting.events.get())
        await asyncio.wait({event, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if event.done():
            return event.result()
        event.cancel()
        raise ClientGone

    def close(self) -> None:
        self._waiting.cancelled.set()
        self._gone.cancel()


class ClientGone(Exception):
    """The client has closed its connection."""


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(events: _Events, completion: Completion, kind: str, value: Any) -> AsyncIterator[str]:
    """Yield the chunks of an answer; whatever ends the stream also ends the generation."""
    try:
        began = False
        while True:
            if kind == "progress":
                yield ": frames encoded: {} of {}\n\n".format(*value)
            elif not began and kind != "error":
                began = True
                yield completion.first()
            if kind == "text":
                yield completion.piece(value)
            elif kind == "reply":
                yield completion.last(value)
                return
            elif kind == "error":
                yield event(value.body())
                return
            kind, value = await anext(events)
    except ClientGone:
        return
    finally:
        events.close()


def _add_files(app: FastAPI, store: MediaStore) -> None:
    """Add OpenAI's routes for files."""

    @app.post("/v1/files")
    async def create(request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError(400, "expected multipart/form-data with a file and its purpose", param="file")
        async with request.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str):
                raise ApiError(400, "expected a file and its purpose, such as user_data", param="file")
            upload = await run_in_threadpool(store.add, file.file, file.filename or "upload", purpose)
        return JSONResponse(upload.describe())

    @app.get("/v1/files")
    async def files() -> Response:
        data = [upload.describe() for upload in store.uploads()]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    @app.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return JSONResponse(store.upload(file_id).describe())

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        store.delete(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _add_page(app: FastAPI) -> None:
    """Add the page to talk to the model."""

    def serve(path: str, name: str) -> None:
        @app.get(path)
        async def page() -> Response:
            return FileResponse(PAGE / name, headers={"Content-Security-Policy": POLICY})

    serve("/", "index.html")
    serve("/page.js", "page.js")
    serve("/page.css", "page.css")


class Guard:
    """ASGI middleware that checks the API key and the origin, and limits the body of a request.

    A page of another site must not use a server that only this machine can reach, so a request whose Origin is not the
    server itself is refused.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limited = _Limited(receive, self._service.max_bytes)
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await limited.drain()
            await _as_response(None, error)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _check(self, path: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise ApiError(403, f"requests from pages of {origin[:80]} are refused", code="origin")
        key = self._service.api_key
        if key is not None and path.startswith("/v1"):
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        if int(headers.get("content-length", "0")) > self._service.max_bytes:
            raise _too_large(self._service.max_bytes)


class _Limited:
    """Receives the messages of a request with at most `limit` bytes."""

    def __init__(self, receive: Any, limit: int) -> None:
        self._receive, self._limit, self._received = receive, limit, 0

    async def __call__(self) -> Any:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            await self.drain()
            raise _too_large(self._limit)
        return message

    async def drain(self) -> None:
        """Read the rest of a refused body, up to twice the limit: a client may read the response only then."""
        while self._received <= 2 * self._limit:
            message = await self._receive()
            self._received += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request has more than the allowed {limit} bytes (--max_upload_mb)", code="too_large")


def _as_response(request: Any, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    elif isinstance(error, SeqParError):
        error = ApiError(400, str(error))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log says why", kind="server_error")
    return JSONResponse(error.body(), error.status)


async def _json(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(400, "expected the content type application/json")
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error


def _require_model(service: Service, name: str) -> None:
    if name != service.model:
        message = f"The model {name[:80]!r} does not exist; this server has {service.model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
