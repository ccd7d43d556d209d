"""Layer: one process. The queue between the HTTP handlers and the main thread."""

import asyncio
import queue
import threading
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="pydantic is not installed (extra serve)")

from mllm_seqpar.serving.request_queue import SHUTTING_DOWN, RequestQueue, Waiting


class HeldQueue(queue.SimpleQueue[Any]):
    """A queue that adds a request only after a while, or once `go` is set."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def put(self, item: Any, *args: Any) -> None:
        if item is not None:
            self.began.set()
            self.go.wait(0.5)
        super().put(item, *args)


def test_request_that_is_added_while_the_server_stops_is_answered() -> None:
    requests, held, released = RequestQueue(1), HeldQueue(), []
    requests._requests = held
    loop = asyncio.new_event_loop()
    request = Waiting(job=None, loop=loop, release=lambda: released.append(1))  # type: ignore[arg-type]
    requests.enter()
    adding = threading.Thread(target=requests.put, args=(request,))
    adding.start()
    assert held.began.wait(30)
    requests.stop()
    requests.answer_all(None)  # type: ignore[arg-type]  # it has stopped, so it needs no worker
    held.go.set()
    adding.join()
    try:
        assert loop.run_until_complete(asyncio.wait_for(request.events.get(), 5)) == ("error", SHUTTING_DOWN)
        assert released == [1]
    finally:
        loop.close()
