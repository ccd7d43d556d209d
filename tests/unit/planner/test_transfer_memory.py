"""Layer: one process. The planner's size of the receive buffers against the buffers that real calls leave allocated."""

import pytest
import torch

from attention_cases import Case, problem, run_case
from mllm_seqpar.planner.candidates import ParallelSpec
from mllm_seqpar.planner.memory import buffer_bytes, receive_buffers
from nccl_model import NcclCommunicator, run_nccl_model

BF16 = {"dtype": torch.bfloat16, "rows": 24, "frames": 12}
CALLS: dict[str, list[tuple[Case, ParallelSpec]]] = {
    "lv-xattn": [(Case(op="lv", **BF16), ParallelSpec("lv-xattn", (4, 1)))],
    "ring": [(Case(op="ring", **BF16), ParallelSpec("ring", (1, 4)))],
    "mesh": [(Case(op="mesh", tile=(2, 2), **BF16), ParallelSpec("mesh", (2, 2)))],
    "hybrid": [(Case(op="ulysses", tile=(2, 1), **BF16), ParallelSpec("ulysses", (2, 1), 2))],
    "ulysses": [(Case(op="ulysses", **BF16), ParallelSpec("ulysses", (1, 1), 4))],
    "all pairs": [(Case(op="direct", **BF16), ParallelSpec("lv-xattn", (4, 1), all_pairs=True))],
    "float32 results": [(Case(op="mesh", tile=(2, 2), accumulate=torch.float32, **BF16), ParallelSpec("mesh", (2, 2)))],
    "float32": [(Case(op="lv", rows=24, frames=12), ParallelSpec("lv-xattn", (4, 1)))],
    "text and frames": [
        (Case(op="ring", **BF16), ParallelSpec("ring", (1, 4))),
        (Case(op="causal", layout="zigzag", **BF16), ParallelSpec("ring", (1, 4))),
    ],
    "short text, other heads": [
        (Case(op="causal", **{**BF16, "rows": 8}), ParallelSpec("ring", (1, 4))),
        (Case(op="lv", heads=8, **BF16), ParallelSpec("lv-xattn", (4, 1))),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_receive_buffers_take_the_planned_bytes(name: str) -> None:
    calls = CALLS[name]

    def allocated(comm: NcclCommunicator) -> int:
        for _ in range(2):
            for case, _ in calls:
                run_case(comm, case)
        return comm.kept.buffers.nbytes

    planned = buffer_bytes(
        receive_buffers(problem(case, 4, 0), spec, backward=backward)
        for case, spec in calls
        for backward in (False, True)
    )
    assert run_nccl_model(4, allocated) == [planned] * 4
    assert planned > 0 or name == "ulysses"
