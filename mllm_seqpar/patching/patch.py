"""`patch_model` and `unpatch_model`: collect every site, check all of them, replace, report; and restore everything."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mllm_seqpar._compat import check_versions
from mllm_seqpar._logging import get_logger
from mllm_seqpar.checkpointing.chunked_mlp import TokenwiseFunction, run_in_chunks
from mllm_seqpar.comm import Group, as_communicator
from mllm_seqpar.comm.agreement import fingerprint, require_same_text
from mllm_seqpar.comm.gloo_shutdown import release_gloo_at_exit
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.kernels.registry import kernel_by_name
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import StrategySelector, selector_for

from .registry import Adapter, find_adapter

_log = get_logger(__name__)
_ATTRIBUTE = "_mllm_seqpar"
_ABSENT = object()
ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    strategy: str | None = None,
    *,
    group: Group = None,
    config: SeqParConfig | None = None,
    **options: Any,
) -> ModelT:
    """Make a model instance sequence-parallel over a group of ranks, in place.

    Call this function on every rank of the group with the same model and the same options. Afterwards, call the model
    as before: every rank passes the inputs that it would pass to the unpatched model, and the patched model shards text
    and frames itself.

    - The loss, the logits and the tokens of `generate` equal those of the unpatched model on every rank.
    - The average of each parameter's gradient over the group equals the unpatched gradient. DDP and FSDP average
      gradients by default, so no scaling is needed.
    - `state_dict`, `save_pretrained` and `from_pretrained` behave as before. No other model changes.

    Args:
        model: a model of a supported family, or a wrapper (PEFT, DDP) that contains one. It may be patched before or
            after `fully_shard`.
        strategy: the strategy for cross-attention. None takes it from `config`; the default is "lv-xattn".
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks. If a launcher started several
            processes, initialise the process group first; a single process needs none. "self" is a group of this
            process only, for processes that work independently of each other.
        config: all options in one object.
        **options: single fields of `SeqParConfig`. They take precedence over `config`.

    Returns:
        The same `model` object.

    Raises:
        ConfigError: an option or its value is unknown, an installed package is too old, or a launcher started several
            processes and there is no process group.
        AdapterError: no adapter supports the model, or the model is patched already.
        AgreementError: the ranks passed different models or options. It is raised on every rank.

    Example::

        model = patch_model(AutoModelForImageTextToText.from_pretrained(path), strategy="lv-xattn")
        loss = model(**inputs, labels=labels).loss
        loss.backward()
    """
    comm = as_communicator(group)
    release_gloo_at_exit()
    checked: list[tuple[Adapter, nn.Module, SeqParContext]] = []

    def check_and_describe() -> str:
        check_versions()
        if not isinstance(model, nn.Module):
            raise AdapterError(f"patch_model: expected a torch.nn.Module, got {type(model).__name__}; pass a model")
        assumed_alone = group is None and not dist.is_initialized()
        context = SeqParContext(comm, _resolve_config(strategy, config, options), assumed_alone=assumed_alone)
        context.config.check_ranks(comm.size)
        adapter, inner = find_adapter(model)
        if _ATTRIBUTE in vars(inner):
            patched_config = vars(inner)[_ATTRIBUTE].context.config
            raise AdapterError(
                f"patch_model: this {type(inner).__name__} is patched already ({patched_config}); to change its "
                "options, call unpatch_model first"
            )
        adapter.check(inner, context)
        checked.append((adapter, inner, context))
        return f"{adapter.name} {type(inner).__name__}, parameters {_parameter_fingerprint(inner):x}, {context.config}"

    require_same_text(comm, "patch_model", check_and_describe)
    adapter, inner, context = checked[0]
    context = replace(context, chooser=_selector(context, inner))
    patch = Patch(adapter.name, context)
    try:
        adapter.install(inner, context, patch)
        patch.finish(inner)
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


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model` in place and return the model, which is then as it was before.

    Raises:
        AdapterError: the model is not patched, or something else has replaced a patched attribute since.
    """
    for module in model.modules():
        patch = vars(module).get(_ATTRIBUTE)
        if patch is not None:
            patch.undo()
            object.__delattr__(module, _ATTRIBUTE)
            return model
    raise AdapterError(f"unpatch_model: this {type(model).__name__} is not patched; call patch_model first")


def patch_of(model: nn.Module) -> Patch | None:
    """Return the patch of `model` or of a module within it; its context holds the configuration and the byte counter.

    Returns:
        None if nothing within `model` is patched.
    """
    return next((vars(m)[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in vars(m)), None)


def _resolve_config(strategy: str | None, config: SeqParConfig | None, options: dict[str, Any]) -> SeqParConfig:
    if isinstance(strategy, SeqParConfig):
        raise ConfigError("strategy: got a SeqParConfig, expected a string; pass the config as config=...")
    if config is not None and not isinstance(config, SeqParConfig):
        raise ConfigError(f"config: expected a SeqParConfig, got {type(config).__name__}")
    unknown = sorted(set(options) - set(SeqParConfig.field_names()))
    if unknown:
        raise ConfigError(
            f"patch_model: unknown option {', '.join(unknown)}; the options are {', '.join(SeqParConfig.field_names())}"
        )
    if strategy is not None:
        options = {**options, "strategy": strategy}
    resolved = replace(config or SeqParConfig(), **options)
    if resolved.kernel != "auto":
        kernel_by_name(resolved.kernel)
    return resolved


def _selector(context: SeqParContext, model: nn.Module) -> StrategySelector | None:
    config = context.config
    if config.cluster is None and "auto" not in (config.strategy, config.self_attention):
        return None
    parameter = next(model.parameters(), torch.empty(0))
    return selector_for(config, context.comm, parameter.device, parameter.dtype)


def _parameter_fingerprint(model: nn.Module) -> int:
    """Return a hash of the names, shapes, dtypes and `requires_grad` of all parameters."""
    return fingerprint(
        " ".join(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in model.named_parameters())
    )


class _Change(NamedTuple):
    """An attribute of an instance that a patch has set; `before` is `_ABSENT` if the instance did not have it."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass
class Patch:
    """The changes made to one model instance, and how to undo them.

    Adapters change a model only through this object.

    Attributes:
        adapter: name of the family.
        context: group and configuration.
    """

    adapter: str
    context: SeqParContext
    _changes: list[_Change] = field(default_factory=list)
    _guards: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)
    _guarded: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By id of a guarded module: its name, and the class of the model that it is called by."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance, never of a class, and record the value that it had.

        Raises:
            AdapterError: `name` is "forward", and something else has already replaced the forward of this instance.
        """
        if name == "forward":
            self._require_unreplaced_forward(owner)
        self._changes.append(_Change(owner, name, vars(owner).get(name, _ABSENT), value))
        object.__setattr__(owner, name, value)

    def set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of `module` in passes of the patched model.

        Args:
            module: a module to which the pass hands its `ForwardState` as the keyword argument `seqpar`.
            forward: is called as ``forward(module, *args, seqpar=state, **kwargs)``. A call without `seqpar` calls the
                unpatched forward; on several ranks it is an error, as for `guard`.
        """
        unpatched = module.forward

        @functools.wraps(unpatched)
        def dispatch(*args: Any, seqpar: ForwardState | None = None, **kwargs: Any) -> Any:
            if seqpar is not None:
                return forward(module, *args, seqpar=seqpar, **kwargs)
            self._refuse_call_outside_pass(module)
            return unpatched(*args, **kwargs)

        self.set(module, "forward", dispatch)
        self._guarded[id(module)] = "a module", "model"  # until `finish` finds its name

    def chunk_forwards(self, modules: Iterable[nn.Module]) -> None:
        """Compute the forward of token-wise modules `mlp_chunk_size` tokens at a time, if that option is set.

        Args:
            modules: modules whose forward takes one or more tensors (..., C) of the same tokens and returns one
                (..., C'), in which the row of each token depends on that token only.
        """
        size = self.context.config.mlp_chunk_size
        if size is not None:
            for module in modules:
                self.set(module, "forward", _chunked_forward(module, size))

    def guard(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        """Make it an error to call `sites`, or a module that contains one of them, outside of the model's forward.

        Such a call would compute with the inputs of this rank only. The patched forward passes a `ForwardState` to all
        these modules, and so does the recomputation of gradient checkpointing. `finish` installs the checks.

        Args:
            model: the module whose forward starts a pass. It and the modules that contain it are not guarded.
            sites: modules within `model` that attend to tokens of several ranks.
        """
        self._guards.append((model, list(sites)))

    def finish(self, model: nn.Module) -> None:
        """Install the guards around all forwards that were set, and make copying or pickling `model` an error.

        A copy would hold forwards that compute with the weights of the original.
        """
        # On one process, inner modules compute what they compute unpatched, unless a group of several ranks is
        # initialised later.
        can_fail = self.context.comm.size > 1 or self.context.assumed_alone
        visited: set[int] = set()
        for root, sites in self._guards:
            site_ids = {id(site) for site in sites}
            for name, module in root.named_modules():
                if module is root or id(module) in visited or site_ids.isdisjoint(map(id, module.modules())):
                    continue
                visited.add(id(module))
                checked = id(module) in self._guarded  # by `set_forward`
                self._guarded[id(module)] = name, type(root).__name__
                if not checked:
                    self._require_unreplaced_forward(module)
                    if can_fail:
                        self.set(module, "forward", self._guarded_forward(module))
        for owner in {id(owner): owner for owner in (model, *(change.owner for change in self._changes))}.values():
            self.set(owner, "__reduce_ex__", _refuse_copy)

    def undo(self) -> None:
        """Restore every attribute, last change first.

        Raises:
            AdapterError: something else has replaced one of the attributes since. Nothing is restored then.
        """
        last_changes = {(id(change.owner), change.name): change for change in self._changes}
        for change in last_changes.values():
            if vars(change.owner).get(change.name, _ABSENT) is not change.after:
                raise AdapterError(
                    f"unpatch_model: {type(change.owner).__name__}.{change.name} was replaced by something else after "
                    "patch_model; undo that first (accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
                )
        for change in reversed(self._changes):
            if change.before is _ABSENT:
                object.__delattr__(change.owner, change.name)
            else:
                object.__setattr__(change.owner, change.name, change.before)
        self._changes.clear()

    def _require_unreplaced_forward(self, module: Any) -> None:
        set_here = any(module is change.owner and change.name == "forward" for change in self._changes)
        if "forward" in vars(module) and not set_here:
            raise AdapterError(
                f"patch_model: the forward of this {type(module).__name__} was replaced by something else already, and "
                "patching would silently remove that (autocast by Accelerator.prepare, hooks of device_map, a fused "
                "loss). Patch first, then prepare; do not use device_map or kernels that replace a forward"
            )

    def _guarded_forward(self, module: nn.Module) -> Any:
        unpatched = module.forward

        @functools.wraps(unpatched)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Some modules take the state under another name or by position.
            in_pass = kwargs.get("seqpar") is not None or any(
                isinstance(x, ForwardState) for x in (*args, *kwargs.values())
            )
            if not in_pass:
                self._refuse_call_outside_pass(module)
            return unpatched(*args, **kwargs)

        return forward

    def _refuse_call_outside_pass(self, module: nn.Module) -> None:
        self.context.require_same_world()
        if self.context.comm.size > 1:
            name, model = self._guarded[id(module)]
            raise AdapterError(
                f"{name} ({type(module).__name__}) was called outside of the patched forward of its {model}; on "
                f"{self.context.comm.size} ranks it would compute with the inputs of this rank only. Call the model "
                "itself. If a trainer or a fused kernel (Liger) replaced its forward, turn that off; to call inner "
                "modules, call unpatch_model(model) first. The vision tower may be called"
            )


def _chunked_forward(module: nn.Module, size: int) -> Any:
    unpatched = module.forward

    @functools.wraps(unpatched)
    def forward(self: nn.Module, *inputs: Tensor) -> Tensor:
        return run_in_chunks(TokenwiseFunction(unpatched, [self], self), size, *inputs)

    return types.MethodType(forward, module)


def _refuse_copy(protocol: int) -> Any:
    raise AdapterError(
        "a patched model cannot be copied or pickled: the replaced forwards belong to this instance and this process. "
        "Call unpatch_model(model) first and patch the copy, or save with save_pretrained or state_dict, which "
        "patching does not change. PEFT's modules_to_save copies modules too: wrap the model first, then patch it"
    )
