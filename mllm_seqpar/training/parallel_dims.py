"""The accelerator of a fine-tuning process, and its ranks as data parallel x sequence parallel groups."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar.cli.launch import collective_timeout, require_rendezvous, use_cuda
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.fsdp2 import enable_fsdp2_on_cpu, launched_with_fsdp2


def start_accelerator(device: str = "auto", timeout: float | None = None):
    """Return the accelerator of this process: process group, device, and precision of the launch config.

    Args:
        device: cpu, cuda, or auto; see `mllm_seqpar.cli.launch.use_cuda`.
        timeout: seconds until a collective fails because a rank did not join; see `collective_timeout`.

    Raises:
        ConfigError: if there are too few GPUs for cuda or several processes without FSDP2, or if the accelerate config
            sets fp16 or gradient accumulation.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    cpu = not use_cuda(device)
    limit = collective_timeout(timeout, not cpu)
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)])
    require_rendezvous()
    if dist.is_initialized():
        if not launched_with_fsdp2():
            raise ConfigError(
                "several processes need an accelerate config with distributed_type: FSDP and fsdp_version: 2, such as "
                f"configs/fsdp2_cpu_2.yaml; found {accelerator.distributed_type}"
            )
        if cpu:
            enable_fsdp2_on_cpu(accelerator)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(f"mixed_precision: {accelerator.mixed_precision!r} is not supported; use 'no' or bf16")
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            "gradient_accumulation_steps of the accelerate config must be 1: the script accumulates gradients itself, "
            "so that the loss is a mean over tokens; use --global-batch and --micro-batch"
        )
    return accelerator


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
    """Return the grid of all ranks with `sp` ranks per sample (None: all ranks).

    Raises:
        ConfigError: if the number of processes is not a multiple of `sp`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    degree = world if sp is None else sp
    if world % degree:
        raise ConfigError(f"--sp {degree} does not divide the {world} processes; use a divisor of {world}")
    if not dist.is_initialized():
        return ParallelDims(None, 1, 1, 0)
    mesh = init_device_mesh(device_type, (world // degree, degree), mesh_dim_names=("dp", "sp"))
    return ParallelDims(mesh, world // degree, degree, dist.get_rank())
