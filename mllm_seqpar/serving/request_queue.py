"""Requests that wait for the model: HTTP handlers put them into a queue, and rank 0's main thread answers them."""

from __future__ import annotations

import asyncio
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect

from mllm_seqpar.errors import NonFiniteLogitsError
from mllm_seqpar.inference.conversation import LengthError
from mllm_seqpar.inference.generation import Answer
from mllm_seqpar.inference.job import Job, JobError, Outcome

from .jobs import Worker
from .middleware import CLIENT_GONE, RequestRecord
from .protocol import ApiError

LONGEST_RETRY = 60.0
"""The most seconds that a refused client is asked to wait; OpenAI's client waits for no longer."""

SHUTTING_DOWN = ApiError(503, "the server is shutting down", code="shutting_down", kind="server_error")


class PendingRequest:
    """A request that waits for its answer, in the running event loop. Its events are noted in its record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.cancelled = threading.Event()  # set at the end of `events`, after which the answer is not needed
        self.job: Job | None = None  # None before it is known, and after the end of `events`
        self.turn: Future[Answer] = Future()  # cancelled at the end of `events`, unless the model has begun to answer
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, kind: str, value: Any = None) -> None:
        """Add an event, from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (kind, value))

    async def events(
        self, receive: Callable[[], Awaitable[Any]], answer: Awaitable[Answer]
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield ("started", None), ("progress", (done, total)), ("text", piece), and last ("reply", the answer).

        The messages of the ASGI connection come from `receive`; `answer` has passed this object to the queue.

        Raises:
            ClientDisconnect: the client does.
            Exception: of `answer`.
        """

        async def disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        self._tasks = gone, _ = asyncio.create_task(disconnect()), asyncio.create_task(self._run(answer))
        record, ended = self.record, False
        try:
            while not ended:
                event = asyncio.ensure_future(self._events.get())
                await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    raise ClientDisconnect
                kind, value = event.result()
                ended = kind in ("reply", "error")
                if kind == "error":
                    if isinstance(value, ApiError):
                        record.fail(value.status, str(value))
                    raise value
                if kind == "reply":
                    record.reply = value
                elif kind == "text" and record.first_token is None:
                    record.first_token = record.seconds
                yield kind, value
        finally:
            if not ended:
                record.fail(CLIENT_GONE.status, str(CLIENT_GONE))
            self.cancelled.set()
            self.turn.cancel()  # what the request keeps is freed now, not when its turn would have come
            self.job = None
            gone.cancel()

    async def _run(self, answer: Awaitable[Answer]) -> None:
        try:
            self.put("reply", await answer)
        except Exception as error:  # noqa: BLE001 - raised by `events`
            self.put("error", error)


class RequestQueue:
    """At most `limit` requests wait while one is answered. The place of a request ends with its connection.

    `answer_all` runs in the main thread, `place` and `answer` in the event loop of the HTTP interface.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._places = limit, set[PendingRequest]()
        self._turns: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()
        self._current: PendingRequest | None = None
        self._seconds, self._promised = 1.0, 0.0  # of an answer, on average; the last time that a 429 has named
        self.stopping = self._ended = False

    @property
    def running(self) -> bool:
        """Whether the model answers a request now, also one whose client has just left."""
        return self._current is not None

    @property
    def waiting(self) -> int:
        current = self._current
        return sum(request is not current and not request.turn.done() for request in self._places)

    @contextmanager
    def place(self, request: PendingRequest) -> Iterator[None]:
        """Count a request as waiting or running, from before its media are fetched until its end or its client's.

        Raises:
            ApiError: 429 if too many wait, 503 if the server is shutting down.
        """
        if self.stopping:
            raise SHUTTING_DOWN
        if (waiting := self.waiting) + self.running > self._limit:
            # A refused client may try again one answer later than the one before it; otherwise all but one would be
            # refused once more.
            now = time.monotonic()
            self._promised = min(max(now, self._promised) + self._seconds, now + LONGEST_RETRY)
            seconds = max(1, math.ceil(self._promised - now))
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and {self._limit} may wait (--max_queue) while one is answered; try "
                f"again in {seconds} s",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                headers={"Retry-After": str(seconds)},
            )
        self._places.add(request)
        try:
            yield
        finally:
            self._places.discard(request)

    async def answer(self, job: Job, request: PendingRequest) -> Answer:
        """Return the answer to a job after those before it; raise ApiError if there is none."""
        request.job = job
        self._turns.put(request)
        if self._ended:  # only now, because `answer_all` may have ended between a check and the addition
            self._refuse_rest()
        return await asyncio.wrap_future(request.turn)

    def stop(self) -> None:
        """Refuse further requests, and end `answer_all`. A signal handler may call this, so it takes no lock."""
        self.stopping = True
        self._turns.put(None)

    def answer_all(self, worker: Worker) -> None:
        """Answer requests one after another until `stop`; rank 0's main thread calls this."""
        while not self.stopping:
            try:
                request = self._turns.get(timeout=worker.channel.heartbeat)
            except queue.Empty:
                worker.channel.require_alive()
                continue
            if request is not None and (job := request.job) is not None:
                self._current, began = request, time.monotonic()
                self._take_turn(worker, job, request)
                self._current = None
                self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
        self._ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        while not self._turns.empty():
            if (request := self._turns.get()) is not None and request.turn.set_running_or_notify_cancel():
                request.turn.set_exception(SHUTTING_DOWN)

    def _take_turn(self, worker: Worker, job: Job, request: PendingRequest) -> None:
        turn = request.turn
        if not turn.set_running_or_notify_cancel():
            return
        request.record.queue = request.record.seconds
        try:
            reply = worker.run(
                job,
                on_start=lambda: request.put("started"),
                progress=lambda done, total: request.put("progress", (done, total)),
                on_text=lambda piece: request.put("text", piece),
                interrupted=lambda: self.stopping or request.cancelled.is_set(),
            )
        except JobError as error:
            turn.set_exception(SHUTTING_DOWN if self.stopping else _as_api_error(error, job))
        except BaseException:
            turn.set_exception(ApiError(500, "the server failed and ends; its log says why", kind="server_error"))
            raise
        else:
            if reply.finish_reason == "interrupted":
                turn.set_exception(SHUTTING_DOWN)
            else:
                turn.set_result(reply)


def _as_api_error(error: JobError, job: Job) -> ApiError:
    failed = error.outcome >= Outcome.FAILED
    if failed:
        sys.stderr.write("".join(traceback.format_exception(error.cause)))
    if failed and error.outcome is not Outcome.OUT_OF_MEMORY:
        return ApiError(500, "the server failed to answer; its log says why", kind="server_error")
    if isinstance(error.cause, NonFiniteLogitsError):  # the fault of the model, not of the request
        return ApiError(500, str(error), code="non_finite_logits", kind="server_error")
    status, kind = (500, "server_error") if failed else (400, "invalid_request_error")
    text = str(error)
    for clip in job.media:  # clients must not learn where files are
        text = text.replace(clip.source, clip.name)
    code = "context_length_exceeded" if isinstance(error.cause, LengthError) else None
    return ApiError(status, text, code=code, kind=kind, param="messages")
