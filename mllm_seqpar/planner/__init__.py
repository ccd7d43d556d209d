"""Cost and memory model: estimates for an attention call or a training step on a described cluster.

`cluster` describes the machines, `simulation` runs schedules on them as events, and `call_cost` estimates one attention
call for a parallel spec and takes the fastest. `workload` describes a step of a model (`model_sizes`): `step` adds up
its time, `memory` its bytes on a rank, and `plan` compares strategies by both. These modules are plain Python.
`calibrate`, which measures the machine at hand, and `auto`, which implements `strategy="auto"`, need torch.
"""

from mllm_seqpar.runtime.strategy_selector import VisualProjection
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec

from .call_cost import AttentionCall, Candidate, Selection, select_strategy
from .cluster import Cluster, read_cluster, write_cluster

__all__ = [
    "AttentionCall",
    "Candidate",
    "Cluster",
    "ParallelSpec",
    "Selection",
    "VisualProjection",
    "read_cluster",
    "select_strategy",
    "write_cluster",
]
