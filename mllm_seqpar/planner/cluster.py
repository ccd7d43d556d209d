"""A cluster: nodes of equal GPUs, the rates that kernels reach, and the links inside and between nodes.

Rates are effective: kernels reach them; the hardware's peak is given for comparison only. A link has a speed
per direction, sends and receives at once, and is shared evenly by the transfers on it. Inside a node every GPU has its
own link. Between nodes each node has one link (`network_link`), of which a single GPU may reach less (with one network
card per GPU: `network_link_per_gpu`).

Collectives, in which all ranks do the same at once, have closed formulas here. Schedules are simulated (`simulation`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from operator import add
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError

from .descriptions import Description, find_file, number, one_of, read_yaml

ATTENTION_FLOPS = 4, 10
"""FLOPs of attention forward and backward (which computes the scores again), per query, visible key, head and channel
of the head."""


@dataclass(frozen=True, kw_only=True)
class Cluster(Description):
    """Nodes of equal GPUs. Rates in FLOP/s, links in bytes/s per direction, times in seconds, memory in bytes.

    Attributes:
        gpus_per_node: ranks r and s share a node if r // gpus_per_node == s // gpus_per_node.
        attention_forward, attention_backward: rate of block attention, counting 4 (backward: 10) FLOPs per query, key,
            head and channel of the head (ATTENTION_FLOPS).
        masked_forward, masked_backward: the same under a frame mask, counting visible entries only; None: as without.
        tower: FLOP/s of a vision tower; None: its linear layers reach `matmul`, its attention that of other blocks.
        layer_forward_s, layer_backward_s: time in which the host launches the operators of a decoder layer, in backward
            with those of its recomputation. Layers take at least this long.
        node_link: link of one GPU to the other GPUs of its node.
        network_link: link of one node to the other nodes, shared by its GPUs.
        node_latency_s, network_latency_s: time from posting a transfer to its first byte, inside and between nodes.
        network_link_per_gpu: the part of network_link that a single GPU reaches; None for all of it.
        block_overhead_s: fixed cost of one block: kernel launches, merging.
        step_overhead_s: fixed cost of posting one step's transfers.
        overlap: fraction of computation that can run while transfers are in flight: 1 if transfers do not slow it down,
            0 if a step takes the sum of both.
        peak_flops: peak of one GPU according to its maker, dense bf16; None if unknown.
        memory_rate: bytes per second that a kernel reads from the memory of its GPU; None if unknown. It bounds
            generation.
        decode_rate: frames per second that one core decodes; None if unknown.
        links: which links the figures describe: "all", "node" (measured on one node) or "none" (measured on one GPU);
            see `check_ranks`.
        all_pairs: whether every GPU of a node reaches `node_link` to any other while all pairs exchange (NVSwitch, or
            NVLink between all pairs), so that rows may be sent to their ranks directly instead of around a ring.
        kernels: rates of block kernels, by which `kernel="auto"` decides: (kernel, head dim, whether under a mask,
            FLOP/s forward, FLOP/s backward), as `kernels.KernelRate`. None: unknown.
    """

    name: str
    gpus_per_node: int = number("a whole number of GPUs")
    attention_forward: float = number("FLOP/s")
    attention_backward: float = number("FLOP/s")
    matmul: float = number("FLOP/s")
    masked_forward: float | None = number("FLOP/s", None)
    masked_backward: float | None = number("FLOP/s", None)
    tower: float | None = number("FLOP/s", None)
    layer_forward_s: float = number("seconds", 0.0, least=0)
    layer_backward_s: float = number("seconds", 0.0, least=0)
    memory_bytes: float = number("bytes")
    node_link: float = number("bytes/s")
    node_latency_s: float = number("seconds", least=0)
    network_link: float = number("bytes/s")
    network_latency_s: float = number("seconds", least=0)
    network_link_per_gpu: float | None = number("bytes/s", None)
    block_overhead_s: float = number("seconds", 0.0, least=0)
    step_overhead_s: float = number("seconds", 0.0, least=0)
    overlap: float = number("a fraction", 1.0, least=0)
    peak_flops: float | None = number("FLOP/s", None)
    memory_rate: float | None = number("bytes/s", None)
    decode_rate: float | None = number("frames/s", None)
    source: str = ""
    links: str = one_of(("all", "node", "none"), "all")
    all_pairs: bool = False
    kernels: tuple[tuple[str, int, bool, float, float], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap > 1:
            raise ConfigError(f"overlap is {self.overlap}; expected a fraction from 0 to 1")
        if self.kernels is None:
            return
        rows: list[Any] = []
        for row in self.kernels:
            try:
                name, dim, masked, *rates = row
                forward, backward = map(float, rates)  # YAML reads 25e9, without a dot, as text
                valid = type(name) is str and type(dim) is int and type(masked) is bool and dim > 0 < forward * backward
            except (TypeError, ValueError):
                valid = False
            if not valid:
                raise ConfigError(
                    f"kernels: {row!r}; expected [kernel, head dim, true under a mask or false, FLOP/s forward, FLOP/s "
                    "backward], as `mllm-seqpar calibrate` writes it"
                )
            rows.append((name, dim, masked, forward, backward))
        object.__setattr__(self, "kernels", tuple(rows))

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

    @property
    def gpu_network_link(self) -> float:
        """The speed that a single GPU reaches between nodes, in bytes/s per direction."""
        return min(self.network_link_per_gpu or self.network_link, self.network_link)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file (YAML, the fields of `Cluster`), given its path or the name of one in configs/clusters.

    A file that is missing or invalid raises ConfigError.
    """
    return Cluster.build(read_yaml(find_file("cluster", str(path)), "cluster"), str(path))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file that `read_cluster` reads back to an equal Cluster."""
    Path(path).write_text(cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """Return the text of a cluster file."""
    import yaml

    present = {name: value for name, value in asdict(cluster).items() if value is not None}
    style = None if cluster.kernels else False  # None: the rows of `kernels` are on a line each
    text: str = yaml.safe_dump(present, sort_keys=False, width=110, default_flow_style=style)
    return text


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank, including transfers, and the largest number of bytes that any rank sends."""

    seconds: float = 0.0
    exposed: float = 0.0  # a rank waits for transfers or for other ranks
    hidden: float = 0.0  # transfers run under computation
    node_bytes: int = 0  # sent inside the node
    network_bytes: int = 0  # sent to other nodes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: int) -> Cost:
        return Cost(*(x * count for x in vars(self).values()))


@dataclass(frozen=True)
class Passes:
    """The costs of the forward and of the backward pass."""

    forward: Cost = Cost()
    backward: Cost = Cost()

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, count: int) -> Passes:
        return Passes(self.forward * count, self.backward * count)

    @property
    def both(self) -> Cost:
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        return self.both.seconds

    @property
    def exposed(self) -> float:
        return self.both.exposed


def all_to_all(cluster: Cluster, ranks: int, group: int, size: int) -> Cost:
    """Return the cost of all-to-all in all groups of `group` consecutive ranks at once, with `size` bytes per rank.

    Groups may straddle nodes by different amounts. The slowest rank and the fullest node link determine the time.
    """
    if group == 1 or size == 0:
        return Cost()
    node = cluster.gpus_per_node
    inside = outside = 0  # most peers of any rank
    leaving_node: Counter[int] = Counter()
    for rank in range(min(ranks, (2 * min(node, ranks) + 1) * group)):  # then the pattern repeats
        first = rank - rank % group
        members = range(first, min(first + group, ranks))
        near = sum(rank // node == other // node for other in members) - 1
        far = len(members) - 1 - near
        inside, outside = max(inside, near), max(outside, far)
        leaving_node[rank // node] += far
    part = size / group
    seconds = inside * part / cluster.node_link + cluster.node_latency_s
    if outside:
        by_gpu = outside * part / cluster.gpu_network_link
        by_node = max(leaving_node.values()) * part / cluster.network_link
        seconds = max(seconds, max(by_gpu, by_node) + cluster.network_latency_s)
    seconds += cluster.step_overhead_s
    return Cost(seconds, seconds, 0.0, int(inside * part), int(outside * part))


def all_gather(cluster: Cluster, ranks: int, size: float) -> Cost:
    """Return the cost of an all-gather of `size` bytes from each rank, or of a reduce-scatter of the same size.

    A rank sends its bytes to every other rank. The time is a lower bound: each node receives the data that it lacks
    through its network link once.
    """
    if ranks == 1:
        return Cost()
    node = min(cluster.gpus_per_node, ranks)
    inside = (ranks - 1) * size / cluster.node_link + cluster.node_latency_s if node > 1 else 0.0
    outside = (ranks - node) * size / cluster.network_link + cluster.network_latency_s if ranks > node else 0.0
    seconds = max(inside, outside) + cluster.step_overhead_s
    return Cost(seconds, seconds, 0.0, int(size * (node - 1)), int(size * (ranks - node)))
