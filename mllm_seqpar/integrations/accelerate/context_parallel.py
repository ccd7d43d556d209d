"""The `cp` axis of accelerate's device mesh as the sequence-parallel group, without accelerate's context parallelism.

accelerate's mesh has the dimensions dp_replicate, dp_shard, cp, sp and tp. The ranks along `cp` receive the same
batches, and FSDP2 shards over dp_shard and cp together. accelerate's own context parallelism cannot be used: `prepare`
registers hooks on every `*self_attn` that drop attention masks, and each step then runs inside a context manager that
shards the inputs and replaces torch's attention, for text-only models (`_compat.CP_HOOKS`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mllm_seqpar._compat import CP_HOOKS, FLATTENED_MESH, keep_attention
from mllm_seqpar.errors import ConfigError


def sequence_parallel_mesh(accelerator: Any) -> DeviceMesh | None:
    """Return the one-dimensional mesh to pass to `patch_model` as `group`; disable accelerate's context parallelism.

    Call it before `accelerator.prepare`:

        accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=4, dp_shard_size=2))
        patch_model(model, group=sequence_parallel_mesh(accelerator))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Args:
        accelerator: created with a `ParallelismConfig` whose `cp_size` is the sequence-parallel degree, or launched
            with the config keys `parallelism_config_cp_size` and so on.

    Returns:
        The `cp` axis, or None in a single process, which is a group of one.

    Raises:
        ConfigError: if there are several processes and no `cp` axis, or this accelerate version is not supported.
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
    disable_context_parallelism(accelerator)
    return accelerator.torch_device_mesh["cp"]


def disable_context_parallelism(accelerator: Any) -> None:
    """Make `accelerator.prepare` leave the model's attention and masks unchanged for any `cp_size`."""
    if not CP_HOOKS.applies():
        return
    keep_attention(accelerator)
    if FLATTENED_MESH.applies():
        accelerator.prepare = _without_mesh_warning(accelerator.prepare)


def _without_mesh_warning(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
            return prepare(*args, **kwargs)

    return quiet
