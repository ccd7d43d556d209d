"""The HTTP interface on a free port, with a model that a test controls."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from mllm_seqpar.data import FrameChoice
from mllm_seqpar.errors import NonFiniteLogitsError, VideoError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.inference.evidence import Evidence, Moment
from mllm_seqpar.inference.generation import Answer
from mllm_seqpar.inference.job import JobError, Outcome
from mllm_seqpar.serving.app import Service, make_app
from mllm_seqpar.serving.media import MediaStore
from mllm_seqpar.serving.request_queue import RequestQueue

PIECES = ("One", " two", " three")


class FakeWorker:
    """Answers with `PIECES`; waits before the second piece until `go` is set."""

    def __init__(self) -> None:
        self.channel = SimpleNamespace(heartbeat=0.05, require_alive=lambda: None)
        self.go, self.began, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.jobs: list[Any] = []
        self.go.set()

    def run(self, job: Any, *, on_start: Any, progress: Any, on_text: Any, interrupted: Callable[[], bool]) -> Answer:
        self.jobs.append(job)
        if "broken" in str(job.messages):
            raise JobError(VideoError(f"{job.media[0].source if job.media else 'the video'} is damaged"))
        if "bug" in str(job.messages):
            raise JobError(KeyError("/inner/path"), Outcome.FAILED)
        if "overflow" in str(job.messages):
            raise JobError(NonFiniteLogitsError("the logits are not finite; use --dtype bfloat16"))
        progress(1, 2)
        on_start()
        on_text(PIECES[0])
        self.began.set()
        while not (self.go.wait(0.01) or interrupted()):
            pass
        reason = "interrupted" if interrupted() else "stop"
        for piece in PIECES[1:]:
            on_text(piece)
        self.ended.set()
        text, times = "".join(PIECES), {"prefill_seconds": 0.0, "decode_seconds": 0.0}
        if job.evidence:
            moments = (Moment(share=0.5, first=2, last=3, peak=2, start=2.0, end=4.0),)
            unused: dict[str, Any] = {"shares": (), "text": 0.0, "attention": None, "pieces": (), "times": ()}
            times["evidence"] = Evidence(moments=moments, note="", **unused)
        return Answer(text=text, tokens=[1, 2, 3], prompt_tokens=5, cached_tokens=4, finish_reason=reason, **times)


@contextmanager
def running_service(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Yield a server on a free port, with its queue, its worker, its log, and clients."""
    import openai  # takes more than a second

    queue, worker, log = RequestQueue(1), FakeWorker(), []
    made = Service(
        model="tiny",
        store=MediaStore(tmp_path, max_bytes=1000, max_total=5000, allowed_hosts=["localhost"]),
        queue=queue,
        ranks=1,
        api_key="secret",
        max_bytes=5000,
        sampling=Sampling(),
        frames=FrameChoice(fps=1.0),
        origins=frozenset({"http://app.example"}),
        log=log.append,
    )
    server = uvicorn.Server(uvicorn.Config(make_app(made), log_level="error", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # as the server does, so that a first request before uvicorn's thread runs is not refused
        threads = [
            threading.Thread(target=server.run, kwargs={"sockets": [listener]}),
            threading.Thread(target=queue.answer_all, args=(worker,)),
        ]
        for thread in threads:
            thread.start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = {"base_url": f"{base}/v1", "max_retries": 0}
        client, key = openai.OpenAI(api_key="secret", **options), {"Authorization": "Bearer secret"}
        key["Content-Type"] = "application/json"

        def http(method: str, path: str, headers: Any = key, **more: Any) -> Any:
            """Send a request, with the key unless it has other headers."""
            return client._client.request(method, f"{base}/{path}", headers=headers, **more)

        yield SimpleNamespace(base=base, client=client, http=http, queue=queue, worker=worker, log=log)
        worker.go.set()
        queue.stop()
        server.should_exit = True
        for thread in threads:
            thread.join()


def ask(service: SimpleNamespace, text: str = "Hello", *media: Any, **options: Any) -> Any:
    content: Any = [*media, {"type": "text", "text": text}] if media else text
    create = service.client.chat.completions.create
    return create(model="tiny", messages=[{"role": "user", "content": content}], **options)


def part_of(upload: str, **frames: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": upload, **frames}}


def status_of(call: Callable[..., Any], *args: Any, match: str | None = None, **options: Any) -> tuple[int, Any]:
    """Return the status and the code of the error that a call of the client raises, whose message `match` describes."""
    import openai

    with pytest.raises(openai.APIStatusError, match=match) as error:
        call(*args, **options)
    assert {"message", "type", "param", "code"} == set(error.value.body)  # type: ignore[arg-type]
    return error.value.status_code, error.value.code
