"""transformers' Auto classes load the native models after `import mllm_seqpar`, or with `trust_remote_code=True`.

`import mllm_seqpar` imports neither transformers nor a model. `register` therefore waits until transformers imports its
modules of Auto classes. It registers the configurations, and for models and processors stand-ins, which import the
class that they stand for when it is used.

A saved directory also has a small Python file that imports this package, and names it as remote code. Where nobody has
imported the package, `trust_remote_code=True` imports that file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple


class NativeModel(NamedTuple):
    """A native model: its package in `mllm_seqpar.models`, the names of its classes, and the Auto classes of `model`."""

    package: str
    config: str
    model: str
    processor: str
    autos: tuple[str, ...]

    def named(self, name: str) -> Any:
        """Import the package and return one of its classes."""
        return getattr(importlib.import_module(f"mllm_seqpar.models.{self.package}"), name)


NATIVE_MODELS = {
    "mplugowl3": NativeModel(
        package="mplug_owl3",
        config="MPlugOwl3Config",
        model="MPlugOwl3ForConditionalGeneration",
        processor="MPlugOwl3Processor",
        autos=("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"),
    ),
    "open_flamingo": NativeModel(
        package="open_flamingo",
        config="OpenFlamingoConfig",
        model="OpenFlamingo",
        processor="OpenFlamingoProcessor",
        autos=("AutoModel", "AutoModelForImageTextToText"),
    ),
}
"""The native models by `model_type`."""


class _StandIn(type):
    """The type of a class that stands for a class of a native model, which is imported when an attribute is used."""

    native: NativeModel

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native.named(cls.__name__), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.native.named(cls.__name__)(*args, **kwargs)


def _stand_in(native: NativeModel, name: str) -> Any:
    config = native.named(native.config)  # given, because registering compares it
    return _StandIn(name, (), {"native": native, "config_class": config, "__module__": __name__})


def _register_configurations() -> None:
    from transformers import AutoConfig

    for model_type, native in NATIVE_MODELS.items():
        AutoConfig.register(model_type, native.named(native.config), exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    for native in NATIVE_MODELS.values():
        for auto in native.autos:
            model = _stand_in(native, native.model)
            getattr(modeling_auto, auto).register(native.named(native.config), model, exist_ok=True)


def _register_processors() -> None:
    from transformers import AutoProcessor

    for native in NATIVE_MODELS.values():
        processor = _stand_in(native, native.processor)
        AutoProcessor.register(native.named(native.config), processor, exist_ok=True)


_AFTER_IMPORT: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.processing_auto": _register_processors,
}


def register() -> None:
    """Register the native models with transformers' Auto classes, now or when transformers imports them."""
    for module, action in _AFTER_IMPORT.items():
        if module in sys.modules:
            action()
    sys.meta_path.insert(0, _AfterImport(_AFTER_IMPORT))


class _AfterImport:
    """Finds modules like Python's own finder, and calls an action after the first import of one."""

    def __init__(self, actions: Mapping[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._actions:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._actions[fullname]()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


CODE_MODULE = "mllm_seqpar_code"
_CODE = """\
# The classes that trust_remote_code=True loads are those of the installed package mllm-seqpar.
import mllm_seqpar
from mllm_seqpar.models import {package}


def __getattr__(name):
    return getattr({package}, name)
"""


def write_code(directory: str | os.PathLike[str], model_type: str) -> dict[str, str]:
    """Write the file that `trust_remote_code=True` imports into a model directory; return the `auto_map` that names it."""
    native = NATIVE_MODELS[model_type]
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, f"{CODE_MODULE}.py"), "w", encoding="utf-8") as file:
        file.write(_CODE.format(package=native.package))
    names = {"AutoConfig": native.config, **dict.fromkeys(native.autos, native.model), "AutoProcessor": native.processor}
    return {auto: f"{CODE_MODULE}.{name}" for auto, name in names.items()}


class LocalCode:
    """A class of this package, also where `trust_remote_code=True` has found it."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a class that is registered as remote code copies its source into the directories it saves."""
