"""The number of processes that a launcher started, which is known before any process group exists."""

from __future__ import annotations

import os

_SIZE_AND_RANK = (
    ("WORLD_SIZE", "RANK"),  # torchrun, accelerate, DeepSpeed: first, because they may run inside one of the others
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    # srun. SLURM_NTASKS does not count: sbatch and salloc set it where a script runs once.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launched_processes() -> tuple[int, str]:
    """Return the number of processes that the innermost launcher started, and the variable that says so.

    Without a launcher the number is 1 and the name is empty.
    """
    for size, rank in _SIZE_AND_RANK:
        if rank in os.environ and os.environ.get(size, "").isdigit():
            return int(os.environ[size]), size
    return 1, ""
