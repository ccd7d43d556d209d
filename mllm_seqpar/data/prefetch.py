"""Read-ahead: threads compute the next results while the current one is used."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReadAheadLimit:
    """Admits results in the order of their numbers, while the existing ones stay within a limit of bytes.

    One result is always admitted, whatever its size, so that the next result is always computed.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._next, self._closed = limit, 0, False
        self._admitted: dict[int, int] = {}
        self._changed = threading.Condition()

    def admit(self, number: int, size: int) -> None:
        """Wait until result `number`, of `size` bytes, may be computed; raise CancelledError after `close`."""

        def may_begin() -> bool:
            fits = not self._admitted or sum(self._admitted.values()) + size <= self._limit
            return self._closed or (number == self._next and fits)

        with self._changed:
            self._changed.wait_for(may_begin)
            if self._closed:
                raise CancelledError
            self._admitted[number], self._next = size, number + 1
            self._changed.notify_all()

    def release(self, number: int) -> None:
        """Stop counting result `number`."""
        with self._changed:
            del self._admitted[number]
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all waiting calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


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
