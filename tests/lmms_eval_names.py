"""The module of the models for lmms-eval, imported without lmms-eval."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MODULE = "mllm_seqpar.inference.lmms_eval_model"
NAMES = {
    "lmms_eval": (),
    "lmms_eval.api": (),
    "lmms_eval.api.instance": ("GenerationResult", "Instance"),
    "lmms_eval.api.model": ("lmms",),
}


@contextmanager
def lmms_eval_model() -> Iterator[Any]:
    """Yield the module, with empty classes for the names that it imports of lmms-eval."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, members in NAMES.items():
        vars(modules[name]).update({member: type(member, (), {}) for member in members})
    before = {name: sys.modules.pop(name, None) for name in (*NAMES, MODULE)}
    sys.modules.update(modules)
    try:
        yield importlib.import_module(MODULE)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
