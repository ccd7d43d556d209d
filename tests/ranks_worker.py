"""What one worker of the pool does: read a case, join the case's group, run it, send back the result.

The process of the pool is in `ranks.py`; this module is all that a worker imports at its start.
"""

import faulthandler
import io
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Failure:
    """How a case ended on one rank when it did not return."""

    error: BaseException
    details: str

    @property
    def summary(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


class RemoteError(RuntimeError):
    """Stands in for an exception that cannot be pickled."""


def save(value: Any) -> bytes:
    """A value as bytes; functions and classes by name, tensors by their contents."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `save`."""
    return torch.load(io.BytesIO(data), weights_only=False)


def work(pipe: Connection, stacks: str) -> None:
    """Serves cases until the other end of the pipe closes."""
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.enable(file)  # a crash inside an operator, such as SIGFPE
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)  # the pool's question where we hang
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        pipe.send("ready")
        while True:
            try:
                path, join, payload = pipe.recv()
            except EOFError:
                break
            pipe.send_bytes(_outcome(path, join, payload))
    os._exit(0)  # no destructors: a group whose other members are gone may wait for them


def _leave_with_parent() -> None:
    """A test session that was killed must not leave workers in a collective."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _outcome(path: list[str], join: tuple[int, int, str] | None, payload: bytes) -> bytes:
    try:
        sys.path[:] = path  # test modules lie where pytest found them
        if join is not None:
            _join(*join)
        fn, args, kwargs = load(payload)
        random.seed(0)
        torch.manual_seed(0)
        result = _plain(fn(dist.get_rank(), dist.get_world_size(), *args, **kwargs))
        return save(result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a case are results too
        return _failure(error)
    finally:
        _forget()


def _failure(error: BaseException) -> bytes:
    details = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RemoteError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return save(Failure(error, details))


def _join(rank: int, world: int, rendezvous: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve is common in containers
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))


def _plain(value: Any) -> Any:
    """Results as the pool sends them: tensors detached and on the CPU, containers rebuilt."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _forget() -> None:
    """What a case leaves in process-wide state of others: accelerate shares one state between all Accelerators."""
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
