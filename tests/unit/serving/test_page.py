"""Layer: one process. The page of the server in a headless browser, with a model that the test controls."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("av", reason="PyAV is not installed (extra video)")
pytest.importorskip("openai", reason="openai is not installed (extra test)")

import av
import numpy as np

from browser import CHROMIUM, Browser
from mllm_seqpar.serving.media import MediaStore

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture
def page(service: SimpleNamespace, tmp_path: Path) -> Iterator[Browser]:
    """The page, with the key of the server."""
    browser = Browser(service.base, tmp_path / "profile")
    try:
        browser.wait("!!document.getElementById('key')")
        browser.value("document.getElementById('key').value = 'secret'; null")
        browser.value("document.getElementById('key').dispatchEvent(new Event('change')); null")
        browser.wait("document.getElementById('model').textContent === 'tiny'")
        yield browser
    finally:
        browser.close()


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event until which uploads take."""
    arrived, add = threading.Event(), MediaStore.add

    def wait(*args: Any) -> Any:
        arrived.wait(60)
        return add(*args)

    monkeypatch.setattr(MediaStore, "add", wait)
    yield arrived
    arrived.set()


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A video of 4 seconds, small enough for the limits of the server."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 60 * number, dtype=np.uint8))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file above the limits of the server."""
    path = tmp_path / "large.mp4"
    path.write_bytes(bytes(9000))
    return path


def submit(page: Browser, text: str) -> None:
    page.value(f"question.value = {text!r}; form.requestSubmit(); null")


def status_is(page: Browser, text: str) -> None:
    page.wait(f"document.getElementById('status').textContent.includes({text!r})", 20)


def test_question_is_not_sent_while_the_video_is_uploaded(
    service: SimpleNamespace, page: Browser, arrive: threading.Event, clip: Path
) -> None:
    page.choose_file("#file", clip)
    submit(page, "What is it?")
    assert not service.worker.began.wait(1.0)
    assert page.value("document.getElementById('ask').disabled")
    assert page.value("question.value") == "What is it?"
    arrive.set()
    page.wait("!document.getElementById('ask').disabled")
    page.value("form.requestSubmit(); null")
    page.wait("document.querySelector('#messages li.assistant')?.textContent.includes('One two three')")
    assert [len(job.media) for job in service.worker.jobs] == [1]


def test_question_is_not_sent_without_the_video_that_was_refused(
    service: SimpleNamespace, page: Browser, large: Path
) -> None:
    page.choose_file("#file", large)
    status_is(page, "(--max_upload_mb)")
    submit(page, "What is it?")
    assert not service.worker.began.wait(1.0)
    assert page.value("question.value") == "What is it?"
