"""Layer: one process. The HTTP interface with a model that a test controls: limits, errors, streams, disconnects."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("openai", reason="openai is not installed (extra test)")

import openai
import uvicorn

from mllm_seqpar.errors import VideoError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.inference.conversation import Reply
from mllm_seqpar.inference.moments import Moment
from mllm_seqpar.serving.app import Service, make_app
from mllm_seqpar.serving.jobs import Impossible
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

    def run(self, job: Any, *, on_start: Any, progress: Any, on_text: Any, interrupted: Callable[[], bool]) -> Reply:
        self.jobs.append(job)
        if "broken" in str(job.messages):
            raise Impossible(VideoError("the video is damaged"))
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
            times["evidence"] = (Moment(share=0.5, first=2, last=3, peak=2, start=2.0, end=4.0),)
        return Reply(text=text, tokens=[1, 2, 3], prompt_tokens=5, cached_tokens=4, finish_reason=reason, **times)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A server on a free port, with its queue, its worker, and clients."""
    queue, worker = RequestQueue(1), FakeWorker()
    made = Service(
        model="tiny",
        store=MediaStore(tmp_path, max_bytes=1000, max_total=5000),
        queue=queue,
        ranks=1,
        api_key="secret",
        max_bytes=5000,
        sampling=Sampling(),
        frames={"fps": 1.0},
    )
    server = uvicorn.Server(uvicorn.Config(make_app(made), log_level="error", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threads = [
            threading.Thread(target=server.run, kwargs={"sockets": [listener]}),
            threading.Thread(target=queue.answer_all, args=(worker,)),
        ]
        for thread in threads:
            thread.start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = {"base_url": f"{base}/v1", "max_retries": 0}
        client = openai.OpenAI(api_key="secret", **options)
        yield SimpleNamespace(
            base=base, client=client, other=openai.OpenAI(api_key="x", **options), queue=queue, worker=worker
        )
        worker.go.set()
        queue.stop()
        server.should_exit = True
        for thread in threads:
            thread.join()


def ask(client: openai.OpenAI, text: str = "Hello", **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **options)


def status_of(call: Callable[[], Any]) -> tuple[int, Any]:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    assert {"message", "type", "param", "code"} == set(error.value.body)  # type: ignore[arg-type]
    return error.value.status_code, error.value.code


def test_answer_as_one_object_and_as_chunks(service: SimpleNamespace) -> None:
    whole = ask(service.client, seed=3, stop=["x"])
    assert (whole.object, whole.model, whole.choices[0].message.content) == ("chat.completion", "tiny", "One two three")
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("stop", 8)
    assert (whole.usage.prompt_tokens_details.cached_tokens, service.worker.jobs[0].stop) == (4, ("x",))
    chunks = list(ask(service.client, stream=True, stream_options={"include_usage": True}))
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", chunks[0].id)}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == [*PIECES]
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].choices, chunks[-1].usage.total_tokens) == ("stop", [], 8)


def test_evidence_comes_with_the_whole_answer_and_with_the_last_chunk(service: SimpleNamespace) -> None:
    asked = {"extra_body": {"evidence": 3}}
    (moment,) = ask(service.client, **asked).evidence
    assert moment == {"start": 2.0, "end": 4.0, "share": 0.5, "first": 2, "last": 3, "medium": 0}
    chunks = list(ask(service.client, stream=True, **asked))
    assert chunks[-1].evidence == [moment] and not any(hasattr(chunk, "evidence") for chunk in chunks[:-1])
    assert not hasattr(ask(service.client), "evidence")
    assert [job.evidence for job in service.worker.jobs] == [3, 3, 0]


def test_raw_stream_has_progress_comments_and_ends_with_done(service: SimpleNamespace) -> None:
    raw = service.client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True
    )
    lines = [line for line in raw.http_response.iter_lines() if line]
    assert lines[0] == ": frames encoded: 1 of 2" and lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[1:-1]) and '"usage"' not in lines[1]


def test_errors_have_the_status_and_format_of_openai(service: SimpleNamespace) -> None:
    client = service.client
    assert status_of(lambda: ask(service.other)) == (401, "invalid_api_key")
    assert status_of(lambda: ask(client, "broken")) == (400, None)
    assert status_of(lambda: ask(client, "broken", stream=True)) == (400, None)
    assert status_of(lambda: ask(client, n=2)) == (400, None)
    assert status_of(lambda: client.chat.completions.create(model="gpt", messages=[])) == (400, None)
    assert status_of(lambda: client.models.retrieve("gpt")) == (404, "model_not_found")
    assert status_of(lambda: client.files.retrieve("file-1")) == (404, None)
    assert status_of(lambda: client.files.create(file=b"x" * 20_000, purpose="user_data"))[0] == 413
    assert status_of(lambda: ask(client, "x" * 20_000))[0] == 413
    assert status_of(lambda: ask(client, extra_headers={"Origin": "http://evil.example"})) == (403, "origin")
    assert status_of(lambda: client.post("/nothing", cast_to=object))[0] == 404
    ask(client, extra_headers={"Origin": service.base})
    health = client._client.get(f"{service.base}/health").json()
    assert health == {"status": "ok", "ranks": 1, "running": 0, "waiting": 0}


def test_full_queue_refuses_and_a_client_that_leaves_ends_its_answer(service: SimpleNamespace) -> None:
    client, worker = service.client, service.worker
    worker.go.clear()
    stream = ask(client, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert worker.began.wait(10)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(ask(client, "Second")))
    waiting.start()
    while service.queue.waiting == 0:
        pass
    assert status_of(lambda: ask(client, "Third")) == (429, "rate_limit_exceeded")
    stream.close()
    assert worker.ended.wait(10)  # although `go` is not set
    worker.go.set()
    waiting.join(10)
    assert results[0].choices[0].message.content == "One two three"
    assert len(worker.jobs) == 2


def test_shutting_down_refuses_and_ends_what_runs(service: SimpleNamespace) -> None:
    service.worker.go.clear()
    stream = iter(ask(service.client, stream=True))
    next(stream)
    service.queue.stop()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert status_of(lambda: ask(service.client)) == (503, "shutting_down")


def test_uploads_are_listed_used_and_deleted(service: SimpleNamespace) -> None:
    files = service.client.files
    upload = files.create(file=("a.mp4", b"video"), purpose="user_data")
    assert (upload.filename, upload.bytes, upload.object) == ("a.mp4", 5, "file")
    assert [file.id for file in files.list()] == [upload.id] == [files.retrieve(upload.id).id]
    part = {"type": "file", "file": {"file_id": upload.id, "num_frames": 2}}
    content = [part, {"type": "text", "text": "?"}]
    service.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    (job,) = service.worker.jobs
    assert job.messages == [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    assert (job.media[0].kind, job.media[0].num_frames, job.media[0].fps) == ("video", 2, None)
    assert files.delete(upload.id).deleted and not list(files.list())
