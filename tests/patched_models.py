"""A pytest plugin for other projects' tests: every new model of a supported family is patched.

It runs transformers' own model tests on one process with patched models, from a clone of the installed version:

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
    """Replace the constructors before any test module is imported."""
    for name in FAMILIES:
        _patch_new_instances(getattr(transformers, name))


def _patch_new_instances(kind: Any) -> None:
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        patch_model(self)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        """Copy the unpatched model and patch the copy: the tests copy models, which a patched model refuses."""
        unpatch_model(self)
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        vars(twin).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items()})
        patch_model(self)
        return patch_model(twin)

    kind.__init__ = constructed
    kind.__deepcopy__ = copied
