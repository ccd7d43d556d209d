"""A worker of the pool in `ranks.py`: read a case, join its group, run it, and send back the result.

This module is all that a worker imports at its start.
"""

import faulthandler
import functools
import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import entry_points
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist


class Failure(NamedTuple):
    """The outcome of a case that did not return on one rank."""

    error: BaseException
    details: str


class RemoteError(RuntimeError):
    """Replaces an exception that cannot be pickled."""


def save(value: Any) -> bytes:
    """Serialize a value: functions and classes by name, tensors by their contents, without shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def work(pipe: Connection, stacks: str) -> None:
    """Run cases until the other end of the pipe closes."""
    torch.set_num_threads(1)
    gc.freeze()  # the modules that the fork server has imported stay
    gc.enable()
    imported = len(sys.modules)
    with open(stacks, "w") as file, packages_read_once():
        faulthandler.enable(file)  # for a crash inside an operator, such as SIGFPE
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # frames of threads without Python, such as gloo
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)  # the pool sends it to a hung worker
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        pipe.send("ready")
        while True:
            try:
                path, env, join, payload = pipe.recv()
            except EOFError:
                break
            if len(sys.modules) > imported:  # and so do those that the cases have imported
                imported = len(sys.modules)
                gc.collect()
                gc.freeze()
            pipe.send_bytes(_outcome(path, env, join, payload))
    os._exit(0)  # without destructors, because a process group may wait for members that are gone


def _exit_with_parent() -> None:
    """Exit when the test session is killed, even inside a collective."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _outcome(path: list[str], env: dict[str, str], join: tuple[int, int, str] | None, payload: bytes) -> bytes:
    try:
        sys.path[:] = path  # for test modules in the folders that pytest found
        if join is not None:
            _join(*join)
        with mock.patch.dict(os.environ, env):  # it also restores what the case itself sets
            fn, args, kwargs = load(payload)
            random.seed(0)
            torch.manual_seed(0)
            return save(_detached(fn(dist.get_rank(), dist.get_world_size(), *args, **kwargs)))
    except BaseException as raised:  # SystemExit and KeyboardInterrupt are outcomes too
        error = raised
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RemoteError(f"{type(error).__name__}: {error}")
        details = "".join(traceback.format_exception(raised))
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return save(Failure(error, details))
    finally:
        reset_global_state()


def _join(rank: int, world: int, rendezvous: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # in containers the host name often does not resolve
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    return value


@contextmanager
def packages_read_once() -> Iterator[None]:
    """Read the metadata of all packages on `sys.path` once; `patch_model` looks for entry points in them each time."""
    read = functools.cache(lambda path, group: entry_points(group=group))
    with mock.patch("mllm_seqpar.patching.registry.entry_points", lambda group: read(tuple(sys.path), group)):
        yield


def reset_global_state() -> None:
    """Reset the process-wide state that a case may change; all Accelerators share one state."""
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
