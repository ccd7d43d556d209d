"""A cluster as the planner sees it: nodes of equal GPUs, rates that kernels reach, links inside and between nodes.

Rates are effective ones, what kernels really reach; the hardware's peak stands beside them only for comparison. A link
has a speed per direction, sends and receives at once, and is shared evenly by the transfers on it: inside a node every
GPU has its own; between nodes each node has one (`network_link`), of which a GPU alone may reach less (a network card
per GPU: `network_link_per_gpu`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from mllm_seqpar.errors import ConfigError

from .files import build, read_yaml


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs. Rates in FLOP/s, links in bytes/s and direction, times in seconds, memory in bytes.

    Attributes:
        name: what to call it in tables.
        gpus_per_node: ranks r and s share a node where r // gpus_per_node == s // gpus_per_node.
        attention_forward, attention_backward: rate of block attention, counting 4 (backward: 10) FLOPs per query row,
            key, head and channel of the head.
        matmul: rate of linear layers.
        memory_bytes: memory of one GPU.
        node_link: of one GPU to the others of its node.
        node_latency_s: from posting a transfer to its first byte, inside a node.
        network_link: of one node to the others, shared by its GPUs.
        network_latency_s: as node_latency_s, between nodes.
        network_link_per_gpu: what one GPU alone reaches of network_link; None: all of it.
        block_overhead_s: fixed cost of computing one block: launches, merging.
        step_overhead_s: fixed cost of posting one step's transfers.
        overlap: share of computation under which transfers proceed: 1 where they cost it nothing, 0 where a step takes
            the sum of both.
        peak_flops: of one GPU, dense bf16, by its maker; None: unknown.
        source: where the figures come from.
        links: which links the figures speak of: "all"; "node": there was one node alone to measure; "none": one GPU
            alone. What stands for the others is no speed of theirs, see `check_ranks`.

    Raises:
        ConfigError: a negative or impossible value, by name.
    """

    name: str
    gpus_per_node: int
    attention_forward: float
    attention_backward: float
    matmul: float
    memory_bytes: float
    node_link: float
    node_latency_s: float
    network_link: float
    network_latency_s: float
    network_link_per_gpu: float | None = None
    block_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    overlap: float = 1.0
    peak_flops: float | None = None
    source: str = ""
    links: str = "all"

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))
        if self.overlap > 1:
            raise ConfigError(f"cluster {self.name!r}: overlap is {self.overlap}; it is a share, from 0 to 1")

    def _check(self, name: str, value: object) -> None:
        if name in ("name", "source"):
            if not isinstance(value, str):
                raise ConfigError(f"cluster: {name} is {value!r}; give a text")
            return
        if name == "links":
            if value not in ("all", "node", "none"):
                raise ConfigError(f"cluster {self.name!r}: links is {value!r}; give all, node or none")
            return
        if value is None and name in ("network_link_per_gpu", "peak_flops"):
            return
        if isinstance(value, bool) or not isinstance(value, int if name == "gpus_per_node" else int | float):
            raise ConfigError(f"cluster {self.name!r}: {name} is {value!r}; give {_UNITS.get(name, 'a number')}")
        zero_is_fine = name.endswith("_s") or name == "overlap"
        if not 0 <= value < float("inf") or (value == 0 and not zero_is_fine):
            raise ConfigError(
                f"cluster {self.name!r}: {name} is {value!r}; give {_UNITS.get(name, 'a number')}, "
                f"{'0 or more' if zero_is_fine else 'above 0'}"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError where so many ranks need links whose speeds are not known."""
        missing = None
        if ranks > 1 and self.links == "none":
            missing = "gpus_per_node, node_link and network_link, which one process"
        elif ranks > self.gpus_per_node and self.links == "node":
            missing = "network_link, which one node"
        if missing:
            raise ConfigError(
                f"cluster {self.name!r}: {ranks} ranks need {missing} alone could not measure; calibrate with more, or "
                "write the figures into the file and remove `links`"
            )

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks share a node."""
        return rank // self.gpus_per_node == other // self.gpus_per_node

    @property
    def gpu_network_link(self) -> float:
        """What one GPU alone reaches between nodes, bytes/s and direction."""
        return min(self.network_link_per_gpu or self.network_link, self.network_link)


_UNITS = {
    "gpus_per_node": "a whole number of GPUs",
    "attention_forward": "FLOP/s",
    "attention_backward": "FLOP/s",
    "matmul": "FLOP/s",
    "peak_flops": "FLOP/s",
    "memory_bytes": "bytes",
    "node_link": "bytes/s",
    "network_link": "bytes/s",
    "network_link_per_gpu": "bytes/s",
    "node_latency_s": "seconds",
    "network_latency_s": "seconds",
    "block_overhead_s": "seconds",
    "step_overhead_s": "seconds",
    "overlap": "a share",
}


def read_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file (YAML, the fields of `Cluster`).

    Raises:
        ConfigError: no such file, no YAML, or bad fields.
    """
    return build(Cluster, read_yaml(path, "cluster"), str(path), _UNITS)


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a cluster file that `read_cluster` reads back to an equal Cluster."""
    import yaml

    values = {field.name: getattr(cluster, field.name) for field in fields(cluster)}
    kept = {name: value for name, value in values.items() if value is not None}
    Path(path).write_text(yaml.safe_dump(kept, sort_keys=False, width=110))
