"""Adapters: one per model family. An adapter finds a family's modules and says what its tokens may see.

Families from outside this package register with `register_adapter`, or name a zero-argument callable that returns an
adapter in the entry point group `mllm_seqpar.adapters` of their own package.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import nn

from mllm_seqpar.errors import AdapterError
from mllm_seqpar.families import family_specs

if TYPE_CHECKING:
    from mllm_seqpar.patching import Patch
    from mllm_seqpar.runtime.context import SeqParContext

ENTRY_POINTS = "mllm_seqpar.adapters"
_registered: dict[str, Adapter] = {}


@runtime_checkable
class Adapter(Protocol):
    """What `patch_model` needs to know of a model family."""

    name: str
    """The family, as error messages show it."""

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` (not a part of it) is of this family. Must not raise and not import the family's package."""

    def check(self, model: nn.Module, context: SeqParContext) -> None:
        """Raises AdapterError or ConfigError when something is missing or cannot work; changes nothing."""

    def install(self, model: nn.Module, context: SeqParContext, patch: Patch) -> None:
        """Makes every change through `patch.set`, which remembers how to undo it."""


def register_adapter(adapter: Adapter) -> None:
    """Adds a model family, or replaces the registered one of the same name.

    Raises:
        AdapterError: the object lacks a part of the protocol, or is the class in place of an adapter.
    """
    missing = _missing(adapter)
    if missing:
        raise AdapterError(f"register_adapter: {missing}")
    _registered[adapter.name] = adapter


def _missing(adapter: object) -> str | None:
    """What an object lacks to be an adapter, or None."""
    if isinstance(adapter, type):
        return f"the class {adapter.__name__} was given where an instance of it belongs"
    if isinstance(adapter, Adapter):
        return None
    missing = [name for name in ("name", "matches", "check", "install") if not hasattr(adapter, name)]
    return f"{type(adapter).__name__} lacks {', '.join(missing)}, parts of mllm_seqpar.patching.registry.Adapter"


def adapters() -> dict[str, Adapter]:
    """All known families by name: registered ones first, then entry points, then those of this package.

    Raises:
        AdapterError: an entry point that cannot be loaded, or gives something that is no adapter.
    """
    found = dict(_registered)
    for point in entry_points(group=ENTRY_POINTS):
        try:
            adapter = point.load()()
        except Exception as error:
            raise AdapterError(
                f"the entry point {point.name} = {point.value} of the group {ENTRY_POINTS} cannot be loaded "
                f"({type(error).__name__}: {error}); repair or uninstall the package that declares it"
            ) from error
        missing = _missing(adapter)
        if missing:
            raise AdapterError(
                f"the entry point {point.name} = {point.value} of the group {ENTRY_POINTS} gives no adapter: "
                f"{missing}. It must name what returns an adapter when called without arguments, such as its class"
            )
        found.setdefault(adapter.name, adapter)
    for spec in family_specs():
        adapter = spec.module("adapter").adapter()
        found.setdefault(adapter.name, adapter)
    return found


def find_adapter(model: nn.Module) -> tuple[Adapter, nn.Module]:
    """The adapter for `model`, and the module it applies to: `model` itself or what a wrapper (PEFT, DDP) holds.

    Raises:
        AdapterError: no family matches; lists the known ones.
    """
    if not isinstance(model, nn.Module):
        raise AdapterError(f"expected a model, a torch.nn.Module; got {type(model).__name__}")
    known = adapters()
    for module in model.modules():
        for adapter in known.values():
            if adapter.matches(module):
                return adapter, module
    raise AdapterError(
        f"patch_model: no adapter knows {type(model).__module__}.{type(model).__name__}. Known families: "
        f"{', '.join(sorted(known))}. Another family can be added with mllm_seqpar.register_adapter"
    )
