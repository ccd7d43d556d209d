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
from collections.abc import Callable, Collection, Sequence
from functools import cache
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

    @property
    def configuration(self) -> str:
        """The name of the module with the configuration class."""
        return f"mllm_seqpar.models.{self.package}.configuration"

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

_AUTO_MODULES = (
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.processing_auto",
)


class _StandIn(type):
    """The type of a lazy proxy for a class of a native model, which is imported when an attribute is used."""

    native: NativeModel

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.native.named(cls.__name__), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.native.named(cls.__name__)(*args, **kwargs)


@cache
def _stand_in(native: NativeModel, name: str, **attributes: Any) -> Any:
    return _StandIn(name, (), {"native": native, "__module__": __name__, **attributes})


@cache
def _register_once(register: Callable[..., None], key: Any, value: Any, *backends: str) -> None:
    """Call a `register` method of transformers for a class, or for a dict of the class by backend.

    The cache makes each registration happen once, so that it does not replace one that a user has made since.
    """
    register(key, dict.fromkeys(backends, value) if backends else value, exist_ok=True)


def register(executed: ModuleType | None = None) -> None:
    """Register the native models with the modules of Auto classes that transformers has imported.

    Nothing is imported here, because modules of transformers may be partly imported. `executed` is a module that is
    complete, although Python still counts it among these.
    """

    def complete(name: str) -> Any:
        module = sys.modules.get(name)
        is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return module if module is executed or not is_partial else None

    configurations, models, images, processors = map(complete, _AUTO_MODULES)
    for model_type, native in NATIVE_MODELS.items():
        imported = getattr(sys.modules.get(native.configuration), native.config, None)
        config = _stand_in(native, native.config) if imported is None else imported
        if configurations is not None:
            _register_once(configurations.AutoConfig.register, model_type, config)
        if models is not None and imported is not None:  # needs its `model_type`
            for auto in native.autos:
                model = _stand_in(native, native.model, config_class=config)
                _register_once(getattr(models, auto).register, config, model)
        if images is not None and native.image_processor is not None:  # `AutoImageProcessor.register` takes no stand-in
            image_processor = _stand_in(native, native.image_processor)
            _register_once(images.IMAGE_PROCESSOR_MAPPING.register, config, image_processor, "torchvision", "pil")
        if processors is not None:
            _register_once(processors.AutoProcessor.register, config, _stand_in(native, native.processor))


class _AfterImport:
    """A finder that registers the native models after one of some modules is imported by Python's own finder."""

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_on_import() -> None:
    """Register the native models now, and whenever transformers or this package imports a class that it needs."""
    register()
    configurations = (native.configuration for native in NATIVE_MODELS.values())
    sys.meta_path.insert(0, _AfterImport({*_AUTO_MODULES, *configurations}))


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
