"""Reading ahead: the next micro-batch's frames are decoded while the current one is computed."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def read_ahead(items: Iterable[Item], make: Callable[[Item], Made]) -> Generator[Made, None, None]:
    """Yields ``make(item)`` in order; each is begun in another thread while the caller works on the one before.

    One item ahead and one thread: at most two items exist at a time, and what `make` does happens in the same order on
    every run. An exception in `make` is raised where its result would have been yielded.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        waiting = None
        for item in items:
            ready, waiting = waiting, pool.submit(make, item)
            if ready is not None:
                yield ready.result()
        if waiting is not None:
            yield waiting.result()
