"""Every dependence on the version of another package, with its reason and the condition for its removal.

No other module compares version numbers. Private names imported from other packages are used only here and in the
modules of `INTERNALS`; a test enforces this. It does not see private methods of objects: `generation`, `tower`
and the family of Qwen-VL replace or read a few of transformers' `generate` and of DDP. `patch_model` checks the oldest
supported versions, so that an old installation gives one clear error and not an AttributeError deep inside a forward
pass.
"""

import argparse
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from .errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

MINIMUM = {
    "torch": "2.11",
    "transformers": "5.17",
    "accelerate": "1.15",
}
"""Oldest supported version by package, the same as in pyproject.toml."""


INTERNALS = {
    "attention/kept_results": "torch's hooks and frame of a checkpointed region: nothing public says that a region "
    "runs, or is recomputed, so attention would be computed again in backward",
    "comm/transfer_group": "torch's making of one process group by its ranks alone: `new_group` is a collective of the "
    "whole world, and splits the default group",
    "fsdp_units": "the state of an FSDP2 unit: its parameters are gathered when the unit is called, and layers "
    "call only parts of it",
}
"""The modules that import private names of other packages, besides this one, with the reason. `kernels` and `models`
call operators and model classes, whose names begin with an underscore too."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A workaround for the behaviour of another package up to some version.

    Attributes:
        package: the distribution.
        fixed_in: the first version that does not need the workaround, or None if no release is known.
        reason: what fails without it.
        delete_when: the condition for deleting this gate and the code behind it.
    """

    package: str
    fixed_in: str | None
    reason: str
    delete_when: str

    def applies(self) -> bool:
        return self.fixed_in is None or installed(self.package) < release(self.fixed_in)


FSDP_ON_CPU = Gate(
    package="accelerate",
    fixed_in=None,
    reason="accelerate enables FSDP for accelerators only: on CPU the same config silently gives DDP, with every "
    "parameter whole on every rank",
    delete_when="accelerate keeps DistributedType.FSDP for cpu=True; then raise MINIMUM and do not assign the state",
)

PARALLELISM_ON_CPU = Gate(
    package="accelerate",
    fixed_in=None,
    reason="accelerate rejects a ParallelismConfig of more than one rank on CPU",
    delete_when="Accelerator(cpu=True, parallelism_config=...) works over gloo; then pass it and assign nothing",
)

CP_HOOKS = Gate(
    package="accelerate",
    fixed_in=None,
    reason="with cp_size > 1 accelerate's prepare adds hooks to every self-attention that drop its mask, and a context "
    "manager that replaces torch's attention; its mesh is not available without them",
    delete_when="accelerate has a cp_backend that does not change the model; then select that",
)

FLATTENED_MESH = Gate(
    package="accelerate",
    fixed_in=None,
    reason="accelerate's prepare takes the mesh of FSDP2 by the name of a flattened dimension, of which torch warns "
    "once on every rank; the user can change neither",
    delete_when="accelerate keeps the flattened mesh itself; then let torch warn",
)

REFORMAT_THREADS = Gate(
    package="av",
    fixed_in="17",
    reason="VideoReformatter.reformat does not have the argument `threads`; it uses one thread",
    delete_when='the extra "video" requires av>=17; then always pass threads=1',
)

SINGLE_TENSOR_COLLECTIVES = Gate(
    package="torch",
    fixed_in="2.13",
    reason="all_gather_single and reduce_scatter_single do not exist; all_gather_into_tensor and "
    "reduce_scatter_tensor do the same, and warn that they are deprecated from 2.13 on",
    delete_when="MINIMUM of torch is 2.13; then call the new functions",
)

CACHE_IS_PAST_KEY_VALUES = Gate(
    package="transformers",
    fixed_in="5.24",
    reason="modules take the cache as `past_key_values` and not as `cache`, and outputs have a field of that name",
    delete_when="MINIMUM of transformers is 5.24; then write `cache`, and keep `takes_cache` as long as transformers "
    "accepts the former name",
)

CACHE_DROPPED_WITHOUT_GRADIENTS = Gate(
    package="transformers",
    fixed_in="5.24",
    reason="in training mode, layers with gradient checkpointing drop the cache even if no gradients are computed",
    delete_when="MINIMUM of transformers is 5.24; then `drops_cache` needs no gate",
)


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version without trailing zeros: "2.11.0+cpu" -> (2, 11).

    Pre-releases and local builds count as their release, because nightly builds behave like it.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise ConfigError(
            f"version {version!r} does not begin with numbers; expected something like '2.11' or '2.11.0+cpu'"
        )
    numbers = [int(part) for part in match.group(1).split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


@functools.cache
def installed(package: str) -> tuple[int, ...]:
    """Return the release numbers of an installed package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return release(metadata.version(package))
    except metadata.PackageNotFoundError as error:
        needed = f">={MINIMUM[package]}" if package in MINIMUM else ""
        raise ConfigError(f"{package} is not installed; run: pip install '{package}{needed}'") from error


def check_versions() -> None:
    """Raise ConfigError if a package of `MINIMUM` is missing or too old; the message says what to install."""
    old = [package for package, minimum in MINIMUM.items() if installed(package) < release(minimum)]
    if old:
        installed_versions = ", ".join(
            f"{package} {metadata.version(package)} (needs {MINIMUM[package]} or later)" for package in old
        )
        upgrade = " ".join(f"'{package}>={MINIMUM[package]}'" for package in old)
        raise ConfigError(f"too old for mllm-seqpar: {installed_versions}; run: pip install --upgrade {upgrade}")


def optional_import(module: str, *, extra: str, needed_for: str) -> ModuleType:
    """Import and return a module that an extra of this package installs.

    Args:
        module: the import name, for example "av".
        extra: the extra, for example "video".
        needed_for: what the module is needed for, for the message.

    Raises:
        ConfigError: the module is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the module is installed, but a dependency of it is not
        raise ConfigError(
            f"{needed_for} needs the module {module!r}, which is not installed; run: pip install 'mllm-seqpar[{extra}]'"
        ) from error


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return a cache as a keyword argument of transformers' modules, masks and outputs, by its name there."""
    return {cache_name(): cache}


@functools.cache
def cache_name() -> str:
    return "past_key_values" if CACHE_IS_PAST_KEY_VALUES.applies() else "cache"


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate`."""
    return getattr(output, cache_name())


def takes_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function with a parameter `cache`, so that it also takes `past_key_values`, the name before 5.24.

    The signature has the name that the installed transformers uses.

    Raises:
        ConfigError: from the decorated function, if it is called with both.
    """

    @functools.wraps(function)
    def with_either_name(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            former = kwargs.pop("past_key_values")
            if former is not None and kwargs.get("cache") is not None:
                raise ConfigError(
                    "cache and past_key_values are two names of one argument, and both were given. If they come from "
                    "PEFT's prefix tuning: it cannot generate with this version of transformers, which would ignore "
                    "the prefix; otherwise pass only cache"
                )
            kwargs["cache"] = former if kwargs.get("cache") is None else kwargs["cache"]
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    parameters = [x.replace(name=cache_name()) if x.name == "cache" else x for x in signature.parameters.values()]
    with_either_name.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_either_name


def drops_cache(module: Any) -> bool:
    """Return whether a module runs its layers without the cache, because it checkpoints them."""
    import torch

    checkpoints = module.training and getattr(module, "gradient_checkpointing", False)
    return bool(checkpoints) and (torch.is_grad_enabled() or CACHE_DROPPED_WITHOUT_GRADIENTS.applies())


def graph_task() -> int:
    """Return the number of the backward pass that runs in this thread, or -1. torch has no public name for it."""
    import torch

    return torch._C._current_graph_task_id()


def reducing_ddp() -> Any:
    """Return the DistributedDataParallel whose forward runs, if it reduces the gradients of this pass; else None.

    A model does not refer to the DDP around it. Within `ddp.join()` (`_join_config.enable`) other ranks may have run
    out of batches, and answer to no more than DDP.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel._get_active_ddp_module()
    return ddp if ddp is not None and torch.is_grad_enabled() and ddp.require_backward_grad_sync else None


def dropout_class() -> Any:
    """Return the base class of torch's dropout layers, which have a probability `p`."""
    from torch import nn

    return nn.modules.dropout._DropoutNd


def global_module_hooks() -> list[Any]:
    """Return the hooks that every module calls; they can only be registered in public."""
    from torch.nn.modules import module

    tables: tuple[dict[Any, Any], ...] = (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
    )
    return [hook for table in tables for hook in table.values()]


def model_class_of(auto: Any, config: Any) -> Any:
    """Return the class that a transformers Auto class builds for a configuration, or None.

    The Auto class itself can only build or load a model.
    """
    return auto._model_mapping[type(config)] if type(config) in auto._model_mapping else None


def prepared_models(accelerator: Any) -> list[Any]:
    """Return the models that `accelerator.prepare` has prepared."""
    return accelerator._models


def keep_attention(accelerator: Any) -> None:
    """Make `accelerator.prepare` leave attention and masks unchanged for any `cp_size` (`CP_HOOKS`)."""
    if not hasattr(accelerator, "_prepare_cp"):
        raise ConfigError(
            "this version of accelerate has no Accelerator._prepare_cp, which is where its own context parallelism can "
            "be disabled; mllm_seqpar/_compat.py supports accelerate 1.15"
        )
    accelerator._prepare_cp = lambda *objects: objects


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` such that torch.compile runs it eagerly, in a graph break.

    Traced, host-side planning would be compiled again for every shape and mask, and collectives would be replaced. This
    is torch.compiler.disable without its cost for callers that do not compile: its import takes as long as the whole
    rest of this package.
    """
    from torch import compiler

    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a parser by their names, which argparse has no public list of."""
    return parser._option_string_actions


def may_repeat(option: argparse.Action) -> bool:
    """Return whether an option may be given several times."""
    return isinstance(option, (argparse._AppendAction, argparse._HelpAction))


def turns_off(option: argparse.Action) -> bool:
    """Return whether an option stores False."""
    return isinstance(option, argparse._StoreFalseAction)
