"""The peak memory of a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def peak_memory(device: torch.device) -> Iterator[SimpleNamespace]:
    """Measure the most `bytes` allocated at one time in the block inside, above those before; set when the block ends.

    On CUDA it comes from the allocator's statistics. On a CPU it comes from the profiler's memory events, which include
    the temporary buffers of operators.
    """
    peak = SimpleNamespace(bytes=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield peak
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    allocated = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"):
        allocated += size
        peak.bytes = max(peak.bytes, allocated)
