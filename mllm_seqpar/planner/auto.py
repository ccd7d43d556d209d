"""Selection by the rates of a cluster: of strategies for "auto" and for a mesh, and of kernels for "auto".

`ClusterSelector` implements `runtime.strategy_selector.StrategySelector` with the planner's cost model.
"""

from dataclasses import replace
from math import ceil, log2

import torch

from mllm_seqpar._compat import graph_task
from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import KernelOption, KernelRate, kernel_by_name
from mllm_seqpar.masks import BlockMasks
from mllm_seqpar.runtime.strategy_selector import CandidateStrategies, VisualProjection
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec

from . import calibrate
from .calibrate import AttentionShape
from .call_cost import Selection, VisibleFraction, select_strategy, with_overlap_ratios
from .cluster import Cluster, read_cluster

_log = get_logger(__name__)

MAX_RANKS_WITH_BLOCK_FRACTIONS = 16
"""Under a mask that makes (row, rank) pairs empty, every block is simulated with its own visible fraction up to this
many ranks, and with the rows that are sent up to four times this number of ranks. With more ranks, a simulation would
take seconds."""


class ClusterSelector:
    """Selects for one patched model by the rates of `cluster`, or by rates that forward passes measure; logs each
    selection of a strategy once, with the reason.

    A model may be patched on the CPU in float32 and run on a GPU in bf16, so nothing is measured before a forward pass
    asks for the rates of its own queries. A pass may ask for several shapes, such as those of cross-attention and of
    self-attention; the links are measured once for each device type.

    It is not a dataclass: FSDP2 with mixed precision copies dataclasses among a layer's arguments, and with them its
    caches.

    Args:
        cluster: the rates; None to measure them.
        comm: the group that measures.
        kernel: the block kernel of the model's attention, or "auto", for which the attribute has the rates of kernels
            if the cluster has them.
    """

    def __init__(self, cluster: Cluster | None, comm: Communicator | None = None, kernel: str = "auto") -> None:
        self.cluster, self.comm = cluster, comm
        rates = cluster.kernels if cluster is not None and kernel == "auto" else None
        self.kernel: KernelOption = kernel if rates is None else tuple(map(KernelRate._make, rates))
        self._measured: dict[tuple[str, AttentionShape], Cluster] = {}
        self._selections: dict[object, Selection] = {}
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
        visual: VisualProjection | None = None,
    ) -> ParallelSpec:
        heads = {"heads": problem.heads, "kv_heads": problem.kv_heads, "dim": problem.dim}
        cluster = self.cluster or self.measured(
            like.device, AttentionShape(**heads, dtype=like.dtype, kernel=self.kernel)
        )
        # Videos and texts have many lengths in training. Simulating each, rank by rank where the shards are uneven,
        # would cost more time than the best selection saves: they are rounded up to quarter powers of two.
        rows, keys = (
            ceil(2 ** (ceil(4 * log2(length)) / 4)) if length > 0 else 0 for length in (problem.rows, max(problem.keys))
        )
        problem, mean, pruned = replace(problem, rows=rows, keys=(keys,) * problem.ranks), 1.0, None
        if not blocks.keys_are_rows:  # in percent steps
            mean, pruned = max(round(blocks.visible_fraction, 2), 0.01), blocks if blocks.prunes else None
        if candidates.causal:
            mean /= 2
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
                visual=visual,
                masked=mean < 1 and not candidates.causal,
            )
            spec = with_overlap_ratios(selection.spec, problem, cluster, mean)
            self._selections[key] = replace(selection, spec=spec)
            if (candidates.option, spec) not in self._logged:
                self._logged.add((candidates.option, spec))
                _log.info("%s on %s: %s", candidates.option, cluster.name, selection.reason)
        return self._selections[key].spec

    def measured(self, device: torch.device, shape: AttentionShape) -> Cluster:
        """Return the measured rates for queries of `shape` on `device`. Collective when a shape is asked for first.

        All ranks of the group ask for the same shapes in the same order, because they run the same layers on inputs
        that they agreed on. A recomputation in the backward pass repeats attention of its forward pass, so it finds the
        shape measured. Ranks that ask for different ones raise AgreementError.
        """
        key = device.type, shape
        if key not in self._measured:
            assert self.comm is not None
            # In backward, ranks may be in different layers: FSDP2 and DDP reduce gradients meanwhile.
            assert graph_task() == -1, f"calibration for {shape} was requested in a backward pass"
            agree(self.comm, "calibration", lambda: {"device": device.type, "shape": shape}, dict)
            known = next((cluster for (kind, _), cluster in self._measured.items() if kind == device.type), None)
            cluster = calibrate.calibrate(self.comm, device=device, shape=shape, links_of=known)
            self._measured[key] = cluster
            _log.info(
                "calibrated: %s: attention forward %.3g, backward %.3g, matmul %.3g FLOP/s; links in a node %.3g, "
                "between nodes %.3g bytes/s",
                cluster.source,
                *(cluster.attention_forward, cluster.attention_backward, cluster.matmul),
                *(cluster.node_link, cluster.network_link),
            )
        return self._measured[key]


def selector_for(config: SeqParConfig, comm: Communicator) -> ClusterSelector:
    """Return the selector of a model that is being patched. Collective.

    The rates come from the file `config.cluster`. If it is None, forward passes measure them, because the model may
    still be moved to another device or dtype. A file that cannot be used raises ConfigError; files that differ between
    the ranks raise AgreementError.
    """
    path, cluster = config.cluster, None
    if path is not None:
        cluster = agree(comm, "patch_model(cluster=...)", lambda: read_cluster(path), lambda file: {"cluster": file})
        cluster.check_ranks(comm.size)
        if cluster.kernels is None and not config.selects_strategies:
            raise ConfigError(
                f'cluster: {path!r} has no rates of kernels (`kernels`), which kernel="auto" would use; measure them '
                "by `mllm-seqpar calibrate`, choose auto or mesh as a strategy, or leave it out"
            )
        for name, *_ in cluster.kernels or ():
            kernel_by_name(name)
    return ClusterSelector(cluster, comm, config.kernel)
