"""`Patch`: the changes made to one model instance, the checks of direct calls to its modules, and how to undo both."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from mllm_seqpar._compat import eager
from mllm_seqpar.errors import AdapterError
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState

_ABSENT = object()


class _Change(NamedTuple):
    """An attribute of an instance that a patch has set; `before` is `_ABSENT` if the instance did not have it."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass
class Patch:
    """The changes made to one model instance, and how to undo them. Adapters change a model only through it."""

    adapter: str
    context: SeqParContext
    _changes: list[_Change] = field(default_factory=list)
    _guards: list[tuple[nn.Module, set[nn.Module]]] = field(default_factory=list)
    _dispatched: set[nn.Module] = field(default_factory=set)
    _names: dict[nn.Module, tuple[str, str]] = field(default_factory=dict)
    """Of each guarded module: its name in the model, and the model's class."""

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
            module: a module that receives its `ForwardState` as the keyword argument `seqpar`.
            forward: is called as ``forward(module, *args, seqpar=state, **kwargs)``. A call without `seqpar` calls the
                unpatched forward; on several ranks it is an error, as for `guard`.
        """
        unpatched, forward = module.forward, eager(forward)

        @functools.wraps(unpatched)
        def dispatch(*args: Any, seqpar: ForwardState | None = None, **kwargs: Any) -> Any:
            if seqpar is not None:
                return forward(module, *args, seqpar=seqpar, **kwargs)
            self._refuse_call_outside_pass(module)
            return unpatched(*args, **kwargs)

        self.set(module, "forward", dispatch)
        self._dispatched.add(module)

    def chunk_forwards(self, modules: Iterable[nn.Module]) -> None:
        """Compute the forward of token-wise modules `mlp_chunk_size` tokens at a time, if that option is set.

        Args:
            modules: modules whose forward takes one or more tensors (..., C) of the same tokens and returns one
                (..., C'), in which the row of each token depends on that token only.
        """
        size = self.context.config.mlp_chunk_size
        if size is not None:
            for module in modules:
                self.set(module, "forward", types.MethodType(_chunked_forward(module.forward, size), module))

    def guard(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        """Make it an error to call `sites`, or a module that contains one of them, outside of the model's forward.

        Such a call would compute with the inputs of this rank only. The patched forward passes a `ForwardState` to all
        these modules, and so does the recomputation of gradient checkpointing. `finish` installs the checks.

        Args:
            model: the module whose forward starts a pass. It and the modules that contain it are not guarded.
            sites: modules within `model` that attend to tokens of several ranks.
        """
        self._guards.append((model, set(sites)))

    @property
    def sites(self) -> list[nn.Module]:
        """The modules that attend to tokens of several ranks, in the order of the model's modules."""
        return [module for root, sites in self._guards for module in root.modules() if module in sites]

    def finish(self, model: nn.Module) -> None:
        """Install the guards around all forwards that were set, and make copying or pickling `model` an error.

        A copy would hold forwards that compute with the weights of the original.
        """
        several, alone = self.context.comm.size > 1, self.context.assumed_alone
        for root, sites in self._guards:
            attends = dict.fromkeys(sites, True)
            for name, module in root.named_modules():
                if module is root or module in self._names or not _attends(module, attends):
                    continue
                self._names[module] = name, type(root).__name__
                if module not in self._dispatched:
                    self._require_unreplaced_forward(module)
                    # On one process, inner modules compute what they compute unpatched, unless a group of several ranks
                    # is initialised later. No rank waits for another then, so the error may come from the site itself.
                    if several or (alone and module in sites):
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
        if "forward" not in vars(module):
            return
        if not any(module is change.owner and change.name == "forward" for change in self._changes):
            raise AdapterError(
                f"patch_model: the forward of this {type(module).__name__} was replaced by something else already, and "
                "patching would silently remove that (autocast by Accelerator.prepare, hooks of device_map, a fused "
                "loss). Patch first, then prepare; do not use device_map or kernels that replace a forward"
            )

    def _guarded_forward(self, module: nn.Module) -> Any:
        unpatched = module.forward

        @functools.wraps(unpatched)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("seqpar") is None:  # some modules take the state under another name or by position
                for given in (*args, *kwargs.values()):
                    if isinstance(given, ForwardState):
                        break
                else:
                    self._refuse_call_outside_pass(module)
            return unpatched(*args, **kwargs)

        return forward

    def _refuse_call_outside_pass(self, module: nn.Module) -> None:
        self.context.require_same_world()
        if self.context.comm.size > 1:
            name, model = self._names.get(module, ("a module", "model"))
            raise AdapterError(
                f"{name} ({type(module).__name__}) was called outside of the patched forward of its {model}; on "
                f"{self.context.comm.size} ranks it would compute with the inputs of this rank only. Call the model "
                "itself. If a fused kernel (Liger) replaced its forward, turn that off; if a trainer of TRL did, use "
                "mllm_seqpar.SeqParMixin. To call inner modules, call unpatch_model(model) first. The vision tower may "
                "be called"
            )


def _attends(module: nn.Module, known: dict[nn.Module, bool]) -> bool:
    """Return whether a module attends to tokens of several ranks, or contains one that does, which `known` remembers.

    A nested function with a cache of its own would refer to itself, and keep the model in memory until Python collects
    cyclic garbage.
    """
    if module not in known:
        known[module] = any([_attends(child, known) for child in module.children()])
    return known[module]


def _chunked_forward(unpatched: Callable[..., Tensor], size: int) -> Callable[..., Tensor]:
    from mllm_seqpar.chunked_mlp import TokenwiseFunction, run_in_chunks  # of one option

    @functools.wraps(unpatched)
    def forward(self: nn.Module, *inputs: Tensor) -> Tensor:
        return run_in_chunks(TokenwiseFunction(unpatched, [self], self), size, *inputs)

    return forward


def _refuse_copy(protocol: int) -> Any:
    raise AdapterError(
        "a patched model cannot be copied or pickled: the replaced forwards belong to this instance and this process. "
        "Call unpatch_model(model) first and patch the copy, or save with save_pretrained or state_dict, which "
        "patching does not change. PEFT's modules_to_save copies modules too: wrap the model first, then patch it"
    )
