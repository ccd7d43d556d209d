"""Layer: one process. The HTTP interface with a model that a test controls: limits, errors, streams, disconnects."""

import json
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("openai", reason="openai is not installed (extra test)")

import openai
from live_app import PIECES, ask, status_of

from mllm_seqpar.data import FrameChoice
from mllm_seqpar.serving import app, middleware
from mllm_seqpar.serving.media import MediaStore
from mllm_seqpar.serving.protocol import ApiError


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
    assert moment == {"start": 2.0, "end": 4.0, "share": 0.5, "first": 2, "last": 3, "peak": 2, "medium": 0}
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


@pytest.mark.parametrize("origin", ["http://[", "null", "http://a/ b", "[", "\xe9"])
def test_malformed_origin_is_refused(service: SimpleNamespace, origin: str) -> None:
    headers = {"Origin": origin.encode("latin-1")}
    for path in ("health", "v1/models"):
        assert service.client._client.get(f"{service.base}/{path}", headers=headers).status_code == 403


def test_without_the_key_only_the_page_and_the_state_are_public(service: SimpleNamespace) -> None:
    def status(method: str, path: str, **options: Any) -> int:
        return service.client._client.request(method, service.base + path, **options).status_code

    key = {"Authorization": "Bearer secret"}
    for path in ("/", "/page.js", "/health", "/metrics"):
        assert status("GET", path) == 200
        assert status("POST", path, json={}) == 401 and status("POST", path, json={}, headers=key) == 405
    assert status("POST", "/load_model", json={"model": "tiny"}) == 401
    assert status("POST", "/load_model", json={"model": "tiny"}, headers=key) == 200
    for path in ("/v1/models", "/v1/files", "/v1", "/v1/../load_model", "//health", "/nothing", "/docs"):
        assert status("GET", path) == 401
    assert status("GET", "/nothing", headers=key) == 404


def test_only_requests_with_media_may_be_large(service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "SMALL", 1000)
    key = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    for body in (b"x" * 3000, iter([b"x" * 900] * 3)):
        answer = service.client._client.post(f"{service.base}/load_model", content=body, headers=key)
        assert answer.status_code == 413 and "more than the allowed 1000 bytes" in answer.json()["error"]["message"]
    assert ask(service.client, "x" * 3000).choices


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
        time.sleep(0.01)
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
    assert (job.media[0].kind, job.media[0].frames) == ("video", FrameChoice(num_frames=2))
    assert files.delete(upload.id).deleted and not list(files.list())


def test_limit_of_a_request_holds_for_each_of_its_videos(service: SimpleNamespace) -> None:
    upload = service.client.files.create(file=("clip.mp4", b"not an image"), purpose="user_data")
    parts = [{"type": "file", "file": {"file_id": upload.id, **frames}} for frames in ({"fps": 5}, {})]
    limits = {"mm_processor_kwargs": {"max_frames": 3}, "media_io_kwargs": {"video": {"num_frames": 7}}}
    service.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], extra_body=limits
    )
    found = [file.frames for file in service.worker.jobs[-1].media]
    assert found == [FrameChoice(fps=5, max_frames=3), FrameChoice(num_frames=7, max_frames=3)]


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
