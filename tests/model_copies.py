"""Copies of tiny models. Building a model takes ten times as long as copying one, and loading it thirty times."""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.models import loading
from tiny_models import mplug_owl3


class ModelCopies:
    """Makes copies of `model`, which must not change afterwards, in a fifth of the time of `copy.deepcopy`.

    Threads may share it. A copy has tensors of its own, and shares functions and classes with the model, as with
    `copy.deepcopy`.
    """

    def __init__(self, model: nn.Module) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(model)
        self._pickled, self._beside = file.getvalue(), [value for _, value in pickler.beside.values()]

    def new(self) -> Any:
        return _Unpickler(self._pickled, self._beside).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.beside: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (Tensor, FunctionType, type)):
            return None
        number, _ = self.beside.setdefault(id(value), (len(self.beside), value))
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, beside: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._beside, self._copies = beside, dict[int, Tensor]()

    def persistent_load(self, number: int) -> Any:
        found = self._beside[number]
        if not isinstance(found, Tensor):
            return found
        if number not in self._copies:  # tied weights are one tensor
            copy = found.detach().clone()
            parameter = isinstance(found, nn.Parameter)
            self._copies[number] = nn.Parameter(copy, found.requires_grad) if parameter else copy
        return self._copies[number]


_building = threading.Lock()
"""Held while a model is built, because ranks that are threads share torch's random state, and `from_pretrained` changes
more state of the process while it runs."""
_built: dict[tuple[Callable[..., nn.Module], str], ModelCopies] = {}


def copy_of(build: Callable[..., nn.Module], *args: Any, **overrides: Any) -> Any:
    """Return a copy of `build(*args, **overrides)`, which is built once; torch's random state does not change."""
    key = build, repr((args, sorted(overrides.items())))
    with _building:
        if key not in _built:
            with torch.random.fork_rng(devices=[]):
                _built[key] = ModelCopies(build(*args, **overrides))
    return _built[key].new()


tiny_model = functools.partial(copy_of, mplug_owl3.tiny_model)
"""Takes the arguments of `tiny_models.mplug_owl3.tiny_model`, and returns a copy of that model."""


load_model = functools.partial(copy_of, loading.load_model)
"""Takes the arguments of `loading.load_model`, and returns a copy; the directory must not change afterwards."""
