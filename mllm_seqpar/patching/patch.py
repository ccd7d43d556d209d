"""`patch_model` and `unpatch_model`: collect every site, check all, replace, report; and undo without a trace."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Group, as_communicator
from mllm_seqpar.comm.agreement import fingerprint, require_same_text
from mllm_seqpar.comm.gloo_shutdown import release_gloo_at_exit
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.kernels.registry import kernel_by_name
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import StrategySelector

from .registry import Adapter, find_adapter

_log = get_logger(__name__)
_ATTRIBUTE = "_mllm_seqpar"
_ABSENT = object()
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class Patch:
    """The changes made to one model instance, and how to undo them."""

    adapter: str
    context: SeqParContext
    _undo: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    _guards: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute on an instance (never on a class), remembering what the instance itself had there.

        Raises:
            AdapterError: `name` is "forward", and something else has replaced the forward of this instance already.
        """
        if name == "forward" and name in vars(owner) and not self._has_set(owner, name):
            raise AdapterError(
                f"patch_model: the forward of this {type(owner).__name__} was replaced by something else already, and "
                "patching would silently drop that (autocast by Accelerator.prepare, hooks of device_map, a fused "
                "loss). Patch first, then prepare; leave out device_map and kernels that replace a forward"
            )
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT), value))
        object.__setattr__(owner, name, value)

    def _has_set(self, owner: Any, name: str) -> bool:
        return any(owner is changed and name == attribute for changed, attribute, *_ in self._undo)

    def guard(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        """Makes it an error to reach `sites`, or a module around them, except in a pass of the patched model.

        Such a call would compute with this rank's inputs alone. The passes hand a `ForwardState` to all these modules
        as an argument, and so does the recomputation of gradient checkpointing in backward.

        Args:
            model: the module whose forward begins a pass; it and what is around it may be called.
            sites: the modules within it that attend over tokens of several ranks.
        """
        self._guards.append((model, list(sites)))

    def close(self) -> None:
        """Puts the guards in place, around every forward that was set, once all are set."""
        guarded: set[int] = set()
        for model, sites in self._guards:
            wanted = {id(site) for site in sites}
            for name, module in model.named_modules():
                inner = module is not model and any(id(part) in wanted for part in module.modules())
                if inner and id(module) not in guarded:
                    guarded.add(id(module))
                    self.set(module, "forward", _guarded(self.context, type(model).__name__, name, module))

    def refuse_copies(self, model: nn.Module) -> None:
        """Makes copying or pickling `model`, and every module that was changed, an error.

        Copies would hold forwards that compute with the originals' weights.
        """
        for owner in {id(owner): owner for owner in (model, *(change[0] for change in self._undo))}.values():
            self.set(owner, "__reduce_ex__", _refuse_copy)

    def undo(self) -> None:
        """Restores every attribute, last change first.

        Raises:
            AdapterError: somebody has replaced one of the attributes since; nothing is changed then.
        """
        last = {(id(owner), name): (owner, name, value) for owner, name, _, value in self._undo}
        for owner, name, value in last.values():
            if vars(owner).get(name, _ABSENT) is not value:
                raise AdapterError(
                    f"unpatch_model: {type(owner).__name__}.{name} was replaced by something else after patch_model; "
                    "undo that first (accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
                )
        for owner, name, before, _ in reversed(self._undo):
            if before is _ABSENT:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)
        self._undo.clear()


def _guarded(context: SeqParContext, model: str, name: str, module: nn.Module) -> Any:
    """Return the forward of `module`, which raises unless a pass over the ranks of the group calls it."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        context.require_same_world()
        if context.comm.size > 1 and ForwardState not in map(type, (*args, *kwargs.values())):
            raise AdapterError(
                f"{name} ({type(module).__name__}) was called outside of the patched forward of its {model}; on "
                f"{context.comm.size} ranks it would compute with this rank's inputs alone, unsharded. Call the model "
                "itself. If a trainer or a fused kernel (Liger) replaced its forward, turn that off; to use inner "
                "modules, call unpatch_model(model) first. The vision tower alone may be called"
            )
        return inner(*args, **kwargs)

    return forward


def _refuse_copy(protocol: int) -> Any:
    raise AdapterError(
        "a patched model cannot be copied or pickled: what was patched in belongs to this instance and this process. "
        "Call unpatch_model(model) first and patch the copy anew, or save with save_pretrained or state_dict, which "
        "patching does not touch. PEFT's modules_to_save copies too: wrap the model first, then patch it"
    )


def patch_model(
    model: ModelT,
    strategy: str | None = None,
    *,
    group: Group = None,
    config: SeqParConfig | None = None,
    **options: Any,
) -> ModelT:
    """Makes this model instance sequence-parallel over `group`, in place, and returns it. Call it on every rank.

    Afterwards every rank passes the same inputs as to the unpatched model: text and frames are sharded inside, the
    loss, logits and generated tokens are the unpatched model's, and averaging each parameter's gradient over the group
    (what DDP and FSDP do) gives the unpatched gradient. State dict, saving and loading are untouched.

    Args:
        model: a model of a known family, or a wrapper (PEFT, DDP) of one; before or after `fully_shard`.
        strategy: how cross-attention is distributed; None: the config's, by default "lv-xattn".
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the whole world. The process group must exist by then,
            where a launcher started several processes; a single process needs none. "self" is a group of this process
            alone, for processes under a launcher that are independent of each other.
        config: all options at once.
        **options: single fields of `SeqParConfig`, over those of `config`.

    Raises:
        ConfigError: an unknown option or value; several processes and no process group.
        AdapterError: no adapter for this model, or it is patched already.
        AgreementError: the ranks pass different options or models; on every rank.
    """
    comm = as_communicator(group)
    release_gloo_at_exit()
    found: list[tuple[Adapter, nn.Module, SeqParContext]] = []

    def describe() -> str:
        if not isinstance(model, nn.Module):
            raise AdapterError(f"patch_model: expected a model, got {type(model).__name__}")
        alone = group is None and not dist.is_initialized()
        context = SeqParContext(comm, _chosen(strategy, config, options), assumed_alone=alone)
        context.config.check_ranks(comm.size)
        adapter, inner = find_adapter(model)
        if _ATTRIBUTE in vars(inner):
            before = vars(inner)[_ATTRIBUTE].context.config
            raise AdapterError(
                f"patch_model: this {type(inner).__name__} is patched already ({before}); call unpatch_model first to "
                "change its options"
            )
        adapter.check(inner, context)
        found.append((adapter, inner, context))
        return f"{adapter.name} {type(inner).__name__}, parameters {_shapes(inner):x}, {context.config}"

    require_same_text(comm, "patch_model", describe)
    adapter, inner, context = found[0]
    context = replace(context, selector=_selector(context, inner))
    patch = Patch(adapter.name, context)
    try:
        adapter.install(inner, context, patch)
        patch.close()
        patch.refuse_copies(inner)
    except BaseException:
        patch.undo()
        raise
    object.__setattr__(inner, _ATTRIBUTE, patch)
    _log.info(
        "%s is sequence-parallel over %d rank(s): cross-attention by %s, self-attention by %s (%s text)",
        type(inner).__name__,
        comm.size,
        context.config.strategy,
        context.config.self_attention,
        context.config.text_layout,
    )
    return model


def _selector(context: SeqParContext, model: nn.Module) -> StrategySelector | None:
    config = context.config
    if config.cluster is None and "auto" not in (config.strategy, config.self_attention):
        return None
    from mllm_seqpar.planner.auto import selector_for  # only here: the core does not depend on the planner

    parameter = next(model.parameters(), None)
    device, dtype = (torch.device("cpu"), torch.float32) if parameter is None else (parameter.device, parameter.dtype)
    return selector_for(config, context.comm, device, dtype)


def _chosen(strategy: str | None, config: SeqParConfig | None, options: dict[str, Any]) -> SeqParConfig:
    if isinstance(strategy, SeqParConfig):
        raise ConfigError("strategy: got a SeqParConfig; pass it as config=...")
    if config is not None and not isinstance(config, SeqParConfig):
        raise ConfigError(f"config: expected a SeqParConfig, got {type(config).__name__}")
    unknown = sorted(set(options) - set(SeqParConfig.field_names()))
    if unknown:
        raise ConfigError(
            f"patch_model: unknown option {', '.join(unknown)}; the options are {', '.join(SeqParConfig.field_names())}"
        )
    if strategy is not None:
        options = {**options, "strategy": strategy}
    chosen = replace(config or SeqParConfig(), **options)
    if chosen.kernel != "auto":
        kernel_by_name(chosen.kernel)
    return chosen


def _shapes(model: nn.Module) -> int:
    """A number that two models share when their parameters have the same names, shapes and dtypes, and train alike."""
    return fingerprint(
        " ".join(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in model.named_parameters())
    )


def unpatch_model(model: ModelT) -> ModelT:
    """Undoes `patch_model` in place, without a trace, and returns the model.

    Raises:
        AdapterError: the model is not patched, or its forward was replaced by somebody else meanwhile.
    """
    for module in model.modules():
        patch = vars(module).get(_ATTRIBUTE)
        if patch is not None:
            patch.undo()
            object.__delattr__(module, _ATTRIBUTE)
            return model
    raise AdapterError(f"unpatch_model: this {type(model).__name__} is not patched")


def patch_of(model: nn.Module) -> Patch | None:
    """The patch of a model (or of what a wrapper holds), or None: its context, and with it the byte counter."""
    return next((vars(m)[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in vars(m)), None)
