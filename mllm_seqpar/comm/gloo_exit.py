"""An orderly exit of a process with gloo: its threads release their tensors before the interpreter shuts down.

A collective over gloo runs on a thread of its process group. The thread releases the tensors after it has
reported that the work is done. To release a tensor that Python has dropped by then, it needs the interpreter lock.
Before Python 3.14, a thread that waits for the lock while the interpreter shuts down is terminated, which in C++ code
aborts the process: "terminate called without an active exception", SIGABRT, after a successful run.

Destroying the process group joins these threads only if nothing else refers to the group, and a DeviceMesh, FSDP, DDP
and a patched model do. It also blocks while a collective waits for another rank. The exit handler here therefore does
not destroy the group. It waits, with the lock released, until the threads have released their tensors. It involves no
other rank, so it is safe after an error and in any order of the ranks. It ignores threads of other backends: with
"cpu:gloo,cuda:nccl" it waits for the gloo part only. It does not complete a collective that was never waited for.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from pathlib import Path

_THREAD_NAME = "pt_gloo_runloop"
_PAUSE = 0.01
_LIMIT = 5.0


@functools.cache
def release_gloo_at_exit() -> None:
    """Register `wait_for_gloo_threads` to run at interpreter exit, once per process.

    Exit handlers run in the reverse order of their registration.
    """
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads(limit: float = _LIMIT) -> None:
    """Wait until no gloo thread of this process needs the interpreter lock, at most `limit` seconds.

    The lock is free during each pause, so a thread that waits for it runs. A thread that sleeps before and after a
    pause and has not run in between has no tensor left to release.
    """
    if sys.version_info >= (3, 14):  # threads that request the lock too late sleep, and nothing aborts
        return
    end = time.monotonic() + limit
    before = _gloo_threads()
    while before and time.monotonic() < end:
        time.sleep(_PAUSE)
        now = _gloo_threads()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return the state and the context switch counts of each gloo thread, by thread id; empty without /proc."""
    threads = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != _THREAD_NAME:
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = fields.get("voluntary_ctxt_switches", "") + fields.get("nonvoluntary_ctxt_switches", "")
        threads[task.name] = (fields["State"].split()[0], switches)
    return threads
