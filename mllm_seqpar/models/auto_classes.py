"""transformers' Auto classes load the native models after `import mllm_seqpar`, or with `trust_remote_code=True`.

`import mllm_seqpar` imports neither transformers nor a model. `register_on_import` therefore waits until transformers
imports its modules of Auto classes. It then registers stand-ins: lazy proxies that import the native class when it is
used.

A saved directory also has a small Python file that imports this package, and names it as remote code. In a program
that does not import the package, `trust_remote_code=True` imports that file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar, NamedTuple


class NativeModel(NamedTuple):
    """A native model: its package in `mllm_seqpar.models`, the names of its classes, and its Auto classes."""

    package: str
    config: str
    model: str
    processor: str
    autos: tuple[str, ...]
    image_processor: str | None = None
    """None: one of transformers', which its AutoImageProcessor finds."""
    published_as: str | None = None
    """The `model_type` of another model, if published files state that and name this model in `architectures`."""

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
        image_processor="MPlugOwl3ImageProcessor",
    ),
    "moss_vl": NativeModel(
        package="moss_vl",
        config="MossVLConfig",
        model="MossVLForConditionalGeneration",
        processor="MossVLProcessor",
        autos=("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"),
        image_processor="MossVLImageProcessor",
    ),
    "open_flamingo": NativeModel(
        package="open_flamingo",
        config="OpenFlamingoConfig",
        model="OpenFlamingo",
        processor="OpenFlamingoProcessor",
        autos=("AutoModel", "AutoModelForImageTextToText"),
    ),
    "video_mllama": NativeModel(
        package="video_mllama",
        config="VideoMllamaConfig",
        model="VideoMllamaForConditionalGeneration",
        processor="VideoMllamaProcessor",
        autos=("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"),
        published_as="mllama",
    ),
}
"""The native models by `model_type`."""


class _StandIn(type):
    """The type of a lazy proxy for a class of a native model, which is imported when an attribute is used."""

    native: NativeModel

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native.named(cls.__name__), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.native.named(cls.__name__)(*args, **kwargs)


def _stand_in(native: NativeModel, name: str, **attributes: Any) -> Any:
    return _StandIn(name, (), {"native": native, "__module__": __name__, **attributes})


def _config_of(native: NativeModel) -> Any:
    """Return the configuration class if it has been imported, else a lazy proxy for it."""
    module = sys.modules.get(f"mllm_seqpar.models.{native.package}.configuration")
    return getattr(module, native.config, None) or _stand_in(native, native.config)


def _register_configurations(auto: ModuleType) -> None:
    for model_type, native in NATIVE_MODELS.items():
        auto.AutoConfig.register(model_type, _config_of(native), exist_ok=True)


def _register_models(auto: ModuleType) -> None:
    """Register the models whose configuration has been imported; the others are registered when theirs is."""
    for native in NATIVE_MODELS.values():
        config = _config_of(native)
        if not isinstance(config, _StandIn):
            for name in native.autos:
                model = _stand_in(native, native.model, config_class=config)
                getattr(auto, name).register(config, model, exist_ok=True)


def _register_processors(auto: ModuleType) -> None:
    """Register the processors, which are found by the names of their classes, or by a configuration."""
    for native in NATIVE_MODELS.values():
        auto.AutoProcessor.register(_config_of(native), _stand_in(native, native.processor), exist_ok=True)


def _register_image_processors(auto: ModuleType) -> None:
    """Register the image processors in the mapping, because `AutoImageProcessor.register` takes no stand-ins."""
    for native in NATIVE_MODELS.values():
        if native.image_processor is not None:
            backends = dict.fromkeys(("torchvision", "pil"), _stand_in(native, native.image_processor))
            auto.IMAGE_PROCESSOR_MAPPING.register(_config_of(native), backends, exist_ok=True)


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_image_processors,
    "transformers.models.auto.processing_auto": _register_processors,
}


def register(imported: ModuleType | None = None) -> None:
    """Register the native models with the modules of Auto classes that transformers has imported."""
    for name, action in _ACTIONS.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            action(module)


class _AfterImport:
    """A finder that calls an action after a module is imported by Python's own finder.

    An action must not import anything from transformers, whose modules may be partly imported.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
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
            self._actions[fullname](module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def register_on_import() -> None:
    """Register the native models now, and whenever transformers or this package imports a class that it needs."""
    register()
    configurations = (f"mllm_seqpar.models.{native.package}.configuration" for native in NATIVE_MODELS.values())
    sys.meta_path.insert(0, _AfterImport(_ACTIONS | dict.fromkeys(configurations, register)))


CODE_MODULE = "mllm_seqpar_code"
_CODE = """\
# trust_remote_code=True loads the classes of the installed package mllm-seqpar.
from mllm_seqpar.models import {package}


def __getattr__(name):
    return getattr({package}, name)
"""


def auto_map(model_type: str) -> dict[str, str]:
    """Return the names of the classes in the file of `write_code`, by Auto class, as saved files state them."""
    native = NATIVE_MODELS[model_type]
    names = {
        "AutoConfig": native.config,
        **dict.fromkeys(native.autos, native.model),
        "AutoProcessor": native.processor,
    }
    if native.image_processor is not None:
        names["AutoImageProcessor"] = native.image_processor
    return {auto: f"{CODE_MODULE}.{name}" for auto, name in names.items()}


def write_code(directory: str | os.PathLike[str], model_type: str) -> dict[str, str]:
    """Write the file that `trust_remote_code=True` imports into a directory; return the `auto_map` that names it."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, f"{CODE_MODULE}.py"), "w", encoding="utf-8") as file:
        file.write(_CODE.format(package=NATIVE_MODELS[model_type].package))
    return auto_map(model_type)


class LocalCode:
    """Base of the native classes: their source is not copied into saved directories as remote code."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a class that is registered as remote code would copy its source into the directories that it
        saves."""


class SavedWithCode(LocalCode):
    """Base of the native configurations and image processors, before a class of transformers."""

    model_type: ClassVar[str]

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Write the JSON file, and what `trust_remote_code=True` loads the directory with (`write_code`)."""
        self.auto_map = write_code(save_directory, self.model_type)
        return super().save_pretrained(save_directory, push_to_hub, **kwargs)  # type: ignore[misc]
