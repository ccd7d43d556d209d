"""Layer: real launch. The server on 2 ranks that it starts itself, by the openai client and in a headless browser."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")


from browser import CHROMIUM, Chromium
from chat_request_fuzz import fuzz
from conversation_cases import replies_in_one_process, reply_in_one_process
from launch import HANG, ROOT
from mllm_seqpar.data import VideoSource
from mllm_seqpar.inference import Answer

pytestmark = [pytest.mark.launch, pytest.mark.slow]
QUESTIONS = ("What is it?", "Why?")
CLIPS: tuple[dict[str, float], ...] = ({}, {"start": 2.5}, {"end": 1}, {"start": 1, "end": 1.5})


class Server:
    """The command in a process, with its output in a file."""

    def __init__(self, folder: Path, *argv: Any) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "mllm_seqpar", "serve", "--port", "0", *map(str, argv)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self._log.open("w") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def url(self) -> str:
        """Return the address as soon as the server listens."""
        deadline = time.monotonic() + HANG
        while not (found := re.search(r"http://\S+:\d+", self.output)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found[0]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(inference_files: Path, tmp_path_factory: pytest.TempPathFactory, openai: Any) -> Iterator[SimpleNamespace]:
    options = ["--model", inference_files / "gated", "--num-processes", 2, "--num-frames", 5, "--max-new-tokens", 8]
    started = Server(tmp_path_factory.mktemp("server"), *options, "--media-root", inference_files)
    try:
        url = started.url()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(server=started, url=url, client=client)
    finally:
        started.process.kill()


@pytest.fixture(scope="module")
def expected(inference_files: Path) -> list[Answer]:
    """Replies to `QUESTIONS` in one process."""
    return replies_in_one_process(inference_files / "gated", inference_files / "clip.mp4", QUESTIONS, 5, 8)


def test_turns_of_the_openai_client_equal_one_process(
    server: SimpleNamespace, expected: list[Answer], openai: Any
) -> None:
    video = {"type": "video_url", "video_url": {"url": "clip.mp4"}}
    messages: list[Any] = [{"role": "user", "content": [video, {"type": "text", "text": QUESTIONS[0]}]}]
    create = server.client.chat.completions.create
    first = create(model="gated", messages=messages)
    assert first.choices[0].message.content == expected[0].text
    messages += [first.choices[0].message, {"role": "user", "content": QUESTIONS[1]}]
    chunks = list(create(model="gated", messages=messages, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected[1].text
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(expected[1].tokens)
    assert usage.prompt_tokens_details.cached_tokens == expected[1].cached_tokens > 0
    with pytest.raises(openai.BadRequestError, match="the context of this model is 4096 tokens") as error:
        create(model="gated", messages=messages, max_tokens=5000)
    assert error.value.code == "context_length_exceeded"


def test_video_in_a_later_turn_equals_one_process(server: SimpleNamespace, inference_files: Path, openai: Any) -> None:
    """The frames of the second video follow those of the first in the cache."""
    create, messages = server.client.chat.completions.create, list[Any]()
    for question, own in zip(QUESTIONS, CLIPS, strict=False):
        video = {"type": "video_url", "video_url": {"url": "clip.mp4", **own}}
        content = [video, {"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        reply = create(model="gated", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    sources = [VideoSource.open(inference_files / "clip.mp4", num_frames=5, **own) for own in CLIPS[:2]]
    last = reply_in_one_process(inference_files / "gated", messages[:-1], sources, 8)
    assert messages[-1]["content"] == last.text
    assert reply.usage.prompt_tokens_details.cached_tokens > 5  # those of the first turn, at least its frames


def test_clip_of_a_video_equals_one_process(server: SimpleNamespace, inference_files: Path, openai: Any) -> None:
    def asked(**clip: float) -> str:
        part = {"type": "video_url", "video_url": {"url": "clip.mp4", **clip}}
        messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": QUESTIONS[0]}]}]
        return server.client.chat.completions.create(model="gated", messages=messages).choices[0].message.content

    model, video = inference_files / "gated", inference_files / "clip.mp4"
    replies = [replies_in_one_process(model, video, QUESTIONS[:1], 5, 8, **clip)[0].text for clip in CLIPS]
    assert [asked(**clip) for clip in CLIPS] == replies
    assert len(set(replies)) > 1  # so that ignored times would be seen
    with pytest.raises(openai.BadRequestError, match=r"the clip starts at 1e\+06 s, but the video has 4\.000 s"):
        asked(start=1e6)


def test_sampling_depends_on_the_seed_only(server: SimpleNamespace) -> None:
    def sample(seed: int) -> str:
        options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "seed": seed, "max_tokens": 12}
        messages = [{"role": "user", "content": "Hello"}]
        return (
            server.client.chat.completions.create(model="gated", messages=messages, **options)
            .choices[0]
            .message.content
        )

    assert sample(1) == sample(1) != sample(2)


def test_damaged_video_is_one_bad_request(server: SimpleNamespace, inference_files: Path, openai: Any) -> None:
    damaged = (inference_files / "clip.mp4").read_bytes()[:20_000]
    upload = server.client.files.create(file=("cut.mp4", damaged), purpose="user_data")
    part = {"type": "file", "file": {"file_id": upload.id}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    with pytest.raises(openai.BadRequestError, match=r"cut\.mp4: .*") as error:
        server.client.chat.completions.create(model="gated", messages=messages)
    assert "/" not in str(error.value.body["message"])  # type: ignore[index]
    assert server.client.models.list().data[0].id == "gated"


def test_transformers_chat_talks_to_the_server(server: SimpleNamespace) -> None:
    pytest.importorskip("rich", reason="rich is not installed; transformers chat needs it")
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", "gated", server.url, "max_new_tokens=4"]
    said = "Hello\n!exit\n!exit\n"  # the first !exit may answer whether to go on
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANG, "cwd": ROOT}
    variables = {**os.environ, "HF_HUB_OFFLINE": "0"}  # it refuses local addresses too
    ended = subprocess.run([*command, "--user", "me"], input=said, env=variables, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "gated was already loaded" in ended.stdout and "<gated>" in ended.stdout
    line = next(line for line in reversed(server.server.output.splitlines()) if "/v1/chat/completions" in line)
    assert re.search(r" status=200 .* completion_tokens=[1-4] finish=", line), line


def test_random_requests_never_end_the_server(server: SimpleNamespace, inference_files: Path) -> None:
    answers = fuzz(server.url, inference_files, seed=0, count=int(os.environ.get("FUZZ_REQUESTS", "40")))
    assert set(answers) <= {200, 400, 403, 404, 413} and answers[200] and answers[400], answers
    assert server.server.process.poll() is None


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_page_plays_asks_and_shows_the_streamed_answer(
    server: SimpleNamespace, expected: list[Answer], inference_files: Path, chromium: Chromium
) -> None:
    with chromium.page(server.url) as browser:
        browser.wait("document.getElementById('model')?.textContent === 'gated'")
        browser.choose_file("#file", inference_files / "clip.mp4")
        browser.wait("document.getElementById('details').textContent.startsWith('0:04')")
        assert browser.value("player.src.startsWith('blob:')")
        for number, question in enumerate(QUESTIONS, 1):
            browser.value(f"question.value = {question!r}; form.requestSubmit(); null")
            browser.wait(f"document.querySelectorAll('#messages .foot').length === {number}")
        asked = browser.value("[...document.querySelectorAll('#messages .user')].map(item => item.textContent)")
        assert asked == [*QUESTIONS]
        texts = "import('./markdown.js').then(m => %s.map(text => { const d = document.createElement('div');"
        texts += " d.append(...m.render(text)); return d.textContent; }))"
        shown = browser.value("[...document.querySelectorAll('#messages .text')].map(item => item.textContent)")
        assert shown == browser.value(texts % json.dumps([reply.text for reply in expected]))
        marks = browser.value("[...document.querySelectorAll('#bars button')].map(mark => mark.title)")
        assert 1 <= len(marks) <= 5
        assert all(re.fullmatch(r"0:0\d(\.\d)? to 0:0\d(\.\d)?: \d+\.\d%", mark) for mark in marks)
        browser.wait("[...document.querySelectorAll('.moments img')].every(image => image.naturalWidth > 0)")
        assert browser.errors == []


def test_sigterm_ends_the_server_and_its_ranks(server: SimpleNamespace) -> None:
    ranks = psutil.Process(server.server.process.pid).children()
    assert len(ranks) == 1
    assert server.server.end(signal.SIGTERM) == 0, server.server.output
    psutil.wait_procs(ranks, timeout=30)
    assert not any(rank.is_running() for rank in ranks)
    assert server.server.output.endswith("stopped\n")


def test_second_sigterm_does_not_wait_for_a_frozen_rank(inference_files: Path, tmp_path: Path) -> None:
    started = Server(tmp_path, "--model", inference_files / "gated", "--num-processes", 2)
    try:
        started.url()
        (rank,) = psutil.Process(started.process.pid).children()
        rank.suspend()
        started.process.send_signal(signal.SIGTERM)
        while not started.output.endswith("stopped\n"):
            assert started.process.poll() is None, started.output
            time.sleep(0.05)
        assert started.end(signal.SIGTERM) == -signal.SIGTERM, started.output
    finally:
        started.process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()  # frozen, it does not notice that rank 0 has ended
