"""The HTTP interface: routes, API key, limits, errors, and streams. It runs in a thread of rank 0.

Bad requests are answered before they wait for the model. A stream begins when the messages and media of a request have
been accepted by all ranks; comments (": ...") then report the progress of the encoding, and data follows.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from mllm_seqpar.errors import SeqParError
from mllm_seqpar.inference.generation import Answer, Sampling
from mllm_seqpar.inference.job import Job
from mllm_seqpar.videos.frame_choice import FrameChoice

from .media import Expiry, MediaStore, Previews
from .middleware import CONTENT_TYPE, Guard, Metrics, Monitor, error_response, record_of
from .protocol import ApiError, ChatRequest, Completion, parse, read_request, server_sent
from .request_queue import PendingRequest, RequestQueue

PAGE = Path(__file__).parent / "page"
FORM = 1024
"""The largest number of bytes of an upload that belong to the form around the file."""

MEDIA_THREADS = 16

_LONGEST_VIDEO = 1e8
"""Seconds; later times are those of the last frame."""

POLICY = "default-src 'self'; media-src 'self' blob:; img-src 'self' blob: data:; frame-ancestors 'none'"


@dataclass(frozen=True, kw_only=True)
class Service:
    """The model, its queue and the limits that the routes of one server share."""

    model: str  # its name in requests and responses
    store: MediaStore
    queue: RequestQueue
    ranks: int
    api_key: str | None  # required by all but the page, /health and /metrics, if it is not None
    max_bytes: int  # of the body of a request with media
    sampling: Sampling  # the defaults of an answer
    frames: FrameChoice  # of a video, as far as a request states nothing else
    origins: frozenset[str] = frozenset()  # of pages elsewhere that may use the server; "*" stands for all
    log: Callable[[str], object] = lambda line: None  # is called with a line for each request
    created: int = field(default_factory=lambda: int(time.time()))
    # Limits the threads that fetch media, so that slow hosts leave threads for other requests.
    fetching: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MEDIA_THREADS))


def make_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    queue, store = service.queue, service.store
    metrics = Metrics(
        {
            "requests_running": ("Requests that the model answers now.", lambda: queue.running),
            "requests_waiting": ("Requests that wait for the model.", lambda: queue.waiting),
            "stored_bytes": ("Bytes of uploads, and of the media of requests.", lambda: store.stored),
            "ranks": ("Ranks of the model.", lambda: service.ranks),
        }
    )
    public = {"/health", "/metrics", *_page_files()}
    rules = {"api_key": service.api_key, "public": public, "max_bytes": service.max_bytes, "origins": service.origins}
    app.add_middleware(Guard, **rules)
    if service.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[*service.origins],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After", "Warning"],
        )
    app.add_middleware(Monitor, metrics=metrics, log=service.log)  # the last one is the outermost
    for kind in (ApiError, HTTPException, SeqParError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, lambda request, error: error_response(request.scope, error))
    _add_state(app, service, metrics)
    _add_files(app, store)
    _add_previews(app, Previews(store))
    for path, file in _page_files().items():
        app.add_api_route(path, _page(file))
    described = {"id": service.model, "object": "model", "created": service.created, "owned_by": "mllm-seqpar"}

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


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Add the routes that report the state of the server."""
    queue = service.queue

    @app.get("/health")
    async def health() -> Response:
        status = {"status": "shutting down" if queue.stopping else "ok", "ranks": service.ranks}
        status |= {"running": int(queue.running), "waiting": queue.waiting}
        return JSONResponse(status, 503 if queue.stopping else 200)

    @app.get("/metrics")
    async def text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.post("/load_model")
    async def load_model(request: Request) -> Response:
        """Return the state of a model, as `transformers chat` asks for it before a conversation."""
        asked = await _json(request)
        name = asked.get("model") if isinstance(asked, dict) else None
        state: dict[str, Any] = {"status": "ready", "cached": True}
        if name != service.model:
            state = {"status": "error", "message": _unknown(service, name)}
        return Response(server_sent({"model": name, **state}), media_type="text/event-stream")


async def _complete(service: Service, request: Request) -> Response:
    record = record_of(request.scope)
    asked = await run_in_threadpool(read_request, await _json(request))
    _require_model(service, asked.model or service.model)
    completion = Completion(service.model, record.id, asked.include_usage)
    sampling = asked.sampling(service.sampling)
    pending = PendingRequest(record)
    events = pending.events(request.receive, _answer(service, asked, sampling, pending))
    headers = {"Cache-Control": "no-cache"}
    if asked.ignored:
        headers["Warning"] = f'299 mllm-seqpar "fields without effect: {", ".join(asked.ignored)}"'
    if asked.stream:
        stream = _stream(await anext(events), events, completion)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
    async with aclosing(events):
        reply = [value async for _, value in events][-1]
    return JSONResponse(completion.whole(reply), headers=headers)


async def _answer(service: Service, asked: ChatRequest, sampling: Sampling, pending: PendingRequest) -> Answer:
    """Return the answer to a request, whose media may have to be downloaded first."""
    with service.queue.place(pending), ExitStack() as stack:
        frames = asked.frames().over(service.frames)
        media = service.store.files(asked.media(), frames, abandoned=pending.cancelled.is_set)
        files = await to_thread.run_sync(stack.enter_context, media, limiter=service.fetching)
        messages = asked.conversation(file.kind for file in files)
        job = Job(messages=messages, media=files, sampling=sampling, stop=tuple(asked.stop), evidence=asked.evidence)
        return await service.queue.answer(job, pending)


async def _stream(
    event: tuple[str, Any], events: AsyncGenerator[tuple[str, Any], None], completion: Completion
) -> AsyncIterator[str]:
    """Yield the chunks of an answer with its first event and the others; its generation ends with the stream."""
    began = False
    async with aclosing(events):
        try:
            while True:
                kind, value = event
                if kind == "progress":
                    yield ": frames encoded: {} of {}\n\n".format(*value)
                elif not began:
                    began = True
                    yield completion.first()
                if kind == "text":
                    yield completion.piece(value)
                elif kind == "reply":
                    yield completion.last(value)
                    return
                event = await anext(events)
        except ClientDisconnect:
            return
        except ApiError as error:
            yield server_sent(error.body())


def _add_files(app: FastAPI, store: MediaStore) -> None:
    """Add OpenAI's routes for files."""

    @app.post("/v1/files")
    async def create(request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError(400, "expected multipart/form-data with a file and its purpose", param="file")
        length = int(request.headers.get("content-length", "0"))
        with store.room(max(0, length - FORM)):  # reserved before the file is received
            form = await request.form(max_files=1, max_fields=8)
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not isinstance(purpose, str):
                raise ApiError(400, "expected a file and its purpose, such as user_data", param="file")
            name, expiry = file.filename or "upload", Expiry.of(form)
            upload = await run_in_threadpool(store.add, file.file, name, purpose, expiry)
        finally:
            await form.close()
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


def _add_previews(app: FastAPI, previews: Previews) -> None:
    """Add the routes by which the page shows a file."""

    @app.get("/v1/files/{file_id}/preview")
    async def preview(file_id: str) -> Response:
        return JSONResponse(await run_in_threadpool(previews.describe, file_id))

    @app.get("/v1/files/{file_id}/frame")
    async def frame(request: Request, file_id: str) -> Response:
        given = request.query_params.get("seconds", "0")
        try:
            seconds = min(max(0.0, float(given)), _LONGEST_VIDEO)
        except ValueError as error:
            raise ApiError(400, f"seconds: {given[:80]!r} is not a number", param="seconds") from error
        jpeg = await run_in_threadpool(previews.frame, file_id, seconds)
        return Response(jpeg, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def _page(file: Path) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:  # FastAPI would run a plain function in a thread
        return FileResponse(file, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    return page


def _page_files() -> dict[str, Path]:
    """Return the files of the page by their paths in URLs."""
    return {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(PAGE.iterdir())}


async def _json(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(400, "expected the content type application/json")
    return await run_in_threadpool(parse, await request.body())


def _require_model(service: Service, name: str) -> None:
    if name != service.model:
        raise ApiError(404, _unknown(service, name), code="model_not_found", param="model")


def _unknown(service: Service, name: Any) -> str:
    return f"The model {str(name)[:80]!r} does not exist; this server has {service.model!r}"
