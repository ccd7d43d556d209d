"""`strategy="auto"`, `self_attention="auto"`: which strategy and tile attention takes, by the planner's cost functions.

And a mesh whose `cluster` is known: the cheapest tile, where none is given, and the order of its steps. A choice is a
pure function of what all ranks know: the call's shape, what its mask lets see, and the rates that were read or measured
when the model was patched. So all ranks choose alike, without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import NamedTuple

import torch

from mllm_seqpar._logging import get_logger
from mllm_seqpar.attention.distributed import CallSpec
from mllm_seqpar.attention.parallel_spec import accumulation, plan_for
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import require_same_text
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks
from mllm_seqpar.planner import Cluster, Selection, SelectionOptions, blocks_to_hide, choose, read_cluster
from mllm_seqpar.planner.call_cost import Visual
from mllm_seqpar.planner.candidates import STRATEGIES, TEXT_STRATEGIES
from mllm_seqpar.schedules.bytes_sent import Problem

_log = get_logger(__name__)


class CrossAttentionShape(NamedTuple):
    """A model's cross-attention: query heads, key heads, head dim, and the number of its layers."""

    heads: int
    kv_heads: int
    dim: int
    layers: int


class CandidateStrategies(NamedTuple):
    """What may be chosen: the option that asks for it, the strategies, and whether rows see no later keys."""

    option: str
    strategies: tuple[str, ...]
    causal: bool = False


CROSS = CandidateStrategies('strategy="auto"', STRATEGIES)
OWN = CandidateStrategies('self_attention="auto"', TEXT_STRATEGIES, causal=True)
_ANY_TILE = ("lv-xattn", "ring", "mesh")
CROSS_MESH = CandidateStrategies('strategy="mesh"', _ANY_TILE)
OWN_MESH = CandidateStrategies('self_attention="mesh"', _ANY_TILE, causal=True)

SHARED_RANKS = 16
"""Where a mask hides whole ranks from rows: up to so many ranks every block is simulated with its own share of visible
entries, and up to four times as many with the rows that travel; above, that would take seconds."""


def _rough(problem: Problem) -> Problem:
    """With lengths rounded up to quarters of a power of two, the same on every rank.

    Videos and texts of all lengths come by in a training. Simulating anew for each, ranks one by one where their shares
    are uneven, would cost more than the best choice saves.
    """
    return replace(problem, rows=_rounded(problem.rows), keys=(_rounded(max(problem.keys)),) * problem.ranks)


def _visible(blocks: BlockMasks) -> float:
    """The share of entries that a mask of frames shows; 1 where there is none."""
    return max(round(blocks.visible_fraction, 2), 0.01) if isinstance(blocks, FrameBlockMasks) else 1.0


def _rounded(length: int) -> int:
    return ceil(2 ** (ceil(4 * log2(length)) / 4)) if length > 0 else 0


@dataclass
class StrategySelector:
    """Chooses for one patched model, logs what and why once for each choice, and remembers.

    Attributes:
        cluster: the rates to decide by.
    """

    cluster: Cluster
    _found: dict[object, Selection] = field(default_factory=dict)
    _told: set[object] = field(default_factory=set)

    def choose(
        self,
        problem: Problem,
        blocks: BlockMasks,
        *,
        training: bool,
        visual: Visual | None = None,
        among: CandidateStrategies = CROSS,
        tile: tuple[int, int] | None = None,
    ) -> Selection:
        """The cheapest way.

        Args:
            problem: the call, the same on every rank.
            blocks: what its rows see.
            training: whether there will be a backward pass.
            visual: where the keys come from, for a choice made before any layer runs; None: replication, which gathers
                the features beforehand, is not among the candidates.
            among: the strategies that may be.
            tile: only this one; None: any.
        """
        visible, pruned = _visible(blocks), isinstance(blocks, FrameBlockMasks) and blocks.prunes
        problem = _rough(problem)
        key = problem, training, visual, visible, pruned, among, tile
        if key not in self._found:
            seen: list[list[int]] | None = None
            shares: float | list[list[float]] = visible
            if pruned and isinstance(blocks, FrameBlockMasks):
                seen = blocks.visible_row_counts() if problem.ranks <= 4 * SHARED_RANKS else None
                shares = blocks.visible_fractions() if problem.ranks <= SHARED_RANKS else visible
            options = SelectionOptions(
                training=training,
                visible=shares,
                seen=seen,
                visual=visual,
                strategies=[s for s in among.strategies if s != "replicate" or visual is not None],
                causal=among.causal,
                tile=tile,
            )
            found = self._found[key] = choose(problem, self.cluster, options=options)
            told = among, found.strategy, found.tile, found.heads_over
            if told not in self._told:
                self._told.add(told)
                _log.info("%s on %s: %s", among.option, self.cluster.name, found.why)
        return self._found[key]


def selected_spec(
    chooser: StrategySelector,
    choice: Selection,
    blocks: BlockMasks,
    problem: Problem,
    config: SeqParConfig,
    dtype: torch.dtype,
    *,
    causal: bool,
) -> CallSpec:
    """The plan of a choice; a mesh's order of steps is worked out for the rates that it was chosen by."""
    rough = _rough(problem)
    accumulate = accumulation(config.accumulate_dtype, dtype)
    tile = choice.tile if choice.strategy in ("mesh", "ulysses") else None
    overlap_ratios = None
    if 1 not in choice.tile:
        visible, over = _visible(blocks) * (0.5 if causal else 1.0), choice.heads_over
        forward, backward = (
            blocks_to_hide(rough, choice.tile, chooser.cluster, backward=back, heads_over=over, visible=visible)
            for back in (False, True)
        )
        overlap_ratios = forward, backward
    return plan_for(choice.strategy, tile, blocks, problem, accumulate, config.overlap, overlap_ratios)


def selector_for(
    config: SeqParConfig, comm: Communicator, device: torch.device, dtype: torch.dtype
) -> StrategySelector | None:
    """What `config` needs to choose by: None unless it says "auto" or names a cluster. Collective.

    Rates are read from that cluster's file, whose contents the ranks compare, or else measured.

    Raises:
        ConfigError: a cluster file that cannot be used.
        AgreementError: ranks whose cluster files differ.
    """
    path = config.cluster
    if path is None and "auto" not in (config.strategy, config.self_attention):
        return None
    if path is not None:
        read: list[Cluster] = []

        def describe() -> str:
            read.append(read_cluster(path))
            return repr(read[0])

        require_same_text(comm, "patch_model(cluster=...)", describe)
        read[0].check_ranks(comm.size)
        return StrategySelector(read[0])
    from mllm_seqpar.planner.calibrate import Shape, calibrate

    floating = dtype if dtype.is_floating_point else torch.float32
    return StrategySelector(calibrate(comm, device=device, shape=Shape(dtype=floating, kernel=config.kernel)))
