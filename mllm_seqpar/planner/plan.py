"""A plan: for each strategy the time of a step by part, the memory by kind, and the longest video that fits."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, TEXT_STRATEGIES

from .call_cost import MARGIN, Candidate, ParallelSpec
from .cluster import Cluster, Passes
from .memory import USABLE, peak_memory
from .records import Record, number
from .step_cost import attention_candidates, step_parts
from .workload import Workload

MAX_FRAMES = 2**27
"""The longest video to consider: four years at one frame per second."""

DECODE_RATE = 400.0
"""Frames per second that one core decodes where the cluster file does not say: H.264 in 720p, measured."""

_ORDER = (*STRATEGIES, "local")


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(Passes):
    """The estimate of a step with one strategy.

    `spec` has the fastest mesh shape that fits, `parts` the keys `step_cost.PARTS` (a decoder-only model has no
    cross-attention), `memory` the bytes of a rank by kind (`memory.KINDS`). `max_frames` are the most frames that fit.
    `call` is one call of the attention that `spec` is about: of cross-attention, or of self-attention in a decoder-only
    model.
    """

    spec: ParallelSpec
    parts: Mapping[str, Passes]
    memory: Mapping[str, int]
    fits: bool
    max_frames: int
    call: Candidate

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """The estimates of all strategies for one workload on one cluster.

    Attributes:
        rows: one per strategy, of self-attention in a decoder-only model; rows that fit come first, the fastest first.
        illegal: the reason by strategy.
        text: one self-attention call, the same in all rows; of the first one in a decoder-only model.
        min_gpus: the smallest power of two of GPUs on which `preferred`, which needs the least memory, fits; or None.
    """

    workload: Workload
    cluster: Cluster
    rows: tuple[StrategyPlan, ...]
    illegal: Mapping[str, str]
    text: Candidate
    min_gpus: int | None

    def cores_per_gpu(self, row: StrategyPlan) -> float:
        """Return how many cores a GPU needs so that decoding the videos of a step takes no longer than the step."""
        workload = self.workload
        decoded = workload.batch * workload.frames / workload.gpus * workload.decode_per_frame
        return decoded / (self.cluster.decode_rate or DECODE_RATE) / row.seconds

    @property
    def preferred(self) -> str:
        """The strategy that is chosen among equals."""
        return _preferred_run(self.workload)[1].strategy

    @property
    def best(self) -> StrategyPlan:
        """The first row, or the preferred one if that is slower by no more than MARGIN, as in `select_strategy`."""
        first = self.rows[0]
        preferred = next((row for row in self.rows if row.spec.strategy == self.preferred), first)
        close = preferred.seconds <= first.seconds * (1 + MARGIN)
        return preferred if close and preferred.fits == first.fits else first


@dataclass(frozen=True, kw_only=True)
class DataSet(Record):
    """The samples of a run, and how often it processes them."""

    samples: int = number("a number of samples")
    epochs: float = number("a number of epochs", 1.0)

    def steps(self, batch: int) -> int:
        """Return the number of steps of `batch` samples each, the last one of an epoch with fewer."""
        return ceil(ceil(self.samples / batch) * self.epochs)

    def hours(self, batch: int, seconds: float) -> float:
        """Return the hours of all steps, each of `seconds`."""
        return self.steps(batch) * seconds / 3600


def make_plan(workload: Workload, cluster: Cluster, strategies: Sequence[str] = STRATEGIES) -> Plan:
    """Return the plan; a ConfigError names an unknown or no legal strategy, or link speeds that the cluster lacks.

    `strategies` are for cross-attention. A decoder-only model is planned with each `self_attention` that its workload
    allows.
    """
    cluster.check_ranks(workload.gpus)
    if workload.model.decoder_only:
        strategies, text = TEXT_STRATEGIES if workload.self_attention == "auto" else (workload.self_attention,), None
    else:
        text = attention_candidates(workload, cluster, "self-attention")[0]
    possible = ("lv-xattn",) if workload.visual_offload else strategies
    by_strategy: dict[str, list[Candidate]] = {}
    for candidate in attention_candidates(workload, cluster, workload.compared, possible):
        by_strategy.setdefault(candidate.spec.strategy, []).append(candidate)
    rows = [_strategy_plan(workload, cluster, found, text) for found in by_strategy.values()]
    rows.sort(key=lambda row: (not row.fits, row.seconds, _ORDER.index(row.spec.strategy)))
    illegal = {name: _why_illegal(name, workload) for name in strategies if name not in by_strategy}
    powers_of_two = (2**i for i in range(17))
    enough = (n for n in powers_of_two if _fits(*_preferred_run(replace(workload, gpus=n)), cluster))
    return Plan(workload, cluster, tuple(rows), illegal, text or rows[0].call, next(enough, None))


def _preferred_run(workload: Workload) -> tuple[Workload, ParallelSpec]:
    """Return the workload with the strategy that needs the least memory, which is preferred among equals."""
    if workload.model.decoder_only:
        return replace(workload, self_attention="ring"), ParallelSpec("ring", (1, workload.gpus))
    return workload, ParallelSpec("lv-xattn", (workload.gpus, 1))


def _strategy_plan(
    workload: Workload, cluster: Cluster, candidates: Sequence[Candidate], text: Candidate | None
) -> StrategyPlan:
    """Plan the fastest candidate that fits; if none fits, the fastest. In a decoder-only model, `text` is None."""
    if text is None and workload.self_attention != "local":
        workload = replace(workload, self_attention=candidates[0].spec.strategy)
    fitting = next((candidate for candidate in candidates if _fits(workload, candidate.spec, cluster)), None)
    call = fitting or candidates[0]
    parts = step_parts(workload, cluster, call if text else None, text or call)
    total = sum(parts.values(), Passes())
    return StrategyPlan(
        total.forward,
        total.backward,
        spec=call.spec,
        parts=parts,
        memory=peak_memory(workload, call.spec),
        fits=fitting is not None,
        max_frames=max_frames(workload, cluster, call.spec),
        call=call,
    )


def _fits(workload: Workload, spec: ParallelSpec, cluster: Cluster) -> bool:
    return sum(peak_memory(workload, spec).values()) <= USABLE * cluster.memory_bytes


def max_frames(workload: Workload, cluster: Cluster, spec: ParallelSpec) -> int:
    """Return the most frames that fit; 0 if one frame does not fit.

    The text has a placeholder for each frame, so it grows with the video; its other tokens stay. In a decoder-only
    model the visual tokens are counted apart.
    """
    placeholders = 0 if workload.model.decoder_only else 1
    others = max(0, workload.text - placeholders * workload.frames)

    def too_many(count: int) -> bool:
        return not _fits(replace(workload, frames=count, text=others + placeholders * count), spec, cluster)

    return bisect_left(range(1, MAX_FRAMES + 1), True, key=too_many)


def _why_illegal(strategy: str, workload: Workload) -> str:
    if workload.visual_offload:
        return "features in host memory need lv-xattn"
    if workload.gpus == 1:
        return "one GPU has no other GPU to share with"
    if strategy == "mesh":
        return f"{workload.gpus} GPUs have no tile (a, b) except (n, 1) and (1, n)"
    heads = workload.problem(workload.compared).heads
    return f"no group of the {workload.gpus} GPUs divides {heads} heads"  # Ulysses
