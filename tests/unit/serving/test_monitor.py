"""Layer: one process. The log, the metrics, and the answer to clients that ask for the state of the server."""

import io
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("openai", reason="openai is not installed (extra test)")

from live_app import ask, status_of
from prometheus_client import parser

from mllm_seqpar.serving.media import MediaStore


def test_log_has_a_line_for_each_request(service: SimpleNamespace) -> None:
    answer, failed = ask(service.client), status_of(lambda: ask(service.client, "bug"))
    assert status_of(lambda: ask(service.client, n=2)) == (400, None) and failed == (500, None)
    list(ask(service.client, stream=True))
    service.client.models.list()
    while len(service.log) < 4:
        time.sleep(0.01)
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
    ask_for(f"{service.base}/a%0Ab%20status=200", json={}, headers={"Authorization": "Bearer secret"})
    status_of(lambda: ask(service.client, extra_body={"x\ny": 1}))
    assert all("\n" not in line for line in service.log) and "status=404" in service.log[0]


def test_metrics_are_read_by_the_client_of_prometheus(service: SimpleNamespace) -> None:
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


def test_stored_bytes_are_counted_while_files_come_and_go(tmp_path: Path) -> None:
    store, stop = MediaStore(tmp_path, max_bytes=10, max_total=10**9), threading.Event()
    for _ in range(500):
        store.add(io.BytesIO(b"x"), "a", "vision")

    def churn() -> None:
        while not stop.is_set():
            uploads = [store.add(io.BytesIO(b"x"), "a", "vision") for _ in range(20)]
            for upload in uploads:
                store.delete(upload.id)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(500 <= store.stored <= 520 for _ in range(5000))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert store.stored == 500


def test_client_of_transformers_finds_the_model_loaded(service: SimpleNamespace) -> None:
    post = partial(service.client._client.post, headers={"Authorization": "Bearer secret"})
    assert post(f"{service.base}/load_model", json={"model": "tiny"}).text.startswith(
        'data: {"model": "tiny", "status": "ready"'
    )
    assert '"status": "error", "message": "The model' in post(f"{service.base}/load_model", json={"model": "x"}).text
    assert post(f"{service.base}/load_model", json=[]).status_code == 200
