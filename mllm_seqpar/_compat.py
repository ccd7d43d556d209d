"""Every place where a version of another package matters, each with its reason and what lets us delete it.

Nothing elsewhere compares version numbers. The oldest supported versions are checked when a model is patched, so that
an old installation ends in one sentence and not in an AttributeError deep inside a forward pass.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType

from .errors import ConfigError

MINIMUM = {
    "torch": "2.11",
    "transformers": "5.17",
    "accelerate": "1.15",
}
"""Oldest supported version by package; the same numbers as in pyproject.toml."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A workaround for what another package does up to some version.

    Attributes:
        package: the distribution whose behaviour it works around.
        fixed_in: the first version that no longer needs it, or None while no release is known to.
        reason: what goes wrong without it.
        delete_when: the condition under which this gate and the code behind it go.
    """

    package: str
    fixed_in: str | None
    reason: str
    delete_when: str

    def applies(self) -> bool:
        """Whether the installed version still needs the workaround."""
        return self.fixed_in is None or installed(self.package) < release(self.fixed_in)


FSDP_ON_CPU = Gate(
    package="accelerate",
    fixed_in=None,
    reason="accelerate enables FSDP for accelerators only: on CPU the same config silently gives DDP, with every "
    "parameter whole on every rank",
    delete_when="accelerate keeps DistributedType.FSDP for cpu=True; then raise MINIMUM and stop assigning the state",
)

PARALLELISM_ON_CPU = Gate(
    package="accelerate",
    fixed_in=None,
    reason="accelerate refuses a ParallelismConfig of more than one rank when it is made for CPU",
    delete_when="Accelerator(cpu=True, parallelism_config=...) works over gloo; then pass it, and assign nothing",
)

CP_HOOKS = Gate(
    package="accelerate",
    fixed_in=None,
    reason="with cp_size > 1 accelerate's prepare puts hooks on every self-attention that drop its mask, and prepares "
    "a context manager that replaces torch's attention; its mesh cannot be had without them",
    delete_when="accelerate has a cp_backend that leaves the model alone; then ask for that",
)


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without trailing zeros: "2.11.0+cpu" -> (2, 11).

    Pre-releases and local builds count as their release, which is what a nightly build behaves like.
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


@cache
def installed(package: str) -> tuple[int, ...]:
    """The release numbers of an installed package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return release(metadata.version(package))
    except metadata.PackageNotFoundError as error:
        needed = f">={MINIMUM[package]}" if package in MINIMUM else ""
        raise ConfigError(f"{package} is not installed; run: pip install '{package}{needed}'") from error


def check_versions() -> None:
    """Refuses packages older than the oldest supported ones, naming each, what was found and what to install.

    Raises:
        ConfigError: one of `MINIMUM` is missing or too old.
    """
    old = [package for package, minimum in MINIMUM.items() if installed(package) < release(minimum)]
    if old:
        found = ", ".join(
            f"{package} {metadata.version(package)} (needs {MINIMUM[package]} or later)" for package in old
        )
        upgrade = " ".join(f"'{package}>={MINIMUM[package]}'" for package in old)
        raise ConfigError(f"too old for mllm-seqpar: {found}; run: pip install --upgrade {upgrade}")


def optional_import(module: str, *, extra: str, needed_for: str) -> ModuleType:
    """Imports a module that only an extra installs, at the moment it is needed.

    Args:
        module: the module's import name, for example "av".
        extra: the extra of this package that installs it, for example "video".
        needed_for: what the caller was about to do, for the message.

    Raises:
        ConfigError: the module is missing, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the module is there and misses something of its own
        raise ConfigError(
            f"{needed_for} needs the module {module!r}, which is not installed; run: pip install 'mllm-seqpar[{extra}]'"
        ) from error
