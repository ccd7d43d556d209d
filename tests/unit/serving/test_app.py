"""Layer: one process. The HTTP interface with a model that a test controls: limits, errors, streams, disconnects."""

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from mllm_seqpar.serving import app
from mllm_seqpar.serving.app import Service, make_app
from mllm_seqpar.serving.jobs import Impossible, Outcome
from mllm_seqpar.serving.media import MediaStore
from mllm_seqpar.serving.protocol import ApiError
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
            raise Impossible(VideoError(f"{job.media[0].path if job.media else 'the video'} is damaged"))
        if "bug" in str(job.messages):
            raise Impossible(KeyError("/inner/path"), Outcome.FAILED)
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
    queue, worker, log = RequestQueue(1), FakeWorker(), []
    made = Service(
        model="tiny",
        store=MediaStore(tmp_path, max_bytes=1000, max_total=5000, allowed_hosts=["localhost"]),
        queue=queue,
        ranks=1,
        api_key="secret",
        max_bytes=5000,
        sampling=Sampling(),
        frames={"fps": 1.0},
        log=log.append,
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
            base=base, client=client, other=openai.OpenAI(api_key="x", **options), queue=queue, worker=worker, log=log
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


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "10.0.0.1", "localhost.evil.example:{port}", "["]
)
def test_name_of_another_machine_is_refused_at_a_loopback_address(service: SimpleNamespace, host: str) -> None:
    name = host.format(port=service.base.rpartition(":")[2])
    for origin in ({}, {"Origin": f"http://{name}"}):  # after a DNS rebinding they are equal
        headers = {"Host": name, **origin}
        assert service.client._client.get(f"{service.base}/health", headers=headers).status_code == 403
        assert status_of(partial(ask, service.client, extra_headers=headers)) == (403, "host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1", "127.1.2.3:9", "[::1]:80"])
def test_names_of_this_machine_are_accepted(service: SimpleNamespace, host: str) -> None:
    assert ask(service.client, extra_headers={"Host": host, "Origin": f"http://{host}"}).choices


def test_fields_without_effect_are_named_in_a_header(service: SimpleNamespace) -> None:
    create = service.client.chat.completions.with_raw_response.create
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    for stream in (False, True):
        answer = create(**asked, stream=stream, user="me", extra_body={"priority": 1})
        assert answer.headers["Warning"] == '299 mllm-seqpar "fields without effect: user, priority"'
    assert "Warning" not in create(**asked).headers


def test_log_has_a_line_for_each_request(service: SimpleNamespace) -> None:
    answer, failed = ask(service.client), status_of(lambda: ask(service.client, "bug"))
    assert status_of(lambda: ask(service.client, n=2)) == (400, None) and failed == (500, None)
    list(ask(service.client, stream=True))
    service.client.models.list()
    while len(service.log) < 4:
        pass
    first, bug, refused, stream = [line.split(" ", 3) for line in service.log]
    assert answer.id == f"chatcmpl-{first[1]}" and first[2] == "POST"
    number = r"\d+\.\d{3}"
    shown = rf"/v1/chat/completions status=200 seconds={number} queue={number} first_token={number} prompt_tokens=5 "
    shown += "cached_tokens=4 completion_tokens=3 finish=stop"
    assert re.fullmatch(shown, first[3]) and re.fullmatch(shown, stream[3])
    assert re.fullmatch(
        rf'.* status=500 seconds={number} queue={number} error="the server failed to answer; .*"', bug[3]
    )
    assert re.fullmatch(r'.* status=400 seconds=\S+ error="n: 2 is not supported by this server; .*"', refused[3])


def test_log_keeps_one_line_for_what_a_client_sends(service: SimpleNamespace) -> None:
    ask_for = service.client._client.post
    ask_for(f"{service.base}/a%0Ab%20status=200", json={})
    status_of(lambda: ask(service.client, extra_body={"x\ny": 1}))
    assert all("\n" not in line for line in service.log) and "status=404" in service.log[0]


def test_metrics_are_read_by_the_client_of_prometheus(service: SimpleNamespace) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed (extra test)")
    ask(service.client)
    list(ask(service.client, stream=True))
    status_of(lambda: ask(service.client, "broken"))
    answer = service.client._client.get(f"{service.base}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in parser.text_string_to_metric_families(answer.text)}
    values = {
        (sample.name.removeprefix("mllm_seqpar_"), *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["requests_total", "200"] == 2 and values["requests_total", "400"] == 1
    assert (values["prompt_tokens_total",], values["cached_prompt_tokens_total",]) == (10, 8)
    assert values["completion_tokens_total",] == 6 and values["request_seconds_count",] == 2
    assert values["queue_seconds_bucket", "+Inf"] == values["queue_seconds_count",] == 3
    assert values["ranks",] == 1 and values["requests_running",] == values["requests_waiting",] == 0
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    assert all(family.documentation.endswith(".") for family in families.values())


def test_client_of_transformers_finds_the_model_loaded(service: SimpleNamespace) -> None:
    post = service.client._client.post
    assert post(f"{service.base}/load_model", json={"model": "tiny"}).text.startswith(
        'data: {"model": "tiny", "status": "ready"'
    )
    assert '"status": "error", "message": "The model' in post(f"{service.base}/load_model", json={"model": "x"}).text
    assert post(f"{service.base}/load_model", json=[]).status_code == 200


def test_error_names_the_file_as_it_was_uploaded(service: SimpleNamespace) -> None:
    upload = service.client.files.create(file=("my clip.mp4", b"video"), purpose="user_data")
    for part, name in (
        ({"type": "file", "file": {"file_id": upload.id}}, "my clip.mp4"),
        ({"type": "video_url", "video_url": "data:,video"}, "the data: URL"),
    ):
        content: list[Any] = [part, {"type": "text", "text": "broken"}]
        with pytest.raises(openai.BadRequestError, match=f"- {name} is damaged"):
            service.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])


def test_media_that_are_fetched_hold_a_place_in_the_queue(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fetching = threading.Event(), threading.Semaphore(0)

    def slow(self: MediaStore, reference: Any) -> Any:
        fetching.release()
        go.wait(30)
        raise ApiError(400, "no such video")

    monkeypatch.setattr(MediaStore, "_download", slow)
    part = {"type": "video_url", "video_url": "http://localhost/a.mp4"}
    content: list[Any] = [part, {"type": "text", "text": "?"}]

    def fetch() -> tuple[int, Any]:
        return status_of(
            lambda: service.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}]
            )
        )

    with ThreadPoolExecutor(2) as pool:
        fetches = [pool.submit(fetch) for _ in range(2)]  # one waits, one takes the place of the one that is answered
        for _ in fetches:
            assert fetching.acquire(timeout=30)
        assert fetch() == (429, "rate_limit_exceeded") and fetching._value == 0  # it was not begun
        assert service.client._client.get(f"{service.base}/health").json()["waiting"] == 2
        go.set()
        assert [future.result() for future in fetches] == [(400, None)] * 2
    assert service.queue.waiting == 0 and ask(service.client).choices


def test_body_is_parsed_beside_the_event_loop(service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy: list[int] = []

    def parse(body: bytes) -> Any:
        healthy.append(urllib.request.urlopen(f"{service.base}/health", timeout=30).status)  # of the same event loop
        return json.loads(body)

    monkeypatch.setattr(app, "parse", parse)
    assert ask(service.client).choices and healthy == [200]


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


def test_upload_without_room_is_refused_before_it_is_received(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        service.client.files.create(file=("a.mp4", b"x" * 2400), purpose="user_data")
    monkeypatch.setattr(MediaStore, "add", None)  # must not be reached
    assert status_of(lambda: service.client.files.create(file=("a.mp4", b"x" * 2400), purpose="user_data")) == (
        413,
        None,
    )
