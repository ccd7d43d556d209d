"""The time of a step by part: attention simulated, linear layers by their FLOPs, parameters' traffic by its bytes.

Linear layers take 2 FLOPs per parameter and token forward, as much again in backward for the gradient of their input,
and once more for that of their weights where these are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from mllm_seqpar.errors import ConfigError

from .candidates import TEXT_STRATEGIES
from .cluster import Cluster
from .selection import Candidate, SelectionOptions, choose
from .transfers import all_gather, all_gather_seconds
from .workload import Workload

PARTS = ("vision tower", "self-attention", "cross-attention", "MLP", "vocabulary", "parameters")


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a step; `exposed` and `hidden` are its transfers', forward and backward together.

    `node_bytes`, `network_bytes`: what a rank sends for it, inside its node and to others.
    """

    forward: float = 0.0
    backward: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    node_bytes: int = 0
    network_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Part) -> Part:
        return Part(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def step_parts(run: Workload, cluster: Cluster, cross: Candidate, text: Candidate) -> Mapping[str, Part]:
    """The parts of a step (PARTS) whose cross-attention goes one way, and whose self-attention goes another."""
    parts = {
        "vision tower": _vision(run, cluster),
        "self-attention": _self_attention(run, cluster, text),
        "cross-attention": _cross_attention(run, cluster, cross),
        "MLP": _mlp(run, cluster),
        "vocabulary": _vocabulary(run, cluster),
    }
    return parts | {"parameters": _parameters(run, cluster, parts)}


def cross_candidates(run: Workload, cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, list[Candidate]]:
    """The ways of each strategy for one cross-attention call, cheapest first; strategies that are not legal are left
    out."""
    options = SelectionOptions(
        training=run.training, strategies=strategies, visible=run.visible, visual=run.visual, overlap=run.overlap
    )
    found: dict[str, list[Candidate]] = {}
    for candidate in choose(run.cross_problem, cluster, options=options).table:
        found.setdefault(candidate.way.strategy, []).append(candidate)
    return found


def self_candidate(run: Workload, cluster: Cluster) -> Candidate:
    """The cheapest way of the configured self-attention for one call.

    Raises:
        ConfigError: none is legal.
    """
    names: tuple[str, ...] = (run.self_attention,)
    if run.self_attention == "local" or run.gpus == 1:
        names = ("ring",)
    elif run.self_attention == "auto":
        names = TEXT_STRATEGIES
    options = SelectionOptions(training=run.training, strategies=names, causal=True, overlap=run.overlap)
    try:
        return choose(run.text_problem, cluster, options=options).table[0]
    except ConfigError as error:
        raise ConfigError(
            f"self_attention: {run.self_attention} cannot share out {run.model.text.heads} heads over {run.gpus} GPUs; "
            "choose ring, or another number of GPUs"
        ) from error


def _linear(run: Workload, cluster: Cluster, parameters: int, tokens: int, *, trained: bool, again: int = 0) -> Part:
    once = 2 * parameters * tokens / cluster.matmul
    return Part(once, once * (1 + trained + again) if run.training else 0.0)


def _vision(run: Workload, cluster: Cluster) -> Part:
    """Tower, resampler and projector of a rank's own frames; a frozen tower has no backward pass."""
    vision, model = run.model.vision, run.model
    tokens = run.local_frames * vision.tokens
    attention = 4 * tokens * vision.tokens * vision.width * vision.layers / cluster.attention_forward
    forward = 2 * vision.parameters * tokens / cluster.matmul + attention
    backward = 0.0
    if run.trained == "all":
        backward = 2 * 2 * vision.parameters * tokens / cluster.matmul
        backward += 10 * tokens * vision.tokens * vision.width * vision.layers / cluster.attention_backward
        backward += forward if run.checkpointing else 0.0
    connector = 2 * model.connector_work * run.local_frames / cluster.matmul
    return Part(forward + connector, backward + (2 * connector if run.training else 0.0))


def _self_attention(run: Workload, cluster: Cluster, text: Candidate) -> Part:
    linear = _linear(
        run,
        cluster,
        run.model.text.attention_parameters,
        run.batch * run.rows,
        trained=run.language_trained,
        again=run.checkpointing,
    )
    return _times(_plus(linear, text, run), run.model.text.layers)


def _cross_attention(run: Workload, cluster: Cluster, cross: Candidate) -> Part:
    shape = run.model.cross
    queries = 2 * run.model.text.hidden * shape.heads * shape.head_dim if shape.own_queries else 0
    linear = _linear(run, cluster, queries, run.batch * run.rows, trained=True, again=run.checkpointing)
    layer = _plus(linear, cross, run)
    if run.self_attention == "local":
        layer = layer + _rows_gathered(run, cluster)
    return _times(layer, shape.layers)


def _rows_gathered(run: Workload, cluster: Cluster) -> Part:
    """Where every rank computes all text, it takes the others' rows of O; backward sums their gradients in float32."""
    problem = run.cross_problem
    elements = problem.batch * problem.rows * problem.heads * problem.dim
    trips = [all_gather(cluster, run.gpus, elements * problem.element)]
    if run.training:
        trips += [all_gather(cluster, run.gpus, elements * problem.accumulated)] + trips * run.checkpointing
    seconds = [trip.seconds for trip in trips]
    node, network = sum(trip.node_bytes for trip in trips), sum(trip.network_bytes for trip in trips)
    return Part(seconds[0], sum(seconds[1:]), sum(seconds), 0.0, node, network)


def _plus(linear: Part, attention: Candidate, run: Workload) -> Part:
    """Linear layers and one attention call, which checkpointing does again in backward, transfers included."""
    forward, backward = attention.forward, attention.backward
    if backward is None:
        calls = [forward]
    else:
        calls = [forward, backward] + ([forward] if run.checkpointing else [])
    return Part(
        linear.forward + forward.seconds,
        linear.backward + sum(call.seconds for call in calls[1:]),
        sum(call.exposed for call in calls),
        sum(call.hidden for call in calls),
        sum(call.node_bytes for call in calls),
        sum(call.network_bytes for call in calls),
    )


def _times(part: Part, count: int) -> Part:
    return Part(*(value * count for value in astuple(part)))


def _mlp(run: Workload, cluster: Cluster) -> Part:
    """Chunks are computed again in backward, whether the layer is or not: its own recomputation stops short of the MLP.
    But a gated block, as the MLPs behind cross-attention are, keeps its result: there both are done."""
    text, cross, tokens = run.model.text, run.model.cross, run.batch * run.rows
    parameters, trained = text.layers * text.mlp_parameters, run.language_trained
    own = _linear(run, cluster, parameters, tokens, trained=trained, again=run.checkpointing or run.chunked)
    extra = cross.layers * cross.mlp_matrices * text.hidden * cross.mlp_inner
    return own + _linear(run, cluster, extra, tokens, trained=True, again=run.checkpointing + run.chunked)


def _vocabulary(run: Workload, cluster: Cluster) -> Part:
    text = run.model.text
    return _linear(run, cluster, text.vocabulary * text.hidden, run.batch * run.rows, trained=run.language_trained)


def _parameters(run: Workload, cluster: Cluster, parts: Mapping[str, Part]) -> Part:
    """FSDP2: all parameters gathered forward and again in backward, gradients summed; under computation as far as
    there is any that waits for nothing else."""
    if run.gpus == 1:
        return Part()
    gather = all_gather_seconds(cluster, run.gpus, run.model.parameters * run.element / run.gpus)
    reduce = all_gather_seconds(cluster, run.gpus, run.trained_parameters * run.parameter / run.gpus)
    forward = max(0.0, gather - sum(part.forward for part in parts.values()))
    backward = max(0.0, gather + reduce - sum(part.backward for part in parts.values())) if run.training else 0.0
    moved = gather + (gather + reduce if run.training else 0.0)
    share = run.model.parameters * run.element + run.trained_parameters * run.parameter
    share += run.model.parameters * run.element if run.training else 0
    inside = min(run.gpus, cluster.gpus_per_node) - 1
    return Part(
        forward,
        backward,
        forward + backward,
        moved - forward - backward,
        share * inside // run.gpus,
        share * (run.gpus - 1 - inside) // run.gpus,
    )
