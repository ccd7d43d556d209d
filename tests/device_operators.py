"""Count the operators that reach the device, for machines without a GPU.

with fake_cuda(), DeviceOperators() as found:
    y = x[1:] + 1        # the view is not counted, the addition is
assert found.total() == 1
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class DeviceOperators(TorchDispatchMode):
    """Counts operators by name; those that only allocate or make a view are left out.

    Each Triton launch of a block is within one operator of `mllm_seqpar`, which `LAUNCHES` counts.
    """

    LAUNCHES = {"interval_attention_backward": 2}

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def total(self) -> int:
        return sum(self.found.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        if func.namespace == "prim":
            return result
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and name not in ALLOCATIONS and any(x.is_cuda for x in _tensors(args, kwargs, result)):
            self.found[name] += self.LAUNCHES.get(name, 1)
        return result


def _tensors(*trees: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(trees) if isinstance(x, Tensor)]
