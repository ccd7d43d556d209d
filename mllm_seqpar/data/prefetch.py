"""Read-ahead: the next micro-batches are decoded in a thread while the current one is computed."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(items: Iterable[Item], make: Callable[[Item], Result], depth: int = 1) -> Generator[Result, None, None]:
    """Yield ``make(item)`` for each item in order; the next `depth` calls run in another thread meanwhile.

    At most ``depth + 1`` results exist at a time. One thread makes all calls, so their order is the same in every run.
    An exception in `make` is raised where its result would have been yielded.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
