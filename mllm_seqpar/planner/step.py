"""The time of a step by part: attention simulated, linear layers by their FLOPs, parameters' traffic by its bytes.

Linear layers take 2 FLOPs per parameter and token forward, as much again in backward for the gradient of their input,
and once more for that of their weights where these are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .choose import Candidate, Options, choose
from .cluster import Cluster
from .run import Run
from .transfers import all_gather_seconds

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


def step_parts(run: Run, cluster: Cluster, cross: Candidate) -> Mapping[str, Part]:
    """The parts of a step (PARTS) whose cross-attention goes one way."""
    parts = {
        "vision tower": _vision(run, cluster),
        "self-attention": _self_attention(run, cluster),
        "cross-attention": _cross_attention(run, cluster, cross),
        "MLP": _mlp(run, cluster),
        "vocabulary": _vocabulary(run, cluster),
    }
    return parts | {"parameters": _parameters(run, cluster, parts)}


def cross_candidates(run: Run, cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, Candidate]:
    """The cheapest way of each strategy for one cross-attention call; strategies that are not legal are left out."""
    options = Options(training=run.training, strategies=strategies, visual=run.visual, overlap=run.overlap)
    cheapest: dict[str, Candidate] = {}
    for candidate in choose(run.cross_problem, cluster, options=options).table:
        cheapest.setdefault(candidate.way.strategy, candidate)
    return cheapest


def _linear(run: Run, cluster: Cluster, parameters: int, tokens: int, *, trained: bool, again: bool = False) -> Part:
    once = 2 * parameters * tokens / cluster.matmul
    return Part(once, once * (1 + trained + again) if run.training else 0.0)


def _language_trained(run: Run) -> bool:
    return run.trained in ("all", "no-vision")


def _vision(run: Run, cluster: Cluster) -> Part:
    """Tower, resampler and projector of a rank's own frames; a frozen tower has no backward pass."""
    vision, model = run.model.vision, run.model
    tokens = run.local_frames * vision.tokens
    attention = 4 * tokens * vision.tokens * vision.width * vision.layers / cluster.attention_forward
    forward = 2 * vision.parameters * tokens / cluster.matmul + attention
    backward = 0.0
    if run.trained == "all":  # with its layers computed again
        again = 10 * tokens * vision.tokens * vision.width * vision.layers / cluster.attention_backward
        backward = 3 * 2 * vision.parameters * tokens / cluster.matmul + attention + again
    connector = 2 * model.connector_parameters * run.local_frames * vision.keys / cluster.matmul
    return Part(forward + connector, backward + (2 * connector if run.training else 0.0))


def _self_attention(run: Run, cluster: Cluster) -> Part:
    text, problem = run.model.text, run.text_problem
    strategies = ("ring",) if run.self_attention == "local" else (run.self_attention,)
    ulysses = run.self_attention == "ulysses"
    best = choose(
        problem,
        cluster,
        options=Options(
            training=run.training,
            strategies=strategies if not ulysses else ("ring", "ulysses"),
            causal=True,
            overlap=run.overlap,
        ),
    ).table
    found = next((c for c in best if c.way.strategy == "ulysses"), best[0]) if ulysses else best[0]
    linear = _linear(
        run,
        cluster,
        text.attention_parameters,
        run.batch * run.rows,
        trained=_language_trained(run),
        again=run.checkpointing,
    )
    return _times(_plus(linear, found, run), text.layers)


def _cross_attention(run: Run, cluster: Cluster, cross: Candidate) -> Part:
    shape = run.model.cross
    queries = 2 * run.model.text.hidden * shape.heads * shape.head_dim if shape.own_queries else 0
    linear = _linear(run, cluster, queries, run.batch * run.rows, trained=True, again=run.checkpointing)
    return _times(_plus(linear, cross, run), shape.layers)


def _plus(linear: Part, attention: Candidate, run: Run) -> Part:
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
    return Part(
        part.forward * count,
        part.backward * count,
        part.exposed * count,
        part.hidden * count,
        part.node_bytes * count,
        part.network_bytes * count,
    )


def _mlp(run: Run, cluster: Cluster) -> Part:
    text, cross, tokens = run.model.text, run.model.cross, run.batch * run.rows
    own = _linear(
        run,
        cluster,
        text.layers * text.mlp_parameters,
        tokens,
        trained=_language_trained(run),
        again=run.checkpointing,
    )
    extra = cross.layers * cross.mlp_matrices * text.hidden * cross.mlp_inner
    other = _linear(run, cluster, extra, tokens, trained=True, again=run.checkpointing)
    return Part(own.forward + other.forward, own.backward + other.backward)


def _vocabulary(run: Run, cluster: Cluster) -> Part:
    text = run.model.text
    return _linear(run, cluster, text.vocabulary * text.hidden, run.batch * run.rows, trained=_language_trained(run))


def _parameters(run: Run, cluster: Cluster, parts: Mapping[str, Part]) -> Part:
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
