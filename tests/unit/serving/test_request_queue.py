"""Layer: one process. The queue between the HTTP handlers and the main thread."""

import asyncio
import queue
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")

from mllm_seqpar.serving.middleware import RequestRecord
from mllm_seqpar.serving.protocol import ApiError
from mllm_seqpar.serving.request_queue import LONGEST_RETRY, PendingRequest, RequestQueue


class HeldQueue(queue.SimpleQueue[Any]):
    """A queue that adds a request only once `go` is set."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def put(self, item: Any, *args: Any) -> None:
        if item is not None:
            self.began.set()
            assert self.go.wait(30)
        super().put(item, *args)


@pytest.mark.parametrize("added", ["before the end", "after the end"])
def test_request_that_is_added_while_the_server_stops_is_answered(added: str) -> None:
    requests, held = RequestQueue(1), HeldQueue()
    requests._turns = held

    async def answer(pending: PendingRequest) -> Any:
        with requests.place(pending):
            return await requests.answer(None, pending)  # type: ignore[arg-type]

    async def ask() -> None:
        pending = PendingRequest(RequestRecord(id="1", method="POST", path="/"))
        await asyncio.wait_for(anext(pending.events(asyncio.Event().wait, answer(pending))), 30)

    def end() -> None:
        assert held.began.wait(30)
        if added == "before the end":
            held.go.set()
            while requests._turns.empty():
                time.sleep(0.01)
        requests.stop()
        requests.answer_all(None)  # type: ignore[arg-type]  # it has stopped, so it needs no worker
        held.go.set()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(ApiError) as error:
        asyncio.run(ask())
    ending.join()
    assert error.value.status == 503
    assert requests.waiting == 0
    with pytest.raises(ApiError, match="shutting down"), requests.place(None):  # type: ignore[arg-type]
        pass


def test_refused_clients_are_asked_to_come_back_one_after_another() -> None:
    async def refused() -> list[int]:
        requests, times = RequestQueue(0), []
        requests._seconds = 10.0
        record = RequestRecord(id="1", method="POST", path="/")
        with requests.place(PendingRequest(record)):
            for _ in range(8):
                with pytest.raises(ApiError) as error, requests.place(PendingRequest(record)):
                    pass
                assert error.value.headers is not None
                times.append(int(error.value.headers["Retry-After"]))
        return times

    found = asyncio.run(refused())
    assert found == sorted(found) and found[0] in (9, 10) and found[2] in (29, 30)
    assert found[-1] == LONGEST_RETRY  # OpenAI's client does not wait for longer
