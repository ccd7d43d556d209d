"""A plan: for each strategy the time of a step by part, the memory by kind, and the longest video that fits.

The rows of a plan differ in the strategy of one attention, that of the frames (in a decoder-only model, that of the
whole sequence). Beside cross-attention, the strategy of self-attention is the same in all rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, TEXT_STRATEGIES, ParallelSpec

from .call_cost import MARGIN, Candidate, Selection, select_strategy
from .cluster import Cluster, Passes
from .memory import USABLE, peak_memory
from .step import step_parts
from .workload import Workload

MAX_FRAMES = 2**27
"""The longest video to consider: four years at one frame per second."""

DECODE_RATE = 400.0
"""Frames per second that one core decodes where the cluster file does not say: H.264 in 720p, measured."""

_ORDER = (*STRATEGIES, "local")


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(Passes):
    """The estimate of a step with one strategy."""

    spec: ParallelSpec  # with the fastest mesh shape that fits
    parts: Mapping[str, Passes]  # by `step.PARTS`; a model or a cluster may lack some
    memory: Mapping[str, int]  # bytes of a rank by kind (`memory.KINDS`)
    fits: bool
    max_frames: int  # the most that fit

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """The estimates of all strategies for one workload on one cluster."""

    workload: Workload
    cluster: Cluster
    rows: tuple[StrategyPlan, ...]  # of the part that is `compared`; strategies that fit come first, the fastest first
    illegal: Mapping[str, str]  # the reason by strategy
    text: ParallelSpec  # of self-attention, the same in all rows; of the first one in a decoder-only model
    min_gpus: int | None  # the smallest power of two on which `preferred`, which needs the least memory, fits

    def cores_per_gpu(self, row: StrategyPlan) -> float:
        """Return how many cores decode the videos of a step, for each GPU, while the step runs."""
        workload = self.workload
        decoded = workload.batch * workload.frames / workload.gpus * workload.decode_per_frame
        return decoded / (self.cluster.decode_rate or DECODE_RATE) / row.seconds

    def hours(self, row: StrategyPlan) -> float:
        """Return the hours of all steps of the data set."""
        return self.workload.steps * row.seconds / 3600

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


def make_plan(workload: Workload, cluster: Cluster, strategies: Sequence[str] = STRATEGIES) -> Plan:
    """Return the plan; a ConfigError names an unknown or no legal strategy, or link speeds that the cluster lacks.

    `strategies` are for cross-attention. A decoder-only model is planned with each `self_attention` that its workload
    allows.
    """
    cluster.check_ranks(workload.gpus)
    fixed: dict[str, Candidate] = {}  # the attention that all rows have in common, by part
    if workload.model.decoder_only:
        strategies = _text_strategies(workload)
    else:
        fixed["self-attention"] = attention_selection(workload, cluster, "self-attention")
    possible = ("lv-xattn",) if workload.visual_offload else strategies
    by_strategy: dict[str, list[Candidate]] = {}
    for candidate in attention_selection(workload, cluster, workload.compared, possible).candidates:
        by_strategy.setdefault(candidate.spec.strategy, []).append(candidate)
    rows = [_strategy_plan(workload, cluster, candidates, fixed) for candidates in by_strategy.values()]
    rows.sort(key=lambda row: (not row.fits, row.seconds, _ORDER.index(row.spec.strategy)))
    reasons = {
        "mesh": f"{workload.gpus} GPUs have no tile (a, b) except (n, 1) and (1, n)",
        "ulysses": f"no group of the {workload.gpus} GPUs divides {workload.problem(workload.compared).heads} heads",
    }
    if workload.gpus == 1:
        reasons = dict.fromkeys(strategies, "one GPU has no other GPU to share with")
    if workload.visual_offload:
        reasons = dict.fromkeys(strategies, "features in host memory need lv-xattn")
    illegal = {name: reasons[name] for name in strategies if name not in by_strategy}
    powers_of_two = (2**i for i in range(17))
    runs = ((n, *_preferred_run(replace(workload, gpus=n))) for n in powers_of_two)
    enough = (n for n, run, spec in runs if _fits(run, cluster, spec))
    text = fixed.get("self-attention", rows[0]).spec
    return Plan(workload, cluster, tuple(rows), illegal, text, next(enough, None))


def _text_strategies(workload: Workload) -> tuple[str, ...]:
    """Return the strategies of self-attention that the workload allows."""
    return TEXT_STRATEGIES if workload.self_attention == "auto" else (workload.self_attention,)


def _preferred_run(workload: Workload) -> tuple[Workload, ParallelSpec]:
    """Return the workload with the strategy that needs the least memory, which is preferred among equals."""
    if workload.model.decoder_only:
        return replace(workload, self_attention="ring"), ParallelSpec("ring", (1, workload.gpus))
    return workload, ParallelSpec("lv-xattn", (workload.gpus, 1))


def _strategy_plan(
    workload: Workload, cluster: Cluster, candidates: Sequence[Candidate], fixed: Mapping[str, Candidate]
) -> StrategyPlan:
    """Plan the fastest of the candidates for the compared attention that fits; if none fits, the fastest."""
    text_spec = fixed["self-attention"].spec if fixed else None
    if workload.self_attention == "auto":
        workload = replace(workload, self_attention=(text_spec or candidates[0].spec).strategy)
    fitting = next((call for call in candidates if _fits(workload, cluster, call.spec, text_spec)), None)
    call = fitting or candidates[0]
    parts = step_parts(workload, cluster, {**fixed, workload.compared: call})
    total = sum(parts.values(), Passes())
    return StrategyPlan(
        total.forward,
        total.backward,
        spec=call.spec,
        parts=parts,
        memory=peak_memory(workload, call.spec, text_spec),
        fits=fitting is not None,
        max_frames=max_frames(workload, cluster, call.spec, text_spec),
    )


def _fits(workload: Workload, cluster: Cluster, spec: ParallelSpec, text_spec: ParallelSpec | None = None) -> bool:
    return sum(peak_memory(workload, spec, text_spec).values()) <= USABLE * cluster.memory_bytes


def max_frames(workload: Workload, cluster: Cluster, spec: ParallelSpec, text_spec: ParallelSpec | None = None) -> int:
    """Return the most frames that fit; 0 if one frame does not fit.

    The text has a placeholder for each frame, so it grows with the video; its other tokens stay. In a decoder-only
    model the visual tokens are counted apart. Frames that differ count as frames of the mean size.
    """
    placeholders = 0 if workload.model.decoder_only else 1
    others = max(0, workload.text - placeholders * workload.frames)

    def too_many(count: int) -> bool:
        longer = replace(workload, frames=count, frame_tokens=None, text=others + placeholders * count)
        return not _fits(longer, cluster, spec, text_spec)

    return bisect_left(range(1, MAX_FRAMES + 1), True, key=too_many)


def simulated_cluster(workload: Workload, cluster: Cluster) -> Cluster:
    """Return the cluster that attention is simulated on: if the workload does not overlap transfers, it cannot."""
    return cluster if workload.overlap else replace(cluster, overlap=0.0)


def attention_selection(
    workload: Workload, cluster: Cluster, part: str, strategies: Sequence[str] = STRATEGIES
) -> Selection:
    """Return the selection for one call of the attention of a part; raise ConfigError if no strategy is legal.

    `strategies` are for cross-attention; the workload has the strategies of self-attention.
    """
    kind = workload.self_attention
    if part == "self-attention":
        # One GPU has all of the text with any strategy.
        strategies = ("ring",) if workload.gpus == 1 and kind != "local" else _text_strategies(workload)
    problem, visible, crossing = workload.problem(part), workload.visible(part), part == "cross-attention"
    try:
        return select_strategy(
            problem,
            simulated_cluster(workload, cluster),
            training=workload.training,
            strategies=strategies,
            visible=visible,
            visual=workload.visual if crossing else None,
            masked=crossing and visible < 1,
        )
    except ConfigError as error:
        if part != "self-attention":
            raise
        raise ConfigError(
            f"self_attention: {kind} cannot shard {problem.heads} heads over {workload.gpus} GPUs; choose ring, or "
            "another number of GPUs"
        ) from error
