"""Where the time of a training step goes: a clock that knows at any moment what is being computed, also in backward.

Parts of a step are calls of modules. A call is timed in forward where it is made, and in backward between two marks:
identities around it in autograd's graph, of which the one behind it is reached first and the one before it last, since
autograd runs what was computed later first. A part within another stops the outer one's clock.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.base import Pending

REST = "rest"


class Clock:
    """Seconds by part, `seconds[part]`; what no part claims is `REST`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a step."""
        self.seconds.clear()
        self._stack = [REST]
        self._since = self._now()
        yield
        self._charge()
        self._stack = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is that part's."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def enter(self, name: str) -> None:
        """A part begins."""
        if self._stack:
            self._charge()
            self._stack.append(name)

    def leave(self, name: str) -> None:
        """It ends."""
        if self._stack:
            self._charge()
            found = self._stack.pop()
            assert found == name, f"{name} ends within {found}"

    def last(self, name: str) -> None:
        """A part begins that lasts until the end of the backward pass: nothing comes after it."""
        if self._stack:
            self._charge()
            self._stack[0] = name

    def backward_done(self) -> None:
        """Ends what `last` began."""
        self._charge()
        self._stack[0] = REST

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` as part `name`: its first argument and its first result are marked for backward."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._stack:
                return call(*args, **kwargs)
            args, kwargs, marked = _with_first(args, kwargs, lambda x: _Mark.apply(x, lambda: self.leave(name)))
            with self.part(name):
                out = call(*args, **kwargs)
            begins = functools.partial(self.enter if marked else self.last, name)
            return _with_result(out, lambda x: _Mark.apply(x, begins))

        return run

    def _charge(self) -> None:
        now = self._now()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Mark(torch.autograd.Function):
    """The identity, which says when backward passes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return grad, None


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], mark: Callable[[Tensor], Tensor]) -> Any:
    """The first argument, by place or by name, marked where it wants a gradient; and whether it does."""
    if args:
        wants = _wants_gradient(args[0])
        return ((mark(args[0]), *args[1:]) if wants else args), kwargs, wants
    name = next((name for name in kwargs), None)
    if name is None or not _wants_gradient(kwargs[name]):
        return args, kwargs, False
    return args, kwargs | {name: mark(kwargs[name])}, True


def _with_result(out: Any, mark: Callable[[Tensor], Tensor]) -> Any:
    """The tensor, the first of a tuple, or the last hidden state, marked where it wants a gradient."""
    if isinstance(out, Tensor):
        return mark(out) if _wants_gradient(out) else out
    if hasattr(out, "last_hidden_state"):
        out.last_hidden_state = _with_result(out.last_hidden_state, mark)
        return out
    return (_with_result(out[0], mark), *out[1:])


@contextmanager
def timed_calls(clock: Clock, calls: list[tuple[Any, str, str]]) -> Iterator[None]:
    """(owner, name of a method, part): each call of that method of that object, or class, is timed, inside."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in calls]
    for owner, name, part in calls:
        object.__setattr__(owner, name, clock.timed(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own in reversed(before):
            if own is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, own)


@contextmanager
def timed_transfers(clock: Clock, comm: Communicator, part: str) -> Iterator[None]:
    """Posting transfers, and waiting for them: what computation does not hide."""

    def exchange(*args: Any, **kwargs: Any) -> Pending:
        with clock.part(part):
            return _TimedPending(clock, part, type(comm).exchange(comm, *args, **kwargs))

    def collective(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with clock.part(part):
                return getattr(type(comm), name)(comm, *args, **kwargs)

        return run

    replaced: dict[str, Any] = {name: collective(name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    vars(comm).update(replaced | {"exchange": exchange})
    try:
        yield
    finally:
        for name in (*replaced, "exchange"):
            del vars(comm)[name]


class _TimedPending(Pending):
    def __init__(self, clock: Clock, part: str, pending: Pending) -> None:
        self._clock, self._part, self._pending = clock, part, pending

    def wait(self) -> None:
        with self._clock.part(self._part):
            self._pending.wait()
