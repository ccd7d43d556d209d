"""Layer: one process. The HTTP interface with a model that a test controls: limits, errors, streams, disconnects, the
log, metrics, and previews of files."""

import io
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")

from live_app import PIECES, ask, part_of, status_of
from prometheus_client import parser

from mllm_seqpar.data import FrameChoice
from mllm_seqpar.serving import app, middleware
from mllm_seqpar.serving.media import MediaStore
from mllm_seqpar.serving.protocol import ApiError

FORM = "multipart/form-data; boundary=x"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def upload(service: SimpleNamespace, content: bytes, name: str = "clip.mp4") -> Any:
    return service.client.files.create(file=(name, content), purpose="user_data")


def stored_bytes(service: SimpleNamespace) -> float:
    return float(re.search(r"stored_bytes ([\d.]+)", service.http("GET", "metrics").text)[1])  # type: ignore[index]


def begun(
    service: SimpleNamespace, size: int, key: str = "secret", *, path: str = "files", kind: str = FORM
) -> socket.socket:
    """Return a connection that has sent the beginning of a request whose body has this size: an upload."""
    host, port = service.base.removeprefix("http://").split(":")
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode())
    return connection


def test_answer_as_one_object_and_as_chunks(service: SimpleNamespace) -> None:
    whole = ask(service, seed=3, stop=["x"])
    assert (whole.object, whole.model, whole.choices[0].message.content) == ("chat.completion", "tiny", "One two three")
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("stop", 8)
    assert (whole.usage.prompt_tokens_details.cached_tokens, service.worker.jobs[0].stop) == (4, ("x",))
    chunks = list(ask(service, stream=True, stream_options={"include_usage": True}))
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", chunks[0].id)}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == [*PIECES]
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].choices, chunks[-1].usage.total_tokens) == ("stop", [], 8)


def test_evidence_comes_with_the_whole_answer_and_with_the_last_chunk(service: SimpleNamespace) -> None:
    asked = {"extra_body": {"evidence": 3}}
    (moment,) = ask(service, **asked).evidence
    assert moment == {"start": 2.0, "end": 4.0, "share": 0.5, "first": 2, "last": 3, "peak": 2, "medium": 0}
    chunks = list(ask(service, stream=True, **asked))
    assert chunks[-1].evidence == [moment] and not any(hasattr(chunk, "evidence") for chunk in chunks[:-1])
    assert not hasattr(ask(service), "evidence")
    assert [job.evidence for job in service.worker.jobs] == [3, 3, 0]


def test_raw_stream_has_progress_comments_and_ends_with_done(service: SimpleNamespace) -> None:
    raw = service.client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True
    )
    lines = [line for line in raw.http_response.iter_lines() if line]
    assert lines[0] == ": frames encoded: 1 of 2" and lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[1:-1]) and '"usage"' not in lines[1]


def test_errors_have_the_status_and_format_of_openai(service: SimpleNamespace, openai: Any) -> None:
    client, inline = service.client, {"type": "video_url", "video_url": "data:,video"}
    clip = part_of(upload(service, b"video", "my clip.mp4").id)
    for expected, message, call, *args in (
        ((400, None), "- my clip.mp4 is damaged", ask, service, "broken", clip),  # as the client knows it
        ((400, None), "- the data: URL is damaged", ask, service, "broken", inline),
        ((400, None), "the video is damaged", lambda: ask(service, "broken", stream=True)),
        ((400, None), "n: 2 is not supported", lambda: ask(service, n=2)),
        ((400, None), "messages: ", lambda: client.chat.completions.create(model="gpt", messages=[])),
        ((500, "non_finite_logits"), "not finite; use --dtype bfloat16", ask, service, "overflow"),
        ((401, "invalid_api_key"), "Incorrect API key", client.with_options(api_key="x").models.list),
        ((403, "origin"), "--allowed_origins", lambda: ask(service, extra_headers={"Origin": "http://evil.example"})),
        ((404, "model_not_found"), "does not exist", client.models.retrieve, "gpt"),
        ((404, None), "No such File object", client.files.retrieve, "file-1"),
        ((404, None), "Not Found", lambda: client.post("/nothing", cast_to=object)),
        ((413, "too_large"), "--max_upload_mb", upload, service, b"x" * 20_000),
        ((413, "too_large"), "--max_upload_mb", ask, service, "x" * 20_000),
    ):
        assert status_of(call, *args, match=re.escape(message)) == expected
    with pytest.raises(openai.APIError, match="not finite; use --dtype bfloat16"):
        list(ask(service, "overflow", stream=True))
    # The server answers after these errors, and it accepts its own origin.
    assert ask(service, extra_headers={"Origin": service.base}).choices
    health = service.http("GET", "health", headers={}).json()
    assert health == {"status": "ok", "ranks": 1, "running": 0, "waiting": 0}


def test_only_names_of_this_machine_are_accepted_at_a_loopback_address(service: SimpleNamespace) -> None:
    port = service.base.rpartition(":")[2]
    for name in ("evil.example", f"evil.example:{port}", "10.0.0.1", f"localhost.evil.example:{port}", "["):
        for origin in ({}, {"Origin": f"http://{name}"}):  # after a DNS rebinding they are equal
            headers = {"Host": name, **origin}
            assert service.http("GET", "health", headers=headers).status_code == 403
            assert status_of(ask, service, extra_headers=headers) == (403, "host")
    for name in ("localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1", "127.1.2.3:9", "[::1]:80"):
        assert ask(service, extra_headers={"Host": name, "Origin": f"http://{name}"}).choices
    for malformed in ("http://[", "null", "http://a/ b", "[", "\xe9"):
        for path in ("health", "v1/models"):
            assert service.http("GET", path, headers={"Origin": malformed.encode("latin-1")}).status_code == 403


def test_page_of_an_allowed_origin_can_read_answers_and_errors(service: SimpleNamespace) -> None:
    mine, body = {"Origin": "http://app.example"}, {"messages": [{"role": "user", "content": "Hello"}]}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = service.http("OPTIONS", "v1/chat/completions", headers=mine | asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == mine["Origin"]
    assert preflight.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
    key = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    for headers, status in ((mine | key, 200), (mine, 401)):
        answer = service.http("POST", "v1/chat/completions", headers=headers, json=body)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, mine["Origin"])
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
    for other in ("http://app.example.org", "http://app.example:81", "https://app.example", "null"):
        assert service.http("OPTIONS", "v1/files", headers={"Origin": other} | asks).status_code == 400
        refused = service.http("POST", "v1/chat/completions", headers=key | {"Origin": other}, json=body)
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers


def test_without_the_key_only_the_page_and_the_state_are_public(service: SimpleNamespace) -> None:
    def status(method: str, path: str, **options: Any) -> int:
        return service.http(method, path, **options).status_code

    for path in ("", "page.js", "health", "metrics"):
        assert status("GET", path, headers={}) == 200
        assert status("POST", path, json={}, headers={}) == 401 and status("POST", path, json={}) == 405
    assert status("POST", "load_model", json={"model": "tiny"}, headers={}) == 401
    for path in ("v1/models", "v1/files", "v1", "v1/../load_model", "/health", "nothing", "docs"):
        assert status("GET", path, headers={}) == 401
    assert status("GET", "nothing") == 404


def test_client_of_transformers_finds_the_model_loaded(service: SimpleNamespace) -> None:
    def said(body: Any) -> str:
        answer = service.http("POST", "load_model", json=body)
        assert answer.status_code == 200
        return answer.text

    assert said({"model": "tiny"}).startswith('data: {"model": "tiny", "status": "ready"')
    assert '"status": "error", "message": "The model' in said({"model": "x"}) and said([])


def test_only_requests_with_media_may_be_large(service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "SMALL", 1000)
    for body in (b"x" * 3000, iter([b"x" * 900] * 3)):
        answer = service.http("POST", "load_model", content=body)
        assert answer.status_code == 413 and "more than the allowed 1000 bytes" in answer.json()["error"]["message"]
    assert ask(service, "x" * 3000).choices


def test_fields_without_effect_are_named_in_a_header(service: SimpleNamespace) -> None:
    create = service.client.chat.completions.with_raw_response.create
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    for stream in (False, True):
        answer = create(**asked, stream=stream, user="me", extra_body={"priority": 1})
        assert answer.headers["Warning"] == '299 mllm-seqpar "fields without effect: user, priority"'
    assert "Warning" not in create(**asked).headers


def test_media_that_are_fetched_hold_a_place_in_the_queue(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fetching = threading.Event(), threading.Semaphore(0)

    def slow(*_: Any) -> Any:
        fetching.release()
        go.wait(30)
        raise ApiError(400, "no such video")

    monkeypatch.setattr(MediaStore, "_download", slow)
    part = {"type": "video_url", "video_url": "http://localhost/a.mp4"}
    with ThreadPoolExecutor(2) as pool:
        # one waits, one takes the place of the one that is answered
        fetches = [pool.submit(status_of, ask, service, "?", part) for _ in range(2)]
        for _ in fetches:
            assert fetching.acquire(timeout=30)
        assert status_of(ask, service, "?", part) == (429, "rate_limit_exceeded")
        assert fetching._value == 0  # it was not begun
        assert service.http("GET", "health").json()["waiting"] == 2
        go.set()
        assert [future.result() for future in fetches] == [(400, None)] * 2
    assert service.queue.waiting == 0 and ask(service).choices


def test_body_is_parsed_beside_the_event_loop(service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy: list[int] = []

    def parse(body: bytes) -> Any:
        healthy.append(urllib.request.urlopen(f"{service.base}/health", timeout=30).status)  # of the same event loop
        return json.loads(body)

    monkeypatch.setattr(app, "parse", parse)
    assert ask(service).choices and healthy == [200]


def test_full_queue_refuses_and_a_client_that_leaves_ends_its_answer(service: SimpleNamespace) -> None:
    worker = service.worker
    worker.go.clear()
    stream = ask(service, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert worker.began.wait(10)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ask, service, "Second")
        wait_until(lambda: service.queue.waiting == 1)
        assert status_of(ask, service, "Third") == (429, "rate_limit_exceeded")
        stream.close()
        assert worker.ended.wait(10)  # although `go` is not set
        worker.go.set()
        assert second.result(10).choices[0].message.content == "One two three"
    assert len(worker.jobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_place_of_a_waiting_client_that_leaves_is_free(service: SimpleNamespace, openai: Any, stream: bool) -> None:
    service.worker.go.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, service)
        assert service.worker.began.wait(30)
        part = {"type": "video_url", "video_url": "data:,video"}
        with pytest.raises(openai.APITimeoutError):
            list(ask(service, "Second", part, stream=stream, timeout=0.5))
        wait_until(lambda: service.queue.waiting == 0 and stored_bytes(service) == 0)
        assert service.http("GET", "health").json()["waiting"] == 0
        third = pool.submit(ask, service, "Third")
        wait_until(lambda: service.queue.waiting == 1)
        refused = service.http("POST", "v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}]})
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["message"].startswith("1 requests are waiting, and 1 may wait")
        service.worker.go.set()
        assert first.result(30).choices and third.result(30).choices
    assert ["Second" in str(job.messages) for job in service.worker.jobs] == [False, False]


def test_download_for_a_client_that_leaves_ends(
    service: SimpleNamespace, openai: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    @contextmanager
    def opened(*_: Any) -> Any:
        try:
            yield SimpleNamespace(headers={})
        finally:
            ended.set()

    def slow(*_: Any) -> Any:
        while True:
            yield b"x"
            time.sleep(0.05)

    monkeypatch.setattr("mllm_seqpar.serving.media.open_url", opened)
    monkeypatch.setattr("mllm_seqpar.serving.media.blocks", slow)
    with pytest.raises(openai.APITimeoutError):
        ask(service, "?", {"type": "video_url", "video_url": "http://localhost/a.mp4"}, timeout=0.5)
    assert ended.wait(30)
    wait_until(lambda: service.queue.waiting == 0 and stored_bytes(service) == 0)


def test_clients_that_repeat_their_requests_are_all_answered(service: SimpleNamespace, openai: Any) -> None:
    client = service.client.with_options(max_retries=20)
    patient = SimpleNamespace(client=client)
    with ThreadPoolExecutor(8) as pool:
        assert all(answer.choices for answer in pool.map(lambda number: ask(patient, str(number)), range(8)))


def test_client_that_leaves_early_is_logged_as_such(service: SimpleNamespace, openai: Any) -> None:
    service.worker.go.clear()
    for stream in (False, True):
        with pytest.raises(openai.APITimeoutError):
            list(ask(service, stream=stream, timeout=0.5))
    for path, kind in (("chat/completions", "application/json"), ("files", FORM)):
        with begun(service, 99, path=path, kind=kind) as connection:  # which closes before the body has arrived
            connection.sendall(b"--x")
            time.sleep(0.2)
    wait_until(lambda: len(service.log) == 4)
    assert all(" status=499 " in line and "the client has closed the connection" in line for line in service.log)


def test_shutting_down_refuses_and_ends_what_runs(service: SimpleNamespace, openai: Any) -> None:
    service.worker.go.clear()
    stream = iter(ask(service, stream=True))
    next(stream)
    service.queue.stop()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert status_of(ask, service) == (503, "shutting_down")


def test_uploads_are_listed_used_and_deleted(service: SimpleNamespace) -> None:
    files, stored = service.client.files, upload(service, b"video", "a.mp4")
    assert (stored.filename, stored.bytes, stored.object) == ("a.mp4", 5, "file")
    assert [file.id for file in files.list()] == [stored.id] == [files.retrieve(stored.id).id]
    ask(service, "?", part_of(stored.id, num_frames=2))
    (job,) = service.worker.jobs
    assert job.messages == [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    assert (job.media[0].kind, job.media[0].frames) == ("video", FrameChoice(num_frames=2))
    assert files.delete(stored.id).deleted and not list(files.list())


def test_uploads_expire_after_the_seconds_that_they_state(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, now = service.client.files, [1e9]
    monkeypatch.setattr("mllm_seqpar.serving.media.time", SimpleNamespace(time=lambda: now[0]))

    def add(name: str, **expiry: Any) -> Any:
        return files.create(file=(name, b"video"), purpose="user_data", **{"expires_after": expiry} if expiry else {})

    kept, fixed = add("kept"), add("fixed", anchor="created_at", seconds=3600)
    used = add("used", anchor="last_active_at", seconds=3600)
    assert (kept.expires_at, fixed.expires_at, used.expires_at) == (None, 1e9 + 3600, 1e9 + 3600)
    now[0] += 3000
    ask(service, "?", part_of(used.id))
    assert files.retrieve(fixed.id).expires_at == 1e9 + 3600
    now[0] += 3000
    assert status_of(files.retrieve, fixed.id) == (404, None)
    assert [file.id for file in files.list()] == [kept.id, used.id]
    now[0] += 3600
    assert status_of(ask, service, "?", part_of(used.id)) == (400, None)
    assert stored_bytes(service) == 5
    for anchor, seconds in (("never", 3600), ("created_at", 5), ("created_at", 10**12)):
        assert status_of(lambda a=anchor, s=seconds: add("x", anchor=a, seconds=s)) == (400, None)


def test_limit_of_a_request_holds_for_each_of_its_videos(service: SimpleNamespace) -> None:
    stored = upload(service, b"not an image").id
    limits = {"mm_processor_kwargs": {"max_frames": 3}, "media_io_kwargs": {"video": {"num_frames": 7}}}
    ask(service, "?", part_of(stored, fps=5), part_of(stored), extra_body=limits)
    found = [file.frames for file in service.worker.jobs[-1].media]
    assert found == [FrameChoice(fps=5, max_frames=3), FrameChoice(num_frames=7, max_frames=3)]


def test_upload_without_room_is_refused_before_it_is_received(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        upload(service, b"x" * 2400)
    monkeypatch.setattr(MediaStore, "add", None)  # must not be reached
    assert status_of(upload, service, b"x" * 2400) == (413, None)


def test_upload_that_is_received_has_its_room_until_its_client_leaves(service: SimpleNamespace) -> None:
    with begun(service, 4900):
        wait_until(lambda: stored_bytes(service) == 3876)
        assert status_of(upload, service, b"x" * 2400) == (413, None)
    wait_until(lambda: stored_bytes(service) == 0)
    assert upload(service, b"x" * 2400).bytes == 2400


def test_body_that_stops_arriving_is_a_failed_request(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "PATIENCE", 0.3)
    for key, status, text in (("secret", 408, "no bytes of the request have arrived for 0.3 s"), ("x", 401, "key")):
        with begun(service, 4900, key) as connection:
            connection.settimeout(30)
            answer = connection.recv(4096).decode()
            answer += "" if text in answer else connection.recv(4096).decode()
        assert answer.startswith(f"HTTP/1.1 {status} ") and text in answer
    assert stored_bytes(service) == 0
    service.worker.go.clear()  # a request whose body is complete may take as long as it needs
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(ask, service)
        time.sleep(1)
        service.worker.go.set()
        assert answered.result(30).choices


def test_log_has_a_line_for_each_request(service: SimpleNamespace) -> None:
    answer, failed = ask(service), status_of(ask, service, "bug")
    assert status_of(ask, service, n=2) == (400, None) and failed == (500, None)
    list(ask(service, stream=True))
    service.client.models.list()
    wait_until(lambda: len(service.log) == 4)
    first, bug, refused, stream = [line.split(" ", 3) for line in service.log]
    assert answer.id == f"chatcmpl-{first[1]}" and first[2] == "POST"
    number = r"\d+\.\d{3}"
    shown = rf"/v1/chat/completions status=200 seconds={number} queue={number} first_token={number} prompt_tokens=5 "
    shown += "cached_tokens=4 completion_tokens=3 finish=stop"
    assert re.fullmatch(shown, first[3]) and re.fullmatch(shown, stream[3])
    error = rf'.* status=500 seconds={number} queue={number} error="the server failed to answer; .*"'
    assert re.fullmatch(error, bug[3])
    assert re.fullmatch(r'.* status=400 seconds=\S+ error="n: 2 is not supported by this server; .*"', refused[3])
    service.http("POST", "a%0Ab%20status=200", json={})
    status_of(ask, service, extra_body={"x\ny": 1})
    wait_until(lambda: len(service.log) == 6)
    assert all("\n" not in line for line in service.log) and "status=404" in service.log[4]


def test_metrics_are_read_by_the_client_of_prometheus(service: SimpleNamespace) -> None:
    ask(service)
    list(ask(service, stream=True))
    status_of(ask, service, "broken")
    answer = service.http("GET", "metrics")
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


def test_stored_bytes_are_counted_while_files_come_and_go(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, max_bytes=10, max_total=10**9)

    def change() -> None:
        store.delete(store.add(io.BytesIO(b"x"), "a", "vision").id)
        store.add(io.BytesIO(b"x"), "a", "vision")

    class Counted(dict):
        def values(self) -> Any:
            for upload in super().values():
                if not changes:
                    changes.append(pool.submit(change))
                    wait(changes, timeout=0.2)  # with the lock, the change begins when the bytes are counted
                yield upload

    changes: list[Future[None]] = []
    change()
    store._uploads = Counted(store._uploads)
    with ThreadPoolExecutor(1) as pool:
        counted = store.stored
        changes[0].result()
    assert counted == 1 and len(store.uploads()) == 2


def test_previews_are_frames_of_their_time_and_refusals_name_the_upload(service: SimpleNamespace, clip: Path) -> None:
    def preview(path: str) -> Any:
        return service.http("GET", f"v1/files/{path}")

    pillow, buffer = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra video)"), io.BytesIO()
    file = upload(service, clip.read_bytes()).id
    assert preview(f"{file}/preview").json() == {"kind": "video", "seconds": 4.0, "fps": 1.0}
    for seconds, brightness in (("0", 0), ("1.9", 60), ("2", 120), ("3", 180), ("1e9", 180), ("-1", 0), ("nan", 0)):
        jpeg = preview(f"{file}/frame?seconds={seconds}").content
        red, green, blue = pillow.open(io.BytesIO(jpeg)).convert("RGB").getpixel((8, 8))
        assert max(abs(x - brightness) for x in (red, green, blue)) < 12, seconds

    pillow.new("RGB", (4, 4)).save(buffer, "PNG")
    image = upload(service, buffer.getvalue(), "a.png").id
    assert preview(f"{image}/preview").json() == {"kind": "image"}
    damaged = upload(service, clip.read_bytes()[:300], "cut.mp4").id
    for path, status, begin in (
        (f"{damaged}/preview", 400, "cut.mp4: "),
        (f"{damaged}/frame?seconds=1", 400, "cut.mp4: "),
        (f"{image}/frame", 400, "a.png: an image has no time"),
        (f"{file}/frame?seconds=x", 400, "seconds: 'x' is not a number"),
        ("file-none/preview", 404, "No such File object"),
        ("file-none/frame", 404, "No such File object"),
    ):
        answer = preview(path)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status and message.startswith(begin) and "/" not in message
    assert service.http("GET", f"v1/files/{file}/frame", headers={}).status_code == 401
