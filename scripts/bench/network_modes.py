"""The modes in which `network.py` computes one call, what each must send, and the time that the planner predicts.

A mode runs as a layer of a patched model does: from a `CallSpec` that is made for it, after the ranks have agreed on
their arguments. The mode `none` computes the same attention blocks with the same executor, but without transfers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import gcd

import torch
from network_settings import Setting
from torch import Tensor

from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.keys import CallSpec, GivenKeys, accumulation, call_spec_for, problem_of
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import FullBlockMasks
from mllm_seqpar.planner import Cluster, ParallelSpec, call_cost, overlap_ratios_by_rates
from mllm_seqpar.schedules import Schedule
from mllm_seqpar.schedules.bytes_sent import Problem, expanded, mesh_bytes, ulysses_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

Speed = tuple[float, float]
"""What a link delivers: bytes/s in each direction, and the seconds of a message of a few bytes."""
BlockTime = tuple[float, float]
"""Seconds of forward and backward of one block (one Q shard by one KV shard), measured without transfers."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    name: str
    spec: ParallelSpec | None  # None: no transfers
    overlap: bool = True
    expanded: bool = False  # K and V are repeated for all query heads first, as in the paper's Ring Attention
    accumulate_dtype: torch.dtype | None = torch.float32  # of partial results as sent; None: that of the inputs

    def run(self, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, kernel: str, network: Cluster | None) -> Tensor:
        """Return this rank's o (B, H, s, D). The steps of a mesh are ordered for `network`, as strategy "auto" does."""
        keys, dtype = (k.shape[2],) * comm.size, accumulation(self.accumulate_dtype, q.dtype)
        blocks = FullBlockMasks(q.shape[0], q.shape[2], keys)
        call: CallSpec
        if self.spec is None:
            call = _WithoutTransfers((1, 1), blocks, keys, dtype, ranks=comm.size)
        else:
            strategy, shape = self.spec.strategy, self.spec.mesh_shape
            problem = problem_of(q.shape, k.shape, keys, q.dtype, self.accumulate_dtype)
            ratios = None
            if network is not None and strategy == "mesh":
                forward, backward = (
                    overlap_ratios_by_rates(problem, shape, network, backward=b) for b in (False, True)
                )
                ratios = forward, backward
            tile = shape if strategy in ("mesh", "ulysses") else None
            call = call_spec_for(strategy, tile, blocks, problem, dtype, self.overlap, ratios)
        return attend(q, [GivenKeys(call, k, v)], comm=comm, scale=q.shape[-1] ** -0.5, kernel=kernel)[0]

    def problem(self, setting: Setting) -> Problem:
        problem = setting.problem()
        if self.accumulate_dtype is None:
            problem = replace(problem, accumulated=problem.element)
        return expanded(problem) if self.expanded else problem

    def bytes_sent(self, setting: Setting, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in forward and backward together, by label, according to the formulas."""
        if self.spec is None or setting.ranks == 1:
            return {}
        formula = ulysses_bytes if self.spec.strategy == "ulysses" else mesh_bytes
        problem, total = replace(self.problem(setting), rank=rank), Counter[str]()
        for backward in (False, True):
            total.update(formula(problem, self.spec.mesh_shape, backward=backward))
        return {label: size for label, size in total.items() if size}

    def predicted_s(self, setting: Setting, block: BlockTime, speed: Speed | None) -> float:
        """Return the seconds of forward and backward according to the planner's cost model."""
        if self.spec is None or speed is None:
            return setting.ranks * sum(block)
        network, problem = cluster(setting, block, speed), self.problem(setting)
        passes = [call_cost(problem, self.spec, network, backward=b, overlap=self.overlap) for b in (False, True)]
        return sum(cost.seconds for cost in passes)


def modes(setting: Setting) -> list[Mode]:
    """Return all modes that are measured in a setting, `none` first."""
    n = setting.ranks
    none = Mode(name="none", spec=None)
    meshes = [Mode(name=f"tile {a}x{b}", spec=ParallelSpec("mesh", (a, b))) for a, b in mesh_shapes_of(n)]
    if setting.only_mesh_shapes:
        return [none, *meshes]
    lv, ring = ParallelSpec("lv-xattn", (n, 1)), ParallelSpec("ring", (1, n))
    found = [
        none,
        Mode(name="lv-xattn", spec=lv),
        Mode(name="lv-xattn, waiting", spec=lv, overlap=False),
        Mode(name="ring", spec=ring),
        Mode(name="ring, waiting", spec=ring, overlap=False),
        # dK, dV in the inputs' dtype: the bytes that agree with the paper's times
        Mode(name="ring, expanded", spec=ring, expanded=True, accumulate_dtype=None),
    ]
    group = gcd(setting.heads, n)
    if group > 1 or n == 1:  # heads are sharded over as many ranks as divide them, LV-XAttn runs between these groups
        name = "ulysses" if group == n else f"ulysses {group} x lv-xattn"
        found.append(Mode(name=name, spec=ParallelSpec("ulysses", (n // group, 1), group)))
    return found + meshes[1:-1]  # without (n, 1) and (1, n), which are LV-XAttn and Ring Attention


def cluster(setting: Setting, block: BlockTime, speed: Speed) -> Cluster:
    """Return the network as the planner describes it, with one rank per node."""
    entries = setting.rows * setting.keys * setting.heads * setting.dim
    bandwidth, latency = speed
    links = {"node_link": bandwidth, "network_link": bandwidth, "node_latency_s": latency, "network_latency_s": latency}
    rates = {"attention_forward": 4 * entries / block[0], "attention_backward": 10 * entries / block[1]}
    return Cluster(name="benchmark", gpus_per_node=1, **rates, matmul=1.0, memory_bytes=1.0, **links)


@dataclass(frozen=True)
class _WithoutTransfers(CallSpec):
    """Computes the local block as many times as there are ranks; o is the attention to the local KV shard."""

    ranks: int = 1

    def steps(self, comm: Communicator, q: Tensor, k: Tensor, kernel: str, *, backward: bool) -> Schedule:
        return super().steps(comm, q, k, kernel, backward=backward) * self.ranks
