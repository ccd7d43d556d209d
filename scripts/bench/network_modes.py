"""The ways to compute one call that `network.py` times, and what each must send.

A mode is a line of `modes`: a strategy of `mllm_seqpar.attention` and its options. Beside them stands `none`: the same
blocks on the same rank by the same executor, without transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from network_settings import Setting
from torch import Tensor

from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.attention.distributed import Plan
from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.planning import accumulation, plan_for, problem_of
from mllm_seqpar.attention.sources import GivenKeys
from mllm_seqpar.comm import Communicator
from mllm_seqpar.masks import FullBlocks
from mllm_seqpar.planner import Cluster, Way, blocks_to_hide
from mllm_seqpar.schedules import Block, Schedule, Step
from mllm_seqpar.schedules.strategies import tiles_of
from mllm_seqpar.schedules.traffic import Problem, expanded, mesh_bytes, ulysses_bytes


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to compute a call.

    Attributes:
        name: in rows and tables.
        way: as the planner and the formulas know it; None: nothing travels.
        attention: the function of the functional layer.
        options: its further arguments.
        overlap: transfers under computation.
        expanded: K and V are repeated for all query heads before, as the paper's ring had them.
        accumulate_dtype: what partial results travel in; None: as the inputs.
    """

    name: str
    way: Way | None
    attention: Callable[..., Tensor]
    options: tuple[tuple[str, object], ...] = ()
    overlap: bool = True
    expanded: bool = False
    accumulate_dtype: torch.dtype | None = torch.float32

    def run(self, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, kernel: str, where: Cluster | None) -> Tensor:
        """This rank's o (B, H, s, D); `where`: the network, for those that order their transfers by it."""
        how = dict(self.options) | {"overlap": self.overlap, "accumulate_dtype": self.accumulate_dtype}
        if self.attention is tiled:
            how["where"] = where
        return self.attention(q, k, v, group=comm, kernel=kernel, **how)

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
    lv, ring, none = Way("lv-xattn", (n, 1)), Way("ring", (1, n)), Mode(name="none", way=None, attention=alone)
    if setting.only_tiles:
        return [none, *_tiles(tiles_of(n))]
    found = [
        none,
        Mode(name="lv-xattn", way=lv, attention=lv_xattn),
        Mode(name="lv-xattn, waiting", way=lv, attention=lv_xattn, overlap=False),
        Mode(name="ring", way=ring, attention=ring_attention),
        Mode(name="ring, waiting", way=ring, attention=ring_attention, overlap=False),
        # dK, dV in the inputs' dtype: the bytes that the paper's times fit
        Mode(name="ring, expanded", way=ring, attention=ring_attention, expanded=True, accumulate_dtype=None),
    ]
    group = gcd(setting.heads, n)
    if group == n:
        found.append(Mode(name="ulysses", way=Way("ulysses", (1, 1), n), attention=ulysses_attention))
    elif group > 1:  # heads that all ranks cannot share: as many as can, LV-XAttn over the groups
        tile = (n // group, 1)
        way, name = Way("ulysses", tile, group), f"ulysses {group} x lv-xattn"
        found.append(Mode(name=name, way=way, attention=ulysses_attention, options=(("tile", tile),)))
    return found + _tiles(tiles_of(n)[1:-1])


def _tiles(tiles: Sequence[tuple[int, int]]) -> list[Mode]:
    return [
        Mode(name=f"tile {a}x{b}", way=Way("mesh", (a, b)), attention=tiled, options=(("tile", (a, b)),))
        for a, b in tiles
    ]


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Communicator,
    tile: tuple[int, int],
    kernel: str,
    overlap: bool,
    accumulate_dtype: torch.dtype | None,
    where: Cluster | None,
) -> Tensor:
    """A mesh of a tile, its steps in the order that suits the network, as `strategy="auto"` runs it."""
    if where is None:
        options = {"overlap": overlap, "accumulate_dtype": accumulate_dtype}
        return mesh_attention(q, k, v, group=group, tile=tile, kernel=kernel, **options)
    keys, dtype = (k.shape[2],) * group.size, accumulation(accumulate_dtype, q.dtype)
    problem = problem_of(q.shape, k.shape, keys, q.dtype, accumulate_dtype)
    forward, backward = (blocks_to_hide(problem, tile, where, backward=b) for b in (False, True))
    blocks = FullBlocks(q.shape[0], q.shape[2], keys)
    plan = plan_for("mesh", tile, blocks, problem, dtype, overlap, (forward, backward))
    return attend(q, [GivenKeys(plan, k, v)], comm=group, scale=q.shape[-1] ** -0.5, kernel=kernel)[0]


@dataclass(frozen=True)
class _Alone(Plan):
    """As many blocks as any plan has, all of this rank's own rows and columns."""

    ranks: int = 1

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        """One block a step, no moves; the whole of each."""
        return tuple(Step((), (Block(rank, rank),)) for _ in range(self.ranks))


def alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Communicator,
    kernel: str,
    overlap: bool,
    accumulate_dtype: torch.dtype | None,
) -> Tensor:
    """No communication: this rank's own block, n times over. (The result is that of its own keys: o is their mean.)"""
    dtype, keys = accumulation(accumulate_dtype, q.dtype), (k.shape[2],) * group.size
    plan = _Alone((1, 1), FullBlocks(q.shape[0], q.shape[2], keys), keys, dtype, overlap, ranks=group.size)
    return attend(q, [GivenKeys(plan, k, v)], comm=group, scale=q.shape[-1] ** -0.5, kernel=kernel)[0]
