"""The ways to compute one call that `network.py` times, and what each must send.

A mode is a line of `modes`: a strategy, its tile, and how it is run. It runs as a layer of a patched model does: by the
plan that is made for it, the ranks having agreed on their arguments before, once for all layers of a pass. Beside the
strategies stands `none`: the same blocks on the same rank by the same executor, without transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from network_settings import Setting
from torch import Tensor

from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.kv_sources import GivenKV
from mllm_seqpar.attention.call_spec import accumulation, call_spec_for, problem_of
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import FullBlockMasks
from mllm_seqpar.planner import Cluster, ParallelSpec, blocks_to_hide
from mllm_seqpar.schedules import AttentionBlock, Schedule, Step
from mllm_seqpar.schedules.bytes_sent import Problem, expanded, mesh_bytes, ulysses_bytes
from mllm_seqpar.schedules.mesh_shapes import tiles_of


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to compute a call.

    Attributes:
        name: in rows and tables.
        way: as the planner and the formulas know it; None: nothing travels.
        overlap: transfers under computation.
        expanded: K and V are repeated for all query heads before, as the paper's ring had them.
        accumulate_dtype: what partial results travel in; None: as the inputs.
    """

    name: str
    way: ParallelSpec | None
    overlap: bool = True
    expanded: bool = False
    accumulate_dtype: torch.dtype | None = torch.float32

    def run(self, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, kernel: str, where: Cluster | None) -> Tensor:
        """This rank's o (B, H, s, D); `where`: the network, which the steps of a mesh are ordered for, as auto does."""
        keys, dtype = (k.shape[2],) * comm.size, accumulation(self.accumulate_dtype, q.dtype)
        blocks = FullBlockMasks(q.shape[0], q.shape[2], keys)
        plan: CallSpec
        if self.way is None:
            plan = _Alone((1, 1), blocks, keys, dtype, ranks=comm.size)
        else:
            problem = problem_of(q.shape, k.shape, keys, q.dtype, self.accumulate_dtype)
            overlap_ratios = None
            if where is not None and self.way.strategy == "mesh":
                forward, backward = (blocks_to_hide(problem, self.way.tile, where, backward=b) for b in (False, True))
                overlap_ratios = forward, backward
            tile = self.way.tile if self.way.strategy in ("mesh", "ulysses") else None
            plan = call_spec_for(self.way.strategy, tile, blocks, problem, dtype, self.overlap, overlap_ratios)
        return attend(q, [GivenKV(plan, k, v)], comm=comm, scale=q.shape[-1] ** -0.5, kernel=kernel)[0]

    def problem(self, setting: Setting) -> Problem:
        """The call that it computes, as formulas know it."""
        problem = setting.problem(accumulated=4 if self.accumulate_dtype is not None else setting.problem().element)
        return expanded(problem) if self.expanded else problem

    def sent(self, setting: Setting, rank: int) -> dict[str, int]:
        """Bytes that the formulas say a rank sends, forward and backward, by label."""
        if self.way is None or setting.ranks == 1:
            return {}
        formula = ulysses_bytes if self.way.strategy == "ulysses" else mesh_bytes
        problem, total = replace(self.problem(setting), rank=rank), dict[str, int]()
        for backward in (False, True):
            for label, size in formula(problem, self.way.tile, backward=backward).items():
                total[label] = total.get(label, 0) + size
        return {label: size for label, size in total.items() if size}


def modes(setting: Setting) -> list[Mode]:
    """All that are measured in a setting; `none` is the first."""
    n = setting.ranks
    lv, ring, none = ParallelSpec("lv-xattn", (n, 1)), ParallelSpec("ring", (1, n)), Mode(name="none", way=None)
    if setting.only_tiles:
        return [none, *_tiles(tiles_of(n))]
    found = [
        none,
        Mode(name="lv-xattn", way=lv),
        Mode(name="lv-xattn, waiting", way=lv, overlap=False),
        Mode(name="ring", way=ring),
        Mode(name="ring, waiting", way=ring, overlap=False),
        # dK, dV in the inputs' dtype: the bytes that the paper's times fit
        Mode(name="ring, expanded", way=ring, expanded=True, accumulate_dtype=None),
    ]
    group = gcd(setting.heads, n)
    if group == n:
        found.append(Mode(name="ulysses", way=ParallelSpec("ulysses", (1, 1), n)))
    elif group > 1:  # heads that all ranks cannot share: as many as can, LV-XAttn over the groups
        found.append(Mode(name=f"ulysses {group} x lv-xattn", way=ParallelSpec("ulysses", (n // group, 1), group)))
    return found + _tiles(tiles_of(n)[1:-1])


def _tiles(tiles: Sequence[tuple[int, int]]) -> list[Mode]:
    return [Mode(name=f"tile {a}x{b}", way=ParallelSpec("mesh", (a, b))) for a, b in tiles]


@dataclass(frozen=True)
class _Alone(CallSpec):
    """As many blocks as any plan has, all of this rank's own rows and columns: o is that of its own keys."""

    ranks: int = 1

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        """One block a step, no moves; the whole of each."""
        return tuple(Step((), (AttentionBlock(rank, rank),)) for _ in range(self.ranks))
