"""A cluster: nodes of equal GPUs, the rates that kernels reach, and the links inside and between nodes.

Rates are effective: kernels reach them; the hardware's peak is given for comparison only. A link has a speed
per direction, sends and receives at once, and is shared evenly by the transfers on it. Inside a node every GPU has its
own link. Between nodes each node has one link (`network_link`), of which a single GPU may reach less (with one network
card per GPU: `network_link_per_gpu`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from mllm_seqpar.errors import ConfigError

from .records import Record, build, read_yaml


@dataclass(frozen=True, kw_only=True)
class Cluster(Record):
    """Nodes of equal GPUs. Rates in FLOP/s, links in bytes/s per direction, times in seconds, memory in bytes.

    Attributes:
        gpus_per_node: ranks r and s share a node if r // gpus_per_node == s // gpus_per_node.
        attention_forward, attention_backward: rate of block attention, counting 4 (backward: 10) FLOPs per query, key,
            head and channel of the head.
        node_link: link of one GPU to the other GPUs of its node.
        network_link: link of one node to the other nodes, shared by its GPUs.
        node_latency_s, network_latency_s: time from posting a transfer to its first byte, inside and between nodes.
        network_link_per_gpu: the part of network_link that a single GPU reaches; None for all of it.
        block_overhead_s: fixed cost of one block: kernel launches, merging.
        step_overhead_s: fixed cost of posting one step's transfers.
        overlap: fraction of computation that can run while transfers are in flight: 1 if transfers do not slow it down,
            0 if a step takes the sum of both.
        peak_flops: peak of one GPU according to its maker, dense bf16; None if unknown.
        all_pairs: whether every GPU of a node reaches `node_link` to any other while all pairs exchange (NVSwitch, or
            NVLink between all pairs), so that rows may be sent to their ranks directly instead of around a ring.
        memory_rate: bytes per second that a kernel reads from the memory of its GPU; None if unknown. It bounds
            generation.
        decode_rate: frames per second that one core decodes; None if unknown.
        links: which links the figures describe: "all", "node" (measured on one node) or "none" (measured on one GPU);
            see `check_ranks`.
    """

    units: ClassVar[Mapping[str, str]] = {
        "gpus_per_node": "a whole number of GPUs",
        **dict.fromkeys(("attention_forward", "attention_backward", "matmul", "peak_flops"), "FLOP/s"),
        "memory_bytes": "bytes",
        **dict.fromkeys(("node_link", "network_link", "network_link_per_gpu", "memory_rate"), "bytes/s"),
        **dict.fromkeys(("node_latency_s", "network_latency_s", "block_overhead_s", "step_overhead_s"), "seconds"),
        "overlap": "a fraction",
        "decode_rate": "frames/s",
    }
    least: ClassVar[Mapping[str, int]] = {name: 0 for name in units if name.endswith("_s") or name == "overlap"}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"links": ("all", "node", "none")}

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
    memory_rate: float | None = None
    decode_rate: float | None = None
    source: str = ""
    links: str = "all"
    all_pairs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap > 1:
            raise ConfigError(f"overlap is {self.overlap}; expected a fraction from 0 to 1")

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError if `ranks` ranks use links whose speeds were not measured."""
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

    def pairs_exchange(self, ranks: int) -> bool:
        """Return whether all of `ranks` ranks are in one node whose links are symmetric."""
        return self.all_pairs and ranks <= self.gpus_per_node

    def same_node(self, rank: int, other: int) -> bool:
        return rank // self.gpus_per_node == other // self.gpus_per_node

    @property
    def gpu_network_link(self) -> float:
        """The speed that a single GPU reaches between nodes, in bytes/s per direction."""
        return min(self.network_link_per_gpu or self.network_link, self.network_link)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file (YAML, the fields of `Cluster`); raise ConfigError if it is missing or invalid."""
    return build(Cluster, read_yaml(path, "cluster"), str(path))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file that `read_cluster` reads back to an equal Cluster."""
    Path(path).write_text(cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """Return the text of a cluster file."""
    import yaml

    present = {name: value for name, value in asdict(cluster).items() if value is not None}
    text: str = yaml.safe_dump(present, sort_keys=False, width=110)
    return text
