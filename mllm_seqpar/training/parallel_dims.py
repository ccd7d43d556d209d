"""The accelerator of a fine-tuning process, and its ranks as data parallel x sequence parallel groups."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar._compat import PARALLELISM_ON_CPU
from mllm_seqpar.cli.launch import collective_timeout, require_rendezvous, use_cuda
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import check_collectively
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.context_parallel import disable_context_parallelism
from mllm_seqpar.integrations.accelerate.fsdp2 import (
    enable_fsdp2_on_cpu,
    launched_with_fsdp2,
    set_parallelism_on_cpu,
    without_launched_parallelism,
)

_LAUNCH_SETTINGS = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
"""The variables by which `accelerate launch` passes its configuration to the ranks begin with these."""


def start_accelerator(device: str = "auto", timeout: float | None = None):
    """Return the accelerator of this process: process group, device, precision and mesh of the launch config.

    Args:
        device: cpu, cuda, or auto; see `mllm_seqpar.cli.launch.use_cuda`.
        timeout: seconds until a collective fails because a rank did not join; see `collective_timeout`.

    Raises:
        AgreementError: if the nodes were launched with different configurations.
        ConfigError: if there are too few GPUs for cuda or several processes without FSDP2, or if the accelerate config
            sets fp16, gradient accumulation, or a parallelism that FSDP2 and sequence parallelism cannot use.
    """
    from accelerate import Accelerator, PartialState

    cpu = not use_cuda(device)
    # `Accelerator` creates the groups of its mesh, so the process group and the agreement on its axes come first.
    PartialState(cpu=cpu, timeout=collective_timeout(timeout, not cpu))
    require_rendezvous()
    settings = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCH_SETTINGS)}
    check_collectively(as_communicator(), "launch configuration", lambda: settings, lambda found: found)
    parallelism = launched_parallelism(dist.get_world_size() if dist.is_initialized() else 1)
    with without_launched_parallelism(cpu):
        accelerator = Accelerator(cpu=cpu)
    if dist.is_initialized():
        if not launched_with_fsdp2():
            raise ConfigError(
                "several processes need an accelerate config with distributed_type: FSDP and fsdp_version: 2, such as "
                f"configs/fsdp2_cpu_2.yaml; found {accelerator.distributed_type}"
            )
        if cpu:
            enable_fsdp2_on_cpu(accelerator)
            if parallelism is not None and PARALLELISM_ON_CPU.applies():
                set_parallelism_on_cpu(accelerator, parallelism)
    disable_context_parallelism(accelerator)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(f"mixed_precision: {accelerator.mixed_precision!r} is not supported; use 'no' or bf16")
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            "gradient_accumulation_steps of the accelerate config must be 1: the script accumulates gradients itself, "
            "so that the loss is a mean over tokens; use --global-batch and --micro-batch"
        )
    return accelerator


def launched_parallelism(world: int):
    """Return accelerate's `ParallelismConfig` of the launch config, or None if it has none of more than one rank.

    Raises:
        ConfigError: if its sizes do not multiply to the `world` processes, or FSDP2 would have nothing to shard over.
    """
    from accelerate.parallelism_config import ParallelismConfig

    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return None
    try:
        found = ParallelismConfig()
    except ValueError as error:
        raise ConfigError(f"parallelism_config of the accelerate config: {error}") from error
    if found.total_size == 1:
        return None
    shards = found.dp_shard_size * found.cp_size
    if found.dp_replicate_size * shards != world or found.total_size != world or shards == 1:
        raise ConfigError(
            f"parallelism_config of the accelerate config has dp_replicate_size {found.dp_replicate_size}, "
            f"dp_shard_size {found.dp_shard_size}, cp_size {found.cp_size}, tp_size {found.tp_size}, sp_size "
            f"{found.sp_size}; the first three must multiply to the {world} processes, dp_shard_size x cp_size must be "
            "more than 1, and the others must be 1"
        )
    return found


@dataclass(frozen=True)
class ParallelDims:
    """A grid of `dp` data parallel groups of `sp` consecutive ranks each; the ranks of a group share samples.

    Attributes:
        mesh: the grid with axes "dp" and "sp"; None if no process group is initialised.
        dp: number of data parallel groups.
        sp: ranks per group, the sequence parallel degree.
        rank: of this process in the world.
    """

    mesh: DeviceMesh | None
    dp: int
    sp: int
    rank: int

    @property
    def group_index(self) -> int:
        """The data parallel group of this rank."""
        return self.rank // self.sp

    @property
    def sp_group(self):
        """The process group of the ranks that share this rank's samples; None for a group of one."""
        return None if self.mesh is None else self.mesh.get_group("sp")

    def sum_over_dp(self, values: list[float], device: torch.device) -> list[float]:
        """Sum each number over the data parallel groups in float64; every rank gets the same result."""
        if self.mesh is None or self.dp == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.mesh.get_group("dp"))
        return total.tolist()


def make_parallel_dims(sp: int | None, device_type: str) -> ParallelDims:
    """Return the grid of all ranks with `sp` ranks per sample.

    Args:
        sp: None means cp_size of the launch config's parallelism, if that is more than 1, and otherwise all ranks.
        device_type: of the mesh.

    Raises:
        ConfigError: if the number of processes is not a multiple of `sp`, or cp_size is another number.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallelism = launched_parallelism(world)
    cp_size = 1 if parallelism is None else parallelism.cp_size
    if cp_size > 1 and sp not in (None, cp_size):
        raise ConfigError(
            f"--sp {sp}, but parallelism_config_cp_size of the accelerate config is {cp_size}; leave one of them out"
        )
    degree = sp or (cp_size if cp_size > 1 else world)
    if world % degree:
        raise ConfigError(f"--sp {degree} does not divide the {world} processes; use a divisor of {world}")
    if not dist.is_initialized():
        return ParallelDims(None, 1, 1, 0)
    mesh = init_device_mesh(device_type, (world // degree, degree), mesh_dim_names=("dp", "sp"))
    return ParallelDims(mesh, world // degree, degree, dist.get_rank())
