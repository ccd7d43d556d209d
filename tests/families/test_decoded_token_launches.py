"""Layer: one process. Operators that are launched for each decoded token, patched against unpatched."""

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from family_cases import BATCHES
from mllm_seqpar import patch_model
from tiny_models import tiny_model

VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"}
VIEWS |= {
    "detach",
    "alias",
    "as_strided",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "lift_fresh",
    "promote_types",
}
"""Operators without a launch."""
FEW, MANY = 4, 8
ALLOWED = 4
"""Launches of a token beyond those of the unpatched model, for all layers."""


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        found = result if isinstance(result, (tuple, list)) else [result]
        floating = any(isinstance(x, Tensor) and x.is_floating_point() for x in found)
        self.found[name] += name not in VIEWS and floating  # the mask of a row, in integers, is made on the host
        return result


def launches_of_a_token(model: Any, inputs: dict[str, Any]) -> float:
    counts = []
    for tokens in (FEW, MANY):
        with Launches() as launches, torch.no_grad():
            model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        counts.append(launches.found.total())
    return (counts[1] - counts[0]) / (MANY - FEW)


@pytest.mark.parametrize("family", ["mplug_owl3", "mllama", "qwen2_5_vl"])
def test_token_has_few_launches_beyond_those_of_the_unpatched_model(family: str) -> None:
    model = tiny_model(family).eval()
    case = BATCHES[family].__class__(labels=None)
    inputs = import_module(f"tiny_models.{family}").inputs_of(case, model)
    unpatched = launches_of_a_token(model, inputs)
    patched = launches_of_a_token(patch_model(model), inputs)
    assert patched <= unpatched + ALLOWED
