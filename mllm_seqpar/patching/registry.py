"""The adapters of all model families, built in and external, and the search for the one that matches a model, a
processor, or a configuration.

An external family registers its adapter with `register_adapter`, or its package declares an entry point in the group
`mllm_seqpar.adapters` that names a callable without arguments, such as the adapter's class.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import abstractmethod
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import nn

from mllm_seqpar.errors import AdapterError
from mllm_seqpar.families import built_in_families

if TYPE_CHECKING:
    from mllm_seqpar.runtime.context import SeqParContext

    from .changes import Patch

ENTRY_POINTS = "mllm_seqpar.adapters"
_registered: dict[str, Adapter] = {}


@runtime_checkable
class Adapter(Protocol):
    """Protocol of the adapter of a model family, which `patch_model` calls.

    An adapter is an object, or a class whose `matches`, `check` and `install` are class methods, such as a `Family`. A
    class that derives from this one inherits a `check` that refuses nothing.

    An adapter may also have these attributes, each of which `Family` describes:

    - `frame_arguments`: `SeqParTrainer` leaves these arguments of the model in host memory.
    - `parts`: `finetune` trains or freezes them by these names.
    - `has_cross_attention`: False for a decoder-only model, which tensor parallelism may also shard on one rank;
      default True.
    - `chat`: fine-tuning and questions from chats.
    - `sizes`: the planner.
    """

    name: str
    """The family's name in messages."""

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Return whether `model` itself, not a module within it, is of this family.

        It is called for every module of a model. It must not raise, and it must not import the family's package.
        """

    def check(self, model: nn.Module, context: SeqParContext) -> None:
        """Raise AdapterError or ConfigError if `model` cannot be patched with these options; change nothing."""

    @abstractmethod
    def install(self, model: nn.Module, context: SeqParContext, patch: Patch) -> None:
        """Replace forwards and other attributes, each of them through `patch.set`."""


def is_instance_by_name(module: object, class_name: str, package: str = "") -> bool:
    """Return whether a class of this name, from this package, is among the classes of `module`.

    It imports nothing, and holds after `fully_shard` has given the module a class of its own.
    """
    return any(c.__name__ == class_name and c.__module__.startswith(package) for c in type(module).__mro__)


def register_adapter(adapter: Adapter) -> None:
    """Add a model family. An adapter that is registered already under the same name is replaced.

    Raises:
        AdapterError: `adapter` is a class, or lacks an attribute of the protocol.
    """
    problem = _protocol_error(adapter)
    if problem:
        raise AdapterError(f"register_adapter: {problem}")
    _registered[adapter.name] = adapter


def _protocol_error(adapter: object) -> str | None:
    if isinstance(adapter, type) and not _is_adapter(adapter):
        return f"the class {adapter.__name__} was given where an instance of it is expected"
    if isinstance(adapter, Adapter):
        return None
    missing = [name for name in ("name", "matches", "check", "install") if not hasattr(adapter, name)]
    return f"{type(adapter).__name__} lacks {', '.join(missing)}, parts of mllm_seqpar.patching.registry.Adapter"


def _is_adapter(given: object) -> bool:
    """Return whether a class is an adapter itself, rather than its instances."""
    return isinstance(given, type) and inspect.ismethod(getattr(given, "matches", None))


@functools.cache
def _declared(path: tuple[str, ...]) -> dict[str, Adapter]:
    """Return the adapters of the entry points on a search path, by name; scanning the path takes 10 ms."""
    declared_adapters: dict[str, Adapter] = {}
    for point in entry_points(group=ENTRY_POINTS):
        declared = f"the entry point {point.name} = {point.value} of the group {ENTRY_POINTS}"
        try:
            loaded = point.load()
            adapter = loaded if _is_adapter(loaded) else loaded()
        except Exception as error:
            raise AdapterError(
                f"{declared} cannot be loaded ({type(error).__name__}: {error}); repair or uninstall the package that "
                "declares it"
            ) from error
        problem = _protocol_error(adapter)
        if problem:
            raise AdapterError(
                f"{declared} does not return an adapter: {problem}. It must name a callable without arguments that "
                "returns an adapter, such as its class"
            )
        declared_adapters.setdefault(adapter.name, adapter)
    return declared_adapters


def external_adapters() -> dict[str, Adapter]:
    """Return the adapters from outside this package by name: registered ones take precedence over entry points.

    Raises:
        AdapterError: an entry point cannot be loaded, or does not give an adapter.
    """
    external = dict(_registered)
    for name, adapter in _declared(tuple(sys.path)).items():
        external.setdefault(name, adapter)
    return external


def adapters(model_classes: Collection[str] | None = None) -> dict[str, Adapter]:
    """Return adapters by name, in the order in which they are tried: external ones take precedence.

    Args:
        model_classes: of the families of this package, import and return only those of models with a class of these
            names; None: all.

    Raises:
        AdapterError: an entry point cannot be loaded, or does not give an adapter.
    """
    by_name = external_adapters()
    for family in built_in_families(model_classes):
        by_name.setdefault(family.name, family)
    return by_name


def find_adapter(model: nn.Module) -> tuple[Adapter, nn.Module]:
    """Return the adapter for `model`, and the module that it applies to: `model`, or a module in a wrapper (PEFT, DDP).

    Raises:
        AdapterError: no adapter matches.
    """
    if not isinstance(model, nn.Module):
        raise AdapterError(f"expected a torch.nn.Module, got {type(model).__name__}; pass a model")
    candidates = adapters({c.__name__ for module in model.modules() for c in type(module).__mro__})
    for module in model.modules():
        for adapter in candidates.values():
            if adapter.matches(module):
                return adapter, module
    raise AdapterError(
        f"patch_model: no adapter matches {type(model).__module__}.{type(model).__name__}. Supported families: "
        f"{', '.join(sorted(adapters()))}. To add another family, call mllm_seqpar.register_adapter"
    )
