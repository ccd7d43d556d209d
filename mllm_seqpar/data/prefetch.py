"""Read-ahead: the next results are made in threads while the current one is used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    items: Iterable[Item], make: Callable[[Item], Result], depth: int = 1, workers: int = 1
) -> Generator[Result, None, None]:
    """Yield ``make(item)`` for each item in order; the next `depth` calls run in `workers` other threads meanwhile.

    At most ``depth + 1`` results exist at a time. Calls begin in the order of the items; with one worker, each begins
    after the one before it has ended. An exception in `make` is raised where its result would have been yielded; calls
    that have not begun by then, or when the caller stops, are not made.
    """
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="read-ahead") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
