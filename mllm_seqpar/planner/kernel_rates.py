"""The rates of all block kernels on this machine, which `mllm-seqpar calibrate` prints."""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.kernels import kernel_names

from .calibrate import AttentionShape, _block, _Clock

_log = get_logger(__name__)


def kernel_rates(comm: Communicator, *, device: torch.device | str, shape: AttentionShape) -> dict[str, float]:
    """Return the FLOP/s of each kernel in forward plus backward, at the slowest rank, the fastest kernel first.

    Collective. Kernels that some rank cannot run are left out.
    """
    clock = _Clock(comm, torch.device(device))
    rows, keys = (1024, 8192) if clock.device.type == "cuda" else (64, 256)
    flops = 14 * rows * keys * shape.heads * shape.dim
    rates = {}
    for name in kernel_names():
        problem = None
        try:
            forward, backward = _block(clock, replace(shape, kernel=name), rows, keys)
            backward()
            clock.synchronize()
        except Exception as error:  # whatever a package raises: the other ranks wait for this one
            problem = str(error)
            _log.debug("%s is not timed: %s", name, error)
        if all(row[0] for row in comm.gather_ints([int(problem is None)])):
            rates[name] = flops / (clock.seconds(forward) + clock.seconds(backward))
    return dict(sorted(rates.items(), key=lambda item: -item[1]))
