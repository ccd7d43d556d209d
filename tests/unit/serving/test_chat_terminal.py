"""Layer: one process. The chat's terminal, with lines and answers that the test makes."""

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_seqpar.inference.encoding import Interrupted
from mllm_seqpar.inference.engine import Job
from mllm_seqpar.serving.chat import Terminal
from mllm_seqpar.serving.jobs import Impossible


def test_ctrl_c_drops_a_line_or_stops_an_answer_and_never_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where SIGINT was ignored at the start, and between a line and its answer."""

    def line_and_interrupt(text: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return text

    lines: list[Callable[[], str]] = [lambda: line_and_interrupt("dropped"), lambda: "What is it?"]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0)() if lines else _raise(EOFError()))
    stops = []

    def answer(job: Job, *, interrupted: Callable[[], bool], **_: Any) -> Any:
        assert job.messages[-1]["content"][-1]["text"] == "What is it?" and not interrupted()
        for _again in range(2):
            signal.raise_signal(signal.SIGINT)
        stops.append(interrupted())
        raise Impossible(Interrupted())

    sampling = SimpleNamespace(max_new_tokens=3)
    args = SimpleNamespace(model="tiny", system=None, seed=0, sampling=lambda seed: sampling)
    worker = SimpleNamespace(run=answer, engine=SimpleNamespace(comm=SimpleNamespace(size=1)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Terminal(args, worker, None).talk()  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert stops == [True] and not lines
    printed = capsys.readouterr().err
    assert "/exit or Ctrl-D ends the chat" in printed and printed.endswith("\nstopped\n")


def _raise(error: BaseException) -> Any:
    raise error
