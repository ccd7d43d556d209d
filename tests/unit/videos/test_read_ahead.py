"""Layer: one process. Reading ahead keeps the order, holds the limit of bytes, and gives each fault to its item."""

import subprocess
import threading
from contextlib import closing
from typing import Any

import pytest

from launch import PYTHON
from mllm_seqpar.videos.prefetch import begin_ahead, read_ahead


def test_reading_ahead_keeps_the_order_and_raises_in_place() -> None:
    assert list(read_ahead([], str)) == []
    results = read_ahead([1, 2, 0, 3], lambda x: 2 / x)
    assert [next(results), next(results)] == [2.0, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize(("limit", "most"), [(0, 1), (5, 2), (6, 3), (100, 8)])
def test_what_is_made_ahead_fits_into_the_limit(limit: int, most: int) -> None:
    made: list[int] = []
    several = threading.Event()

    def make(item: int) -> int:
        made.append(item)
        if len(made) == most + 1:
            several.set()
        return item

    ahead = begin_ahead(range(9), make, 9, 3, open_item=lambda x: x, size=lambda _: 2, limit=limit)
    with closing(ahead):
        first = next(ahead).result()
        assert several.wait(10)
        assert first == 0 and len(made) == most + 1  # the first one was yielded, and does not count
        assert [future.result() for future in ahead] == [*range(1, 9)]


UNCAUGHT = """
from mllm_seqpar.videos.prefetch import begin_ahead

def train():
    for _ in (reading := begin_ahead(range(3), str, 3, 2, open_item=int, size=lambda _: 1, limit=1)):
        raise RuntimeError("out of memory")

train()
"""


@pytest.mark.slow
def test_a_program_with_an_error_that_nothing_catches_ends_while_items_wait_for_the_limit() -> None:
    ended = subprocess.run([*PYTHON, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.endswith("RuntimeError: out of memory\n")


class Panic(BaseException):
    """As an error inside the Rust code of `tokenizers`, which is no Exception."""


@pytest.mark.parametrize("step", ["open_item", "make", "size"])
def test_what_a_thread_raises_reaches_the_one_that_waits(step: str) -> None:
    def failing(item: Any) -> Any:
        if item == 0:
            raise Panic
        return 1

    steps: Any = {"open_item": int, "make": int, "size": lambda _: 1} | {step: failing}
    with closing(begin_ahead([0, 1], **steps)) as ahead:
        with pytest.raises(Panic):
            next(ahead).result()
        assert next(ahead).result() == 1


@pytest.mark.parametrize("pool", ["open", "make"])
def test_a_thread_that_cannot_start_costs_only_its_item(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    failures, start = [RuntimeError("can't start new thread")], threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith(pool) and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    made: list[int] = []
    with closing(begin_ahead(range(3), made.append, 3, open_item=int)) as ahead:
        with pytest.raises(RuntimeError, match="new thread"):
            next(ahead).result()
        assert [future.result() for future in ahead] == [None, None]
    assert made == [1, 2]
