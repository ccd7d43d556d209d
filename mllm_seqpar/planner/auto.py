"""Strategy selection for `strategy="auto"`, `self_attention="auto"` and a mesh whose `cluster` is given.

`ClusterSelector` implements `runtime.strategy_selector.StrategySelector` with the planner's cost model.
"""

from dataclasses import replace
from math import ceil, log2

import torch

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.masks import BlockMasks, FrameBlockMasks
from mllm_seqpar.runtime.strategy_selector import CandidateStrategies, SelectedStrategy, VisualLayers
from mllm_seqpar.schedules import OverlapRatios
from mllm_seqpar.schedules.bytes_sent import Problem

from .calibrate import AttentionShape, Calibrations
from .call_cost import (
    ParallelSpec,
    Selection,
    VisibleFraction,
    VisualProjection,
    overlap_ratios_by_rates,
    select_strategy,
)
from .cluster import Cluster, read_cluster

_log = get_logger(__name__)

MAX_RANKS_WITH_BLOCK_FRACTIONS = 16
"""Under a mask that makes (row, rank) pairs empty, every block is simulated with its own visible fraction up to this
many ranks, and with the rows that are sent up to four times this number of ranks. With more ranks, a simulation would
take seconds."""


class ClusterSelector:
    """Selects for one patched model by the rates of `cluster`, or by rates that forward passes measure; logs each
    selection once, with the reason.

    It is not a dataclass: FSDP2 with mixed precision copies dataclasses among a layer's arguments, and with them its
    caches.
    """

    def __init__(self, cluster: Cluster | Calibrations) -> None:
        self.cluster = cluster
        self._selections: dict[object, tuple[SelectedStrategy, Selection]] = {}
        self._logged: set[object] = set()

    def select(
        self,
        problem: Problem,
        blocks: BlockMasks,
        candidates: CandidateStrategies,
        like: torch.Tensor,
        *,
        training: bool,
        mesh_shape: tuple[int, int] | None = None,
        visual: VisualLayers | None = None,
    ) -> SelectedStrategy:
        cluster, problem, mean = self._cluster(problem, like), _round_lengths(problem), _visible_fraction(blocks)
        if candidates.causal:
            mean /= 2
        pruned = blocks if isinstance(blocks, FrameBlockMasks) and blocks.prunes else None
        key = problem, training, visual, mean, pruned is not None, candidates, mesh_shape, cluster
        if key not in self._selections:
            visible: VisibleFraction = mean
            visible_rows = None
            if pruned is not None and problem.ranks <= 4 * MAX_RANKS_WITH_BLOCK_FRACTIONS:
                visible_rows = pruned.visible_row_counts()
                if problem.ranks <= MAX_RANKS_WITH_BLOCK_FRACTIONS:
                    visible = pruned.visible_fractions()
            selection = select_strategy(
                problem,
                cluster,
                training=training,
                strategies=[name for name in candidates.strategies if name != "replicate" or visual is not None],
                mesh_shape=mesh_shape,
                visible_rows=visible_rows,
                visible=visible,
                visual=None if visual is None else VisualProjection(**visual._asdict(), trained=training),
            )
            spec = selection.spec
            shape = spec.mesh_shape if spec.strategy in ("mesh", "ulysses") else None
            ratios = _overlap_ratios(spec, problem, cluster, mean)
            self._selections[key] = SelectedStrategy(spec.strategy, shape, ratios, spec.all_pairs), selection
            logged = candidates.option, spec
            if logged not in self._logged:
                self._logged.add(logged)
                _log.info("%s on %s: %s", candidates.option, cluster.name, selection.reason)
        return self._selections[key][0]

    def _cluster(self, problem: Problem, like: torch.Tensor) -> Cluster:
        """Return the cluster for the queries of a call; on their first use, all ranks measure it."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        heads, kv_heads, dim = problem.heads, problem.kv_heads, problem.dim
        kernel = self.cluster.kernel
        shape = AttentionShape(heads=heads, kv_heads=kv_heads, dim=dim, dtype=like.dtype, kernel=kernel)
        return self.cluster.cluster(like.device, shape)


def selector_for(config: SeqParConfig, comm: Communicator) -> ClusterSelector:
    """Return the selector of a model that is being patched. Collective.

    The rates come from the file `config.cluster`. If it is None, forward passes measure them, because the model may
    still be moved to another device or dtype. A file that cannot be used raises ConfigError; files that differ between
    the ranks raise AgreementError.
    """
    path = config.cluster
    if path is None:
        return ClusterSelector(Calibrations(comm, config.kernel))
    cluster = agree(comm, "patch_model(cluster=...)", lambda: read_cluster(path), lambda found: {"cluster": found})
    cluster.check_ranks(comm.size)
    return ClusterSelector(cluster)


def _overlap_ratios(
    spec: ParallelSpec, problem: Problem, cluster: Cluster, visible: float
) -> tuple[OverlapRatios, OverlapRatios] | None:
    """Return the ratios that a mesh orders its steps by, forward and backward; None for any other strategy."""
    if 1 in spec.mesh_shape:
        return None

    def ratios(backward: bool) -> OverlapRatios:
        degree, shape = spec.head_degree, spec.mesh_shape
        return overlap_ratios_by_rates(problem, shape, cluster, backward=backward, head_degree=degree, visible=visible)

    return ratios(False), ratios(True)


def _round_lengths(problem: Problem) -> Problem:
    """Round the lengths up to quarter powers of two, the same on every rank.

    Videos and texts have many lengths in training. Simulating every length, rank by rank where the shards are
    uneven, would cost more time than the best selection saves.
    """
    rows, keys = (
        ceil(2 ** (ceil(4 * log2(length)) / 4)) if length > 0 else 0 for length in (problem.rows, max(problem.keys))
    )
    return replace(problem, rows=rows, keys=(keys,) * problem.ranks)


def _visible_fraction(blocks: BlockMasks) -> float:
    """Return the fraction of entries that a frame mask shows, in percent steps; 1 for any other mask."""
    return max(round(blocks.visible_fraction, 2), 0.01) if isinstance(blocks, FrameBlockMasks) else 1.0
