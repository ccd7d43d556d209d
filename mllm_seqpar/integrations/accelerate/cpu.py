"""FSDP2 on CPU through accelerate: the one place that reaches into accelerate's state.

accelerate enables FSDP for GPU-like devices only. On CPU the same config silently gives DDP: training works, every
parameter is whole on every rank, and nothing that a CPU test says about FSDP is true. So this module puts what
accelerate would have decided on a GPU into its state, and `require_sharded` looks at the result, so that a release of
accelerate that changes these names ends in an error and not in an unsharded model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mllm_seqpar._compat import FSDP_ON_CPU, PARALLELISM_ON_CPU
from mllm_seqpar.errors import ConfigError


def enable_fsdp2_on_cpu(accelerator) -> None:
    """Makes `accelerator` (on CPU, over gloo, launched with an FSDP2 config) shard by FSDP2 in `prepare`.

    Must run before `prepare`. Does nothing once accelerate does it by itself.
    """
    if not FSDP_ON_CPU.applies():
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if accelerator.distributed_type == DistributedType.FSDP:
        return
    # Both: `Accelerator` reads the first through AcceleratorState, and what is set on it alone is reverted from
    # PartialState, whose attributes all instances share.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    # Without arguments the plugin reads the variables that `accelerate launch` made of the config file.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if not accelerator.is_fsdp2:
        raise _changed("the accelerator does not report FSDP2 after its state was set")


@contextmanager
def without_launched_parallelism(cpu: bool) -> Iterator[None]:
    """While an `Accelerator` is made on CPU: it would read parallelism from the launch config, and refuse it."""
    name, hidden = "ACCELERATE_USE_PARALLELISM_CONFIG", None
    if cpu and PARALLELISM_ON_CPU.applies():
        hidden = os.environ.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[name] = hidden


def set_parallelism_on_cpu(accelerator, parallelism) -> None:
    """Gives an `Accelerator` on CPU the device mesh that a `ParallelismConfig` describes, over gloo."""
    accelerator.state.parallelism_config = parallelism
    accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
    if accelerator.parallelism_config is not parallelism or accelerator.torch_device_mesh is None:
        raise _changed("the accelerator does not report the parallelism after its state was set")


def require_sharded(model: nn.Module) -> None:
    """Raises unless every parameter is a DTensor of which this rank holds a shard.

    Raises:
        ConfigError: some are not: accelerate changed, or the config did not ask for FSDP2.
    """
    from torch.distributed.tensor import DTensor, Shard

    whole = [
        name
        for name, parameter in model.named_parameters()
        if not (isinstance(parameter, DTensor) and any(isinstance(place, Shard) for place in parameter.placements))
    ]
    if whole:
        raise _changed(f"{len(whole)} parameters are not sharded after prepare, among them {', '.join(whole[:3])}")


def _changed(found: str) -> ConfigError:
    from importlib.metadata import version

    return ConfigError(
        f"FSDP2 through accelerate {version('accelerate')} and torch {torch.__version__}: {found}. "
        "integrations/accelerate/cpu.py was written for accelerate 1.15; install that version, or launch with "
        "one process"
    )
