"""From what `accelerate launch` exported to an accelerator, a layout of ranks and a sharded model."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mllm_seqpar.cli.devices import on_cuda, require_rendezvous, time_limit
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import layer_classes

from .cpu import enable_fsdp2_on_cpu, require_sharded


def start_accelerator(device: str = "auto", timeout: float | None = None):
    """The accelerator of this process: process group with a time limit, device, precision of the launch config.

    Args:
        device: see `mllm_seqpar.cli.devices.on_cuda`.
        timeout: seconds after which a collective that another rank has not joined fails; None for the default of
            `mllm_seqpar.cli.devices.time_limit`.

    Raises:
        ConfigError: too few GPUs for cuda, several processes without FSDP2, fp16, or accumulation set in accelerate's
            config.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    cpu = not on_cuda(device)
    limit = time_limit(timeout, not cpu)
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)])
    require_rendezvous()
    if dist.is_initialized():
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true" or os.environ.get("FSDP_VERSION") != "2":
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
            "gradient_accumulation_steps of the accelerate config must be 1; the script accumulates by itself, so that "
            "the loss is a mean over tokens: use --global-batch and --micro-batch"
        )
    return accelerator


@dataclass(frozen=True)
class Layout:
    """Ranks as a grid of `dp` data parallel groups of `sp` ranks each; consecutive ranks share samples.

    Attributes:
        mesh: the grid with axes "dp" and "sp"; None when no process group is initialised.
        dp: number of data parallel groups.
        sp: ranks in each, the sequence parallel degree.
        rank: of this process in the world.
    """

    mesh: DeviceMesh | None
    dp: int
    sp: int
    rank: int

    @property
    def group_index(self) -> int:
        """Which data parallel group this rank belongs to."""
        return self.rank // self.sp

    @property
    def sp_group(self):
        """The process group of the ranks that share this rank's samples; None for the group of one."""
        return None if self.mesh is None else self.mesh.get_group("sp")

    def sum_over_dp(self, values: list[float], device: torch.device) -> list[float]:
        """Each number summed over the data parallel groups, in float64; the same result on every rank."""
        if self.mesh is None or self.dp == 1:
            return values
        # MPS and some accelerators have no float64; CPU and CUDA, which this project supports, do.
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.mesh.get_group("dp"))
        return total.tolist()


def make_layout(sp: int | None, device_type: str) -> Layout:
    """The grid of all ranks with `sp` ranks to a sample (None: all of them).

    Raises:
        ConfigError: the number of processes is not a multiple of `sp`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    degree = world if sp is None else sp
    if world % degree:
        raise ConfigError(f"--sp {degree} does not divide the {world} processes; use a divisor of {world}")
    if not dist.is_initialized():
        return Layout(None, 1, 1, 0)
    mesh = init_device_mesh(device_type, (world // degree, degree), mesh_dim_names=("dp", "sp"))
    return Layout(mesh, world // degree, degree, dist.get_rank())


def shard_model(accelerator, model: nn.Module, optimizer: torch.optim.Optimizer):
    """(model, optimizer) with every parameter sharded over all ranks by FSDP2; plain ones in a single process.

    The optimizer that comes back is torch's own, on the sharded parameters.

    Raises:
        ConfigError: parameters came back whole.
    """
    set_fsdp_units(accelerator, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if dist.is_initialized():
        require_sharded(model)
    return model, getattr(optimizer, "optimizer", optimizer)


def set_fsdp_units(accelerator, model: nn.Module) -> None:
    """Tells accelerate, when it shards by FSDP2, which layers are units and how their gradients are reduced."""
    if accelerator.mixed_precision == "bf16" and accelerator.is_fsdp2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate would also reduce gradients in bf16, which loses bits that grow with the number of ranks.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap is None:
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = layer_classes(model)


def reshard(model: nn.Module) -> None:
    """Gives back parameters that a forward pass without backward left gathered; `model.parameters()` are shards again.

    FSDP2 keeps the outermost parameters (embeddings, final norm, head) gathered after forward, because backward would
    need them at once. After an evaluation nothing frees them, and a checkpoint would meet whole parameters.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
