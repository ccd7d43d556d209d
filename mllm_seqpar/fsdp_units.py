"""FSDP2 units whose parameters are used outside of a plain call of the unit.

FSDP2 gathers the parameters of a unit in a hook before its forward, frees them in a hook after it, gathers them again
before the backward pass of its output, and reduces their gradients once the gradients of its inputs are known. Two
kinds of computation here are not a single call of the unit:

- K and V are projected chunk by chunk, in forward and again in backward, and the gradients of the weights are returned
  by the autograd function of the attention. The units are projections, norms, or adapters within them.
- A pass calls inner modules of the model (the vision tower, the embeddings), and not the modules that contain them.

`call_within` runs such a computation as if it were the forward of the units: it calls only their hooks. The parameters
are gathered once before it and once before its backward pass, whatever it calls in between, so that ranks with
different numbers of chunks stay in step. Gradients reach the same leaf tensors as in a plain call.

It uses names that are internal to torch, the same from 2.11 to 2.15: `FSDPState._pre_forward`, `_post_forward` and
`_training_state`. In the state PRE_BACKWARD the hooks of a unit cast its inputs and outputs and do nothing else,
because recomputation under activation checkpointing calls the unit while its parameters are gathered for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from mllm_seqpar.errors import ConfigError

T = TypeVar("T")


def fsdp_units_among(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return the FSDP2 units among modules and the modules within them, outer ones first."""
    units: dict[FSDPModule, None] = {}  # once each, in order
    for module in modules:
        for part in module.modules() if module._modules else (module,):
            if isinstance(part, FSDPModule):
                units[part] = None
    return list(units)


def modules_around(model: nn.Module, called: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules within `model` that contain one of the modules `called`, outer ones first.

    Neither `model` nor the called modules themselves count: FSDP2 gathers their parameters when they are called.
    """
    inner = set(called)
    return [
        module
        for module in model.modules()
        if module is not model and any(part in inner for part in module.modules() if part is not module)
    ]


def call_within(fsdp_units: Sequence[FSDPModule], compute: Callable[..., T], x: Tensor | None = None) -> T:
    """Return ``compute(x)``, or ``compute()`` without x, computed as the forward of `fsdp_units`.

    Args:
        fsdp_units: outer ones first.
        compute: may call the units, and may read their parameters.
        x: a tensor whose gradient is known last in the backward pass of the result. The gradients of the units are then
            reduced; without it, at the end of the whole backward pass.
    """
    states: dict[Any, FSDPModule] = {}
    for unit in fsdp_units:
        states.setdefault(unit._get_fsdp_state(), unit)  # modules that were sharded together share a state
    if not states:
        return compute() if x is None else compute(x)
    token = None if x is None or not torch.is_grad_enabled() else x.new_zeros((), requires_grad=True)
    opened: list[tuple[Any, TrainingState]] = []
    try:
        for state, unit in states.items():
            (*given,), _ = state._pre_forward(unit, () if token is None else (token,), {})
            token = given[0] if given else None
            opened.append((state, state._training_state))
            state._training_state = TrainingState.PRE_BACKWARD
        out = compute() if x is None else compute(x if token is None else _Tie.apply(x, token))
    finally:
        for state, before in opened:
            state._training_state = before
    for state in reversed(states):
        # It registers the hooks of the backward pass on the tensors themselves; what it returns is a copy in the
        # unit's output dtype.
        state._post_forward(states[state], (), out)
    return out


class _Tie(torch.autograd.Function):
    """Forward: (x, token) -> x. Backward: (dx, 0), so that the node before `token` runs when dx is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        ctx.token = token.new_zeros(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, ctx.token


def refuse_other_sharding(model: nn.Module, *, tensor_parallel: bool = False) -> None:
    """Raise ConfigError if parameters of the model are sharded by anything but FSDP2, or, if that is allowed, tensor
    parallelism."""
    _refuse_fsdp1(model)
    if zero3 := next((name for name, p in model.named_parameters() if hasattr(p, "ds_id")), None):
        raise ConfigError(
            f"parameter {zero3} of {type(model).__name__} is sharded by DeepSpeed (ZeRO-3), which gathers parameters "
            "for calls of their module only; shard the model by FSDP2: torch.distributed.fsdp.fully_shard"
        )
    if tensor_parallel:
        return
    of_fsdp2 = _names_in_fsdp2(fsdp_units_among([model]))
    sharded = next(
        (
            f"parameter {at}.{name} is a DTensor over {p.device_mesh}"
            for at, module in model.named_modules()
            for name, p in module._parameters.items()
            if isinstance(p, DTensor) and (id(module), name) not in of_fsdp2
        ),
        None,
    )
    size = max(vars(module).get("_tp_size") or 1 for module in model.modules())
    if sharded or size > 1:
        raise ConfigError(
            f"{type(model).__name__} is sharded by other means than FSDP2, such as tensor parallelism (tp_plan): "
            f"{sharded or f'tp_size={size}'}. Its "
            "ranks compute parts of the same tokens together, and those of a sequence-parallel group different tokens; "
            "load the model without tp_plan and tp_size, and shard its parameters by FSDP2: "
            "torch.distributed.fsdp.fully_shard"
        )


def _names_in_fsdp2(units: Iterable[FSDPModule]) -> set[tuple[int, str]]:
    """Return the id of the module and the name there of each parameter that FSDP2 shards and nothing else does."""
    names = set[tuple[int, str]]()
    for unit in units:
        state: Any = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in [] if group is None else group.fsdp_params:
                if not param.is_dtensor:  # before FSDP2 sharded it
                    info = param._module_info
                    names.add((id(info.module), info.param_name))
                    names.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    return names


def _refuse_fsdp1(model: nn.Module) -> None:
    """Raise ConfigError if the model, or a part of it, is sharded by FSDP1 (`FullyShardedDataParallel`).

    FSDP1 replaces parameters by views of one flat parameter, which exist only while its unit is called.
    """
    modules = list(model.modules())
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    parts = any(isinstance(module, FullyShardedDataParallel) for module in modules)
    flat = any(getattr(p, "_fsdp_flattened", False) for p in parameters)
    are_parameters = all(isinstance(p, nn.Parameter) for p in parameters)
    views = getattr(model, "_is_fsdp_managed_module", False) and not are_parameters
    if parts or flat or views:
        raise ConfigError(
            f"{type(model).__name__} is sharded by FSDP1 (FullyShardedDataParallel), with which K and V cannot be "
            "recomputed in backward; shard it by FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in the "
            "accelerate config"
        )
