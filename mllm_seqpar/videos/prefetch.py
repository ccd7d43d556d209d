"""Read-ahead: threads compute the next results while the current one is used."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any, TypeVar

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
    with closing(begin_ahead(items, make, depth, workers)) as futures:
        yield from map(Future.result, futures)


def begin_ahead(
    items: Iterable[Item],
    make: Callable[[Any], Result],
    depth: int = 1,
    workers: int = 1,
    *,
    open_item: Callable[[Item], Any] | None = None,
    size: Callable[[Any], int] = lambda _: 0,
    limit: int = 0,
) -> Generator[Future[Result], None, None]:
    """Yield the ended future of each item, as `read_ahead` yields results; it has whatever `make` raised.

    Args:
        open_item: opens the items, one after the other in a thread of its own; `make` then takes what it returns.
        size: the bytes of the result of an open item. They count from when `make` is submitted until the future is
            yielded.
        limit: of these bytes. Results without which none would count may exceed it. No thread waits for memory: what
            does not fit is begun by the thread that frees bytes, so that a program can end without closing this.
    """
    opening, making = ThreadPoolExecutor(1, "open"), ThreadPoolExecutor(workers, "make")
    begun = deque[Future[Result]]()
    opened = deque[tuple[Future[Result], Any, int]]()  # what waits for memory, with its bytes
    counted: dict[Future[Result], int] = {}
    lock = threading.RLock()  # `make_what_fits` holds it while it calls `submit`, which takes it again

    def submit(pool: ThreadPoolExecutor, step: Callable[..., None], future: Future[Result], item: Any) -> None:
        def run() -> None:
            with lock:  # a pool that cannot start a thread has queued the step all the same
                if future.done():
                    return
            try:
                step(future, item)
            except BaseException as error:  # noqa: BLE001 - also those of Rust code; the caller takes it
                future.set_exception(error)

        with lock:
            try:
                pool.submit(run)
            except RuntimeError as error:  # the system allows no further thread, or the caller has stopped
                future.set_exception(error)

    def open_step(future: Future[Result], item: Any) -> None:
        value = open_item(item)  # type: ignore[misc]
        entry = future, value, size(value)
        with lock:
            opened.append(entry)
        make_what_fits()

    def make_step(future: Future[Result], value: Any) -> None:
        future.set_result(make(value))

    def make_what_fits() -> None:
        with lock:
            while opened:
                future, value, added = opened[0]
                held = sum(counted.values())
                if held and held + added > limit:
                    return
                opened.popleft()
                counted[future] = added
                submit(making, make_step, future, value)

    def begin(item: Item) -> Future[Result]:
        if open_item is None:
            return making.submit(make, item)
        future = Future[Result]()
        submit(opening, open_step, future, item)
        return future

    def next_ended() -> Future[Result]:
        future = begun.popleft()
        wait([future])
        with lock:
            counted.pop(future, None)
        make_what_fits()
        return future

    try:
        for item in items:
            begun.append(begin(item))
            if len(begun) > depth:
                yield next_ended()
        while begun:
            yield next_ended()
    finally:
        for pool in (making, opening):
            pool.shutdown(cancel_futures=True)
