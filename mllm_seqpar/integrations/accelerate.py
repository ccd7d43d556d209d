"""accelerate: its device mesh without its own context parallelism, and FSDP2 on any device.

accelerate's mesh has the dimensions dp_replicate, dp_shard, cp, sp and tp. The ranks along `cp` receive the same
batches, and FSDP2 shards over dp_shard and cp together. accelerate's own context parallelism cannot be used: `prepare`
registers hooks on every `*self_attn` that drop attention masks, and each step then runs inside a context manager that
shards the inputs and replaces torch's attention, for text-only models (`_compat.CP_HOOKS`).

accelerate enables FSDP for accelerator devices only. On CPU, the same config silently uses DDP: training works, but
every rank holds whole parameters, and a CPU test says nothing about FSDP. This module therefore writes into
accelerate's state what accelerate would have set on a GPU. `require_sharded` checks the result, so that a release of
accelerate that changes these names ends in an error and not in an unsharded model.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from mllm_seqpar._compat import (
    CP_HOOKS,
    FLATTENED_MESH,
    FSDP_ON_CPU,
    PARALLELISM_ON_CPU,
    keep_attention,
    prepared_models,
)
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.loading import layer_classes

_FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""The variables that `accelerate launch` sets for `configs/fsdp2_cpu_2.yaml` and that are not accelerate's defaults."""


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
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
            return prepare(*args, **kwargs)

    if FLATTENED_MESH.applies():
        accelerator.prepare = quiet


def launched_with_fsdp2() -> bool:
    """Return whether `accelerate launch` read a config file that requests FSDP2."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and os.environ.get("FSDP_VERSION") == "2"


@contextmanager
def shard_weights_by_fsdp2(enabled: bool) -> Iterator[None]:
    """Return a context in which, if `enabled`, the environment requests FSDP2 like a configuration file of `accelerate
    launch`.

    A launch configuration that already requests FSDP2 is not changed.

    Raises:
        ConfigError: the launch configuration requests another version of FSDP.
    """
    if not enabled or launched_with_fsdp2():
        yield
        return
    refuse_fsdp1_config("--shard_weights")
    before = {name: os.environ[name] for name in _FSDP2 if name in os.environ}
    os.environ.update(_FSDP2)
    try:
        yield
    finally:
        for name in _FSDP2:
            del os.environ[name]
        os.environ.update(before)


def refuse_fsdp1_config(caller: str) -> None:
    """Raise ConfigError if `accelerate launch` read a config file that requests FSDP, but not version 2."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not launched_with_fsdp2():
        raise ConfigError(
            f"{caller}: the launch configuration has fsdp_version: {os.environ.get('FSDP_VERSION', 1)} (FSDP1), with "
            "which K and V cannot be recomputed in backward; set fsdp_version: 2, as configs/fsdp2_*.yaml do"
        )


def enable_fsdp2_on_cpu(accelerator) -> None:
    """Make `accelerator` (on CPU, over gloo, launched with an FSDP2 config) shard by FSDP2 in `prepare`.

    Call it before `prepare`. It does nothing if this version of accelerate supports FSDP2 on CPU.
    """
    if not FSDP_ON_CPU.applies():
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if accelerator.distributed_type == DistributedType.FSDP:
        return
    # Both are needed: `Accelerator` reads the type through AcceleratorState, which restores it from PartialState,
    # whose attributes all instances share.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    # Without arguments the plugin reads the variables that `accelerate launch` sets from the config file.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if not accelerator.is_fsdp2:
        raise _unsupported_version("the accelerator does not report FSDP2 after its state was set")


@contextmanager
def without_launched_parallelism(cpu: bool) -> Iterator[None]:
    """On CPU, hide the launch config's parallelism from the `Accelerator` created inside, which would refuse it."""
    name = "ACCELERATE_USE_PARALLELISM_CONFIG"
    hidden = {name: os.environ.pop(name)} if cpu and PARALLELISM_ON_CPU.applies() and name in os.environ else {}
    try:
        yield
    finally:
        os.environ.update(hidden)


def set_parallelism_on_cpu(accelerator, parallelism) -> None:
    """Give an `Accelerator` on CPU the device mesh that a `ParallelismConfig` describes, over gloo."""
    accelerator.state.parallelism_config = parallelism
    accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
    if accelerator.parallelism_config is not parallelism or accelerator.torch_device_mesh is None:
        raise _unsupported_version("the accelerator does not report the parallelism after its state was set")


def receives_weights() -> bool:
    """Return whether `Accelerator.prepare` gives this rank its shards from rank 0, so it need not read the weights.

    This is the setting fsdp_cpu_ram_efficient_loading. Load such a rank's model by `load_model(path,
    device_map="meta")`, pass it to `allocate`, and call `send_buffers` on all ranks.
    """
    return _loads_on_rank_0() and dist.get_rank() != 0


def _loads_on_rank_0() -> bool:
    enabled = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true"
    return enabled and launched_with_fsdp2() and dist.is_initialized() and dist.get_world_size() > 1


def send_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0 if only rank 0 read them; every rank calls this, with a model on the CPU.

    `Accelerator.prepare` sends what is in the state dict, and most buffers are not.
    """
    if not _loads_on_rank_0():
        return
    group = dist.new_group(backend="gloo")
    for buffer in model.buffers():
        value = buffer.contiguous()
        dist.broadcast(value, src=0, group=group)
        buffer.copy_(value)
    dist.destroy_process_group(group)


def allocate(model: nn.Module) -> nn.Module:
    """Replace parameters and buffers on the meta device by ones on the CPU; tied parameters stay tied.

    The new parameters have arbitrary values and use no physical memory until they are written. `accelerator.prepare`
    needs them, because it finds the parameters of an optimizer by their addresses, and on the meta device all addresses
    are 0.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    values = torch.empty_like(parameter, device="cpu")
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return model


def set_fsdp_units(accelerator, model: nn.Module) -> None:
    """If accelerate shards by FSDP2, set the layer classes that become units and the dtype of gradient reduction.

    Raise ConfigError if accelerate shards by FSDP1, or if fsdp_cpu_ram_efficient_loading is set and the model does not
    support it.
    """
    if not accelerator.is_fsdp2:
        if accelerator.distributed_type == "FSDP":
            raise ConfigError(
                "accelerate is set up to shard by FSDP1, with which K and V cannot be recomputed in backward; set "
                "fsdp_version: 2 in its config, or FullyShardedDataParallelPlugin(fsdp_version=2)"
            )
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        _check_efficient_loading(model)
        allocate(model)  # transformers leaves weights that a checkpoint lacks on the meta device, except on rank 0
    if accelerator.mixed_precision == "bf16":
        # accelerate would reduce gradients in bf16 too, with a rounding error that grows with the number of ranks.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = layer_classes(model)


def _check_efficient_loading(model: nn.Module) -> None:
    """Raise ConfigError if accelerate would fail to send a buffer, or separate tied parameters without an error."""
    saved = sorted({name for name, _ in model.named_buffers()} & model.state_dict().keys())
    reason = f"the buffer {saved[0]} is in the model's state dict" if saved else None
    places = [id(p) for module in model.modules() for p in module._parameters.values() if p is not None]
    if len(places) != len(set(places)) and not hasattr(model, "tie_weights"):
        reason = f"{type(model).__name__} has tied parameters and no method tie_weights"
    if reason is not None:
        raise ConfigError(
            f"fsdp_cpu_ram_efficient_loading: {reason}, which accelerate does not support; set "
            "fsdp_cpu_ram_efficient_loading: false in the accelerate config"
        )


def require_sharded(model: nn.Module) -> None:
    """Raise ConfigError unless this rank holds a shard of every parameter, as a DTensor."""
    whole = [
        name
        for name, parameter in model.named_parameters()
        if not (isinstance(parameter, DTensor) and any(isinstance(place, Shard) for place in parameter.placements))
    ]
    if whole:
        raise _unsupported_version(
            f"{len(whole)} parameters are not sharded after prepare, among them {', '.join(whole[:3])}"
        )


def forget_preparation(accelerator, model: nn.Module) -> None:
    """Let `accelerator.prepare` wrap a model by DDP that it has prepared for evaluation only.

    accelerate marks a model at its first preparation and returns it unchanged at the next ones. The ranks would then
    train without averaging their gradients. A model that an accelerator of another trainer has marked is no different.
    """
    state = vars(model)
    state.pop("_is_accelerate_prepared", None)
    original = state.pop("_original_forward", None)  # of mixed precision, which the next preparation adds again
    if original is not None:
        if getattr(original, "__func__", None) is type(model).forward:
            del model.forward
        else:
            model.forward = original
    models = prepared_models(accelerator)
    models[:] = [each for each in models if each is not model]


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without backward left gathered.

    FSDP2 keeps the outermost parameters (embeddings, final norm, head) gathered after forward, because backward would
    need them at once. After an evaluation nothing frees them, and a checkpoint would find whole parameters.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _unsupported_version(found: str) -> ConfigError:
    return ConfigError(
        f"FSDP2 through accelerate {version('accelerate')} and torch {torch.__version__}: {found}. "
        "mllm_seqpar/integrations/accelerate.py supports accelerate 1.15; install that version, or launch with one "
        "process"
    )
