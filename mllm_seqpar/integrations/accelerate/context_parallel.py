"""The `cp` axis of accelerate's device mesh as the sequence-parallel group, its own context parallelism kept out.

accelerate's mesh is what is worth having: dimensions in the order dp_replicate, dp_shard, cp, sp, tp; the ranks of one
`cp` line get the same batches; FSDP2 shards over dp_shard and cp together. Its context parallelism is not: `prepare`
puts hooks on every `*self_attn` that drop attention masks, and a step then runs inside a context manager that cuts the
inputs and replaces torch's attention, for text-only models. Both begin in `Accelerator._prepare_cp`; this module is the
one place that knows.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mllm_seqpar._compat import CP_HOOKS
from mllm_seqpar.errors import ConfigError


def sequence_parallel_mesh(accelerator: Any) -> DeviceMesh | None:
    """The one-dimensional mesh to pass to `patch_model` as `group`; turns accelerate's own context parallelism off.

    Call it before `accelerator.prepare`:

        accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=4, dp_shard_size=2))
        patch_model(model, group=sequence_parallel_mesh(accelerator))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Args:
        accelerator: made with a `ParallelismConfig` whose `cp_size` is the sequence-parallel degree, or launched with
            the config keys `parallelism_config_cp_size` and so on.

    Returns:
        The `cp` axis, or None in a single process: a group of one.

    Raises:
        ConfigError: several processes and no `cp` axis, or an accelerate that has changed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    axes = () if accelerator.torch_device_mesh is None else accelerator.torch_device_mesh.mesh_dim_names or ()
    if "cp" not in axes:
        raise ConfigError(
            f"accelerate's device mesh has the axes {tuple(axes)} and no cp: pass "
            "Accelerator(parallelism_config=ParallelismConfig(cp_size=..., dp_shard_size=...)), or set "
            "parallelism_config_cp_size in the launch config; cp_size is the number of ranks that share a sample"
        )
    keep_out_context_parallelism(accelerator)
    return accelerator.torch_device_mesh["cp"]


def keep_out_context_parallelism(accelerator: Any) -> None:
    """Makes `accelerator.prepare` leave the model's attention and masks alone, whatever `cp_size` says."""
    if not CP_HOOKS.applies():
        return
    if not hasattr(accelerator, "_prepare_cp"):
        raise ConfigError(
            "this version of accelerate has no Accelerator._prepare_cp, where its own context parallelism would be "
            "kept out; mllm_seqpar/integrations/accelerate/context_parallel.py was written for accelerate 1.15"
        )
    accelerator._prepare_cp = _prepare_nothing


def _prepare_nothing(*objects: Any) -> Any:
    return objects
