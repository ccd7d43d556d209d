"""Requests that wait for the model: HTTP handlers put them into a queue, and rank 0's main thread answers them."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mllm_seqpar.inference.conversation import LengthError
from mllm_seqpar.inference.engine import Job
from mllm_seqpar.inference.generation import Answer

from .jobs import Impossible, Outcome, Worker
from .protocol import ApiError

SHUTTING_DOWN = ApiError(503, "the server is shutting down", code="shutting_down", kind="server_error")


@dataclass(kw_only=True, eq=False)
class Waiting:
    """A request: its job, and the events that its HTTP handler waits for.

    The events are ("started", None), ("progress", (done, total)), ("text", piece), and last ("reply", Answer) or
    ("error", ApiError).

    Attributes:
        cancelled: set by the handler when the client has disconnected.
        release: called once when the files of the job are no longer needed.
        taken: the time, by `time.perf_counter`, at which the model started on the request.
    """

    job: Job
    loop: asyncio.AbstractEventLoop
    release: Callable[[], object]
    events: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    taken: float | None = None

    def put(self, kind: str, value: Any = None) -> None:
        """Pass an event from the main thread to the handler."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, value))


class RequestQueue:
    """At most `limit` requests wait while one is answered."""

    def __init__(self, limit: int) -> None:
        self._limit, self._waiting, self._lock = limit, 0, threading.Lock()
        self._requests: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self.running = self.stopping = False

    @property
    def waiting(self) -> int:
        return self._waiting

    def enter(self) -> None:
        """Reserve a place for a request that `put` will add, before its media are fetched.

        Raises:
            ApiError: 429 if too many wait, 503 if the server is shutting down.
        """
        with self._lock:
            if self.stopping:
                raise SHUTTING_DOWN
            if self._waiting >= self._limit + (not self.running):
                raise ApiError(
                    429,
                    f"{self._waiting} requests are waiting, which is the limit of this server; try again later",
                    code="rate_limit_exceeded",
                    kind="rate_limit_error",
                )
            self._waiting += 1

    def leave(self) -> None:
        """Release the place of a request that will not be added."""
        with self._lock:
            self._waiting -= 1

    def put(self, request: Waiting) -> None:
        """Add a request that has entered; raise ApiError 503 if the server is shutting down."""
        with self._lock:
            if self.stopping:
                self._waiting -= 1
                raise SHUTTING_DOWN
            self._requests.put(request)

    def stop(self) -> None:
        """Refuse further requests, and end `answer_all`. A signal handler may call this, so it takes no lock."""
        self.stopping = True
        self._requests.put(None)

    def answer_all(self, worker: Worker) -> None:
        """Answer requests one after another until `stop`; rank 0's main thread calls this."""
        while not self.stopping:
            try:
                request = self._requests.get(timeout=worker.channel.heartbeat)
            except queue.Empty:
                worker.channel.require_alive()
                continue
            if request is not None:
                with self._lock:
                    self._waiting, self.running = self._waiting - 1, True
                request.taken = time.perf_counter()
                self._answer(worker, request)
                self.running = False
        with self._lock:  # `put` has added its request before this, or refuses it
            while not self._requests.empty():
                if (request := self._requests.get()) is not None:
                    request.put("error", SHUTTING_DOWN)
                    request.release()

    def _answer(self, worker: Worker, request: Waiting) -> None:
        try:
            if not request.cancelled.is_set():
                request.put(*self._run(worker, request))
        except BaseException:
            request.put("error", ApiError(500, "the server failed and ends; its log says why", kind="server_error"))
            raise
        finally:
            request.release()

    def _run(self, worker: Worker, request: Waiting) -> tuple[str, Answer | ApiError]:
        try:
            reply = worker.run(
                request.job,
                on_start=lambda: request.put("started"),
                progress=lambda done, total: request.put("progress", (done, total)),
                on_text=lambda piece: request.put("text", piece),
                interrupted=lambda: self.stopping or request.cancelled.is_set(),
            )
        except Impossible as error:
            if self.stopping:
                return "error", SHUTTING_DOWN
            failed = error.outcome >= Outcome.FAILED
            if failed:
                sys.stderr.write("".join(traceback.format_exception(error.cause)))
            if failed and error.outcome is not Outcome.OUT_OF_MEMORY:
                return "error", ApiError(500, "the server failed to answer; its log says why", kind="server_error")
            status, kind = (500, "server_error") if failed else (400, "invalid_request_error")
            text = str(error)
            for file in request.job.media:  # clients must not learn where files are
                text = text.replace(file.path, file.name)
            code = "context_length_exceeded" if isinstance(error.cause, LengthError) else None
            return "error", ApiError(status, text, code=code, kind=kind, param="messages")
        if reply.finish_reason == "interrupted":
            return "error", SHUTTING_DOWN
        return "reply", reply
