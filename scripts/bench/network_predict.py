"""What the planner's cost model says of a mode in a setting, given the block's time and the link's measured speed."""

from __future__ import annotations

from dataclasses import dataclass

from link import Speed
from network_modes import Mode
from network_settings import Setting

from mllm_seqpar.planner import Cluster, call_cost


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block, all rows of a rank against all keys of a rank, as measured without transfers."""

    forward: float
    backward: float


def cluster(setting: Setting, block: BlockTime, speed: Speed) -> Cluster:
    """The network as the planner describes it: a node per rank."""
    entries = setting.rows * setting.keys * setting.heads * setting.dim
    return Cluster(
        name="benchmark",
        gpus_per_node=1,
        attention_forward=4 * entries / block.forward,
        attention_backward=10 * entries / block.backward,
        matmul=1.0,
        memory_bytes=1.0,
        node_link=speed.bytes_per_s,
        node_latency_s=speed.latency_s,
        network_link=speed.bytes_per_s,
        network_latency_s=speed.latency_s,
    )


def predicted_s(mode: Mode, setting: Setting, block: BlockTime, speed: Speed | None) -> float:
    """Seconds of forward and backward."""
    if mode.way is None or speed is None:
        return setting.ranks * (block.forward + block.backward)
    where, problem = cluster(setting, block, speed), mode.problem(setting)
    passes = [call_cost(problem, mode.way, where, backward=b, overlap=mode.overlap) for b in (False, True)]
    return sum(cost.seconds for cost in passes)
