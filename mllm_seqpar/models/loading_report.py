"""The check that a checkpoint and a model have the same weights, shared by all loaders."""

from collections.abc import Iterable, Mapping
from typing import Any

from mllm_seqpar.errors import DataError

_SHOWN = 4


def require_clean(report: Any, what: str, *, expected: str = "", ignore: Iterable[str] = ()) -> None:
    """Raise if loading left weights out, found weights that the model does not have, or found other shapes.

    transformers initialises missing weights randomly and drops unexpected ones, both with a warning only. To get the
    mismatched shapes into the report, load with `ignore_mismatched_sizes=True`.

    Args:
        report: what `from_pretrained(..., output_loading_info=True)` or `load_state_dict` returned.
        what: the checkpoint, as the user named it; the message begins with it.
        expected: the model that the weights were expected for, for the message.
        ignore: names that may be missing or unexpected.

    Raises:
        DataError: the weights differ; the message names the first of them.
    """
    parts = report if isinstance(report, Mapping) else vars(report) if hasattr(report, "__dict__") else report._asdict()
    allowed = set(ignore)
    missing = sorted(set(map(str, parts.get("missing_keys") or ())) - allowed)
    unexpected = sorted(set(map(str, parts.get("unexpected_keys") or ())) - allowed)
    shapes = sorted(_shapes(entry) for entry in parts.get("mismatched_keys") or ())
    errors = [*map(str, parts.get("error_msgs") or ()), *map(str, parts.get("conversion_errors") or ())]
    found = [
        f"{text} {len(names)} {'tensor' if len(names) == 1 else 'tensors'} ({_first(names)})"
        for text, names in (
            ("it lacks", missing),
            ("the model does not have", unexpected),
            ("other shapes have", shapes),
            ("loading failed for", errors),
        )
        if names
    ]
    if found:
        raise DataError(
            f"{what}: the checkpoint's weights are not the model's: {'; '.join(found)}. Expected exactly the weights "
            f"of {expected or 'the model that its config.json describes'}: check that the checkpoint is complete and "
            "that config.json belongs to it"
        )


def _shapes(entry: Any) -> str:
    if not isinstance(entry, tuple) or len(entry) != 3:
        return str(entry)
    name, stored, wanted = entry
    return f"{name}: {tuple(stored)} in the checkpoint, {tuple(wanted)} in the model"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
