"""Read-ahead: the next micro-batch is decoded in a thread while the current one is computed."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(items: Iterable[Item], make: Callable[[Item], Result]) -> Generator[Result, None, None]:
    """Yield ``make(item)`` for each item in order; the next call runs in another thread meanwhile.

    At most two results exist at a time. One thread makes all calls, so their order is the same in every run. An
    exception in `make` is raised where its result would have been yielded.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        waiting = None
        for item in items:
            ready, waiting = waiting, pool.submit(make, item)
            if ready is not None:
                yield ready.result()
        if waiting is not None:
            yield waiting.result()
