"""Selection of the parameters to train."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError

_log = get_logger(__name__)


Parts = Mapping[str, Sequence[str]]
"""Names of the parts of a model, each with its module paths (`Family.parts`)."""


def choose_parameters(model: nn.Module, freeze: Sequence[str], train: Sequence[str], parts: Parts) -> list[str]:
    """Set `requires_grad` to False for parameters that `freeze` names and `train` does not, and to True for all others.

    Args:
        model: as loaded, before it is sharded.
        freeze: names of `parts`, module paths, or patterns of parameter names with * and ?.
        train: the same; takes precedence over `freeze`.
        parts: of this model.

    Returns:
        The names of the frozen parameters.

    Raises:
        ConfigError: if a name matches nothing, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen, trained = _matched(model, names, freeze, parts, "--freeze"), _matched(model, names, train, parts, "--train")
    if trained and not trained & frozen:
        raise ConfigError(f"--train {' '.join(train)}: --freeze {' '.join(freeze)} covers none of these; leave it out")
    frozen -= trained
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if len(frozen) == len(names):
        raise ConfigError(
            f"--freeze {' '.join(freeze)}: nothing is left to train; freeze less or name parts with --train"
        )
    if frozen:
        _log.info("%d of %d parameter tensors are frozen", len(frozen), len(names))
    return sorted(frozen)


def _matched(model: nn.Module, names: list[str], selection: Sequence[str], parts: Parts, flag: str) -> set[str]:
    matched: set[str] = set()
    for item in (part.strip() for entry in selection for part in entry.split(",")):
        prefixes = [name for name in parts.get(item, (item,)) if item and _has_module(model, name)]
        found = {name for name in names if name.startswith(tuple(prefix + "." for prefix in prefixes))}
        found |= {name for name in names if fnmatchcase(name, item)}
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            choices = ", ".join([*parts, f"a module path (below {children})"])
            raise ConfigError(
                f"{flag} {item!r}: no parameter of {type(model).__name__} matches; give {choices} or a pattern such as "
                "'*.gate'"
            )
        matched |= found
    return matched


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
