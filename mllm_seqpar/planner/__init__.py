"""What a call, or a training step, will take on a described cluster: pure arithmetic on the executor's own schedules.

`cluster` describes the machines, `simulate` runs schedules on them as events, `cost` says what one attention call
takes by each strategy, `choose` takes the cheapest. None of these needs torch; `calibrate`, which measures the machine
at hand, does.
"""

from __future__ import annotations

from .block_cost import blocks_to_hide
from .call_cost import CallCost, call_cost
from .call_overheads import Visual
from .candidates import ParallelSpec
from .cluster import Cluster, read_cluster, write_cluster
from .selection import Candidate, Selection, SelectionOptions, choose

__all__ = [
    "CallCost",
    "Candidate",
    "Selection",
    "Cluster",
    "SelectionOptions",
    "Visual",
    "ParallelSpec",
    "blocks_to_hide",
    "call_cost",
    "choose",
    "read_cluster",
    "write_cluster",
]
