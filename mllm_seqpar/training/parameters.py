"""The choice of parameters that train, and their groups for the optimizer."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.errors import ConfigError

PARTS = {
    "vision": ("vision_model", "vision_tower", "visual", "model.vision_model", "vision_encoder"),
    "projector": (
        *("vision2text_model", "multi_modal_projector", "model.multi_modal_projector"),
        *("model.perceiver_resampler", "perceiver"),
    ),
    "language": (
        *("language_model", "text_model", "model.language_model", "lang_encoder", "lm_head"),
        *("model.embed_tokens", "model.layers", "model.gated_cross_attn_layers", "model.norm"),
    ),
}
"""Module names of each part over all model families; a part is all of these modules that the model has."""

_log = get_logger(__name__)


def choose_parameters(model: nn.Module, freeze: str, train: str) -> None:
    """Set `requires_grad` to False for the parameters that `freeze` names and `train` does not, else to True.

    Args:
        model: as loaded, before it is sharded.
        freeze: names of `PARTS`, module paths, or patterns of parameter names with * and ?, comma-separated.
        train: the same; takes precedence over `freeze`.

    Raises:
        ConfigError: if a name matches nothing, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen, trained = _matched(model, names, freeze, "--freeze"), _matched(model, names, train, "--train")
    if trained and not trained & frozen:
        raise ConfigError(f"--train {train}: --freeze {freeze!r} covers none of these parameters; leave it out")
    frozen -= trained
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if len(frozen) == len(names):
        raise ConfigError(f"--freeze {freeze}: nothing is left to train; freeze less or name parts with --train")
    if frozen:
        _log.info("%d of %d parameter tensors are frozen", len(frozen), len(names))


def _matched(model: nn.Module, names: list[str], selection: str, flag: str) -> set[str]:
    matched: set[str] = set()
    if selection and not selection.replace(",", "").strip():
        raise ConfigError(f"{flag} {selection!r}: names nothing; leave it out, or give {', '.join(PARTS)}")
    for item in filter(None, (part.strip() for part in selection.split(","))):
        prefixes = [name for name in PARTS.get(item, (item,)) if _has_module(model, name)]
        found = {name for name in names if name.startswith(tuple(prefix + "." for prefix in prefixes))}
        found |= {name for name in names if fnmatchcase(name, item)}
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"{flag} {item}: no parameter of {type(model).__name__} matches; give {', '.join(PARTS)}, a module "
                f"path (below {children}) or a pattern such as '*.gate'"
            )
        matched |= found
    return matched


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups of trained parameters: only matrices have weight decay, not norms, biases and gates."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
