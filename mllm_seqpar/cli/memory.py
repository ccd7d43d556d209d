"""Peak memory of this process, whatever it runs on."""

import resource
import sys

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Begins a new peak on a GPU; the CPU's peak is that of the whole process and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """MiB at the peak: allocated on a GPU since the last reset, resident on a CPU since the process began."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)
