"""A pytest plugin for other projects' tests: every model of a patched family is patched as soon as it is made.

transformers' own model tests, on one process, with the models patched; from a clone of transformers in the version that
is installed:

    PYTHONPATH=/path/to/mllm-seqpar/tests python -m pytest -p patched_models \
        tests/models/idefics/test_modeling_idefics.py tests/models/mllama/test_modeling_mllama.py

Without ``-p patched_models`` the same command runs them unpatched, for comparison.
"""

import copy
import functools
from typing import Any

import pytest
import transformers

from mllm_seqpar import patch_model, unpatch_model

FAMILIES = ("IdeficsForVisionText2Text", "MllamaForConditionalGeneration")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    for name in FAMILIES:
        _patch_when_made(getattr(transformers, name))


def _patch_when_made(kind: Any) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        patch_model(self)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        """The tests copy models, which a patched one refuses: it is copied unpatched, and the copy patched anew."""
        unpatch_model(self)
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        vars(twin).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items()})
        patch_model(self)
        return patch_model(twin)

    kind.__init__ = made
    kind.__deepcopy__ = copied
