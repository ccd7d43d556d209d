"""The end of a process whose gloo threads may still hold tensors.

A collective over gloo runs on a thread of its process group. That thread releases the tensors after it has reported
the end of the work, and for a tensor that Python has dropped by then it needs the interpreter's lock. Before Python
3.14 a thread that waits for this lock while the interpreter shuts down is ended, and in C++ code that aborts the
process: "terminate called without an active exception", SIGABRT, after a run that went well.

Destroying the process group joins these threads only if nothing else refers to the group, and a DeviceMesh, FSDP, DDP
and a patched model do. It also blocks while a collective waits for another rank. So nothing is destroyed here: the end
of the process waits, with the lock released, until the threads have let go of their tensors. This involves no other
rank, so it is safe in a process that ends because of an error, and in any order of the ranks. Threads of other
backends are not looked at: in a group of "cpu:gloo,cuda:nccl" the gloo part is waited for, the NCCL part left alone.
A collective that was started and never waited for is not completed.
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

    Handlers that were registered earlier run after it, handlers that are registered later run before it.
    """
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads(limit: float = _LIMIT) -> None:
    """Wait until no gloo thread of this process needs the interpreter's lock, at most `limit` seconds.

    The lock is free during each pause, so a thread that needs it runs and is scheduled again. A thread that sleeps
    before and after a pause without having run in between holds nothing that it could release.
    """
    if sys.version_info >= (3, 14):  # threads that ask for the lock too late sleep, and nothing aborts
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
    """Return the state and the counts of context switches of each gloo thread; empty where there is no /proc."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() != _THREAD_NAME:
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = fields.get("voluntary_ctxt_switches", "") + fields.get("nonvoluntary_ctxt_switches", "")
        found[task.name] = (fields["State"].split()[0], switches)
    return found
