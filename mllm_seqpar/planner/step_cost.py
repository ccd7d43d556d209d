"""The time of a step by part: attention is simulated, linear layers count by FLOPs, parameter traffic by bytes.

Linear layers cost 2 FLOPs per parameter and token forward, the same in backward for the gradient of their input, and
the same again for the gradient of their weights if these are trained. LoRA computes the gradient of its adapters
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem

from . import offload
from .call_cost import head_sharding_bytes
from .candidates import STRATEGIES, ParallelSpec
from .cluster import Cluster
from .costs import Cost, Passes, all_gather, all_gather_seconds, all_to_all
from .selection import Candidate, select_strategy
from .workload import FLOAT32, Workload

PARTS = ("vision tower", "self-attention", "cross-attention", "MLP", "vocabulary", "parameters")
_ADAPTED = {"self-attention": "attention", "MLP": "mlp", "cross-attention": "cross", "vision tower": "connector"}
"""The layers with adapters that each part contains."""


def attention_candidates(
    workload: Workload, cluster: Cluster, part: str, strategies: Sequence[str] = STRATEGIES
) -> Sequence[Candidate]:
    """Return the legal candidates for one call of the attention of a part, fastest first; ConfigError if none is legal.

    `strategies` are for cross-attention; the workload has the strategies of self-attention.
    """
    options, problem = workload.call_options(part), workload.problem(part)
    if part != "self-attention":
        return select_strategy(
            problem, cluster, training=workload.training, strategies=strategies, **options
        ).candidates
    try:
        found = select_strategy(
            problem, cluster, training=workload.training, strategies=workload.text_strategies, **options
        ).candidates
    except ConfigError as error:
        raise ConfigError(
            f"self_attention: {workload.self_attention} cannot shard {workload.model.text.heads} heads over "
            f"{workload.gpus} GPUs; choose ring, or another number of GPUs"
        ) from error
    if workload.self_attention == "local":
        return [replace(candidate, spec=ParallelSpec("local", (1, 1))) for candidate in found]
    return found


def step_parts(workload: Workload, cluster: Cluster, cross: Candidate | None, text: Candidate) -> Mapping[str, Passes]:
    """Return the parts of a step (PARTS) with one candidate for cross-attention and one for self-attention.

    A decoder-only model has no cross-attention. An answer has one more part, "decoding".
    """
    sizes, trained = workload.model.text, workload.language_trained
    layer = _linear(workload, cluster, sizes.attention_parameters, trained=trained, recomputed=workload.checkpointing)
    vocabulary = sizes.vocabulary * sizes.hidden
    parts = {
        "vision tower": _vision(workload, cluster) + _exchanged_embeddings(workload, cluster),
        "self-attention": (layer + _attention_call(workload, cluster, text, workload.text_problem)) * sizes.layers,
        **({} if cross is None else {"cross-attention": _cross_attention(workload, cluster, cross)}),
        "MLP": _mlp(workload, cluster),
        "vocabulary": _linear(workload, cluster, vocabulary, trained=trained, tokens=workload.scored_tokens),
    }
    for name, target in _ADAPTED.items():
        if name in parts:
            parts[name] += _adapters(workload, cluster, target)
    parts["parameters"] = _parameters(workload, cluster, parts)
    return parts | ({"decoding": _decoded_token(workload, cluster) * workload.answer} if workload.answer else {})


def _linear(
    workload: Workload, cluster: Cluster, parameters: int, *, trained: bool, recomputed: int = 0, tokens: int = 0
) -> Passes:
    """Return the cost of linear layers with this number of recomputations, by default on all tokens of a rank."""
    once = 2 * parameters * (tokens or workload.tokens) / cluster.matmul
    backward = once * (1 + (trained and workload.lora_r is None) + recomputed) if workload.training else 0.0
    return Passes(Cost(once), Cost(backward))


def _adapters(workload: Workload, cluster: Cluster, target: str) -> Passes:
    """Return the cost of the adapters of one kind of layers, which have both gradients in backward."""
    keys, work = workload.local_frames * workload.model.vision.keys, 0
    for found in workload.adapted((target,)):
        text, visual = (workload.adapter_channels(layers) for layers in (found.text, found.visual))
        work += found.layers * (text * workload.tokens + visual * keys)
    once = 2 * work / cluster.matmul
    return Passes(Cost(once), Cost(once * (2 + workload.checkpointing)))


def _vision(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of tower, resampler and projector on a rank's frames; a frozen tower has no backward pass."""
    vision, frames = workload.model.vision, workload.local_frames
    tokens = frames * vision.tokens
    linear = 2 * vision.parameters * tokens / cluster.matmul
    entries = tokens * vision.attended * vision.width
    forward = linear + 4 * entries / cluster.attention_forward
    backward = 0.0
    if workload.trained == "all":
        backward = 2 * linear + 10 * entries / cluster.attention_backward
        backward += forward if workload.checkpointing else 0.0
    connector = 2 * workload.model.connector_work * frames / cluster.matmul
    if workload.training and workload.trains_features:
        backward += connector * (2 if workload.lora_r is None else 1)
    return Passes(Cost(forward + connector), Cost(backward))


def _exchanged_embeddings(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of sending a decoder-only model's embeddings to the ranks that have their tokens.

    It is one all-to-all, or with local text one all-gather; in backward, the gradients travel the other way.
    """
    model, gpus = workload.model, workload.gpus
    if not model.decoder_only or gpus == 1:
        return Passes()
    size = workload.local_frames * model.vision.keys * model.embedding_width * workload.element
    local = workload.self_attention == "local"
    cost = all_gather(cluster, gpus, size) if local else all_to_all(cluster, gpus, gpus, size)
    return Passes(cost, cost if workload.training and workload.trains_features else Cost())


def _cross_attention(workload: Workload, cluster: Cluster, cross: Candidate) -> Passes:
    sizes = workload.model.cross
    queries = 2 * workload.model.text.hidden * sizes.heads * sizes.head_dim if sizes.own_queries else 0
    layer = _linear(workload, cluster, queries, trained=True, recomputed=workload.checkpointing)
    call = _attention_call(workload, cluster, cross, workload.cross_problem, recomputed_kv=workload.recompute)
    layer += offload.with_copies(workload, call) if workload.visual_offload else call
    if workload.self_attention == "local":
        layer += _gathered_rows(workload, cluster)
    return layer * sizes.layers


def _attention_call(
    workload: Workload, cluster: Cluster, candidate: Candidate, problem: Problem, recomputed_kv: bool = False
) -> Passes:
    """Return the cost of one attention call.

    With checkpointing, backward repeats the forward pass with its transfers, or, if its results are kept, only the
    all-to-all of Q, and of given K and V, to head shards.
    """
    again = Cost()
    if workload.training and workload.checkpointing:
        if workload.recompute_attention:
            again = candidate.forward
        elif (degree := candidate.spec.head_degree) > 1:
            size = head_sharding_bytes(problem, degree, kv=not recomputed_kv)
            again = all_to_all(cluster, problem.ranks, degree, size)
    return Passes(candidate.forward, candidate.backward + again)


def _gathered_rows(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of gathering rows for local text.

    Every rank gathers the rows of O of the others; backward sums their gradients in float32.
    """
    problem = workload.cross_problem
    elements = problem.batch * problem.rows * problem.heads * problem.dim
    rows = all_gather(cluster, workload.gpus, elements * problem.element)
    if not workload.training:
        return Passes(rows)
    gradients = all_gather(cluster, workload.gpus, elements * problem.accumulated)
    return Passes(rows, gradients + rows * workload.checkpointing)


def _mlp(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of the MLPs. Chunks are recomputed in backward, whether or not the layer is checkpointed.

    The recomputation of a decoder layer stops before its MLP, so that chunks are recomputed once. The MLP of a
    cross-attention layer is followed by a gate that saves its result, so that it is recomputed by both.
    """
    text, cross, chunked, layers = workload.model.text, workload.model.cross, workload.chunked, workload.checkpointing
    decoder = text.layers * text.mlp_parameters
    crossing = cross.layers * cross.mlp_matrices * text.hidden * cross.mlp_inner
    trained = workload.language_trained
    return _linear(workload, cluster, decoder, trained=trained, recomputed=layers or chunked) + _linear(
        workload, cluster, crossing, trained=True, recomputed=layers + chunked
    )


def _parameters(workload: Workload, cluster: Cluster, parts: Mapping[str, Passes]) -> Passes:
    """Return the cost of FSDP2: parameters are gathered forward and again in backward, and gradients are reduced.

    These transfers hide under all computation of the step.
    """
    if not workload.weights_sharded:
        return Passes()
    parameters = workload.model.parameters * workload.element
    if workload.lora_r is not None:  # frozen weights are gathered as they are stored
        parameters = workload.frozen_bytes + workload.trained_parameters * workload.element
    gradients = workload.trained_parameters * workload.parameter
    computed = sum(parts.values(), Passes())

    def waiting(under: float, *sizes: int) -> Cost:
        seconds = sum(all_gather_seconds(cluster, workload.gpus, size / workload.gpus) for size in sizes)
        exposed, inside = max(0.0, seconds - under), min(workload.gpus, cluster.gpus_per_node) - 1
        sent = (sum(sizes) * peers // workload.gpus for peers in (inside, workload.gpus - 1 - inside))
        return Cost(exposed, exposed, seconds - exposed, *sent)

    backward = waiting(computed.backward.seconds, parameters, gradients) if workload.training else Cost()
    return Passes(waiting(computed.forward.seconds, parameters), backward)


def _decoded_token(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of generating one token: weights and K, V are read, and the ranks' partial results are merged.

    Every rank computes all layers of the token, over its own keys. Sharded weights are gathered for each token.
    """
    text, gpus = workload.model.text, workload.gpus
    layers = text.layers * (text.attention_parameters + text.mlp_parameters)
    weights = layers + text.vocabulary * text.hidden
    seconds = 2 * weights * workload.batch / cluster.matmul
    if cluster.memory_rate is not None:
        seconds = max(seconds, weights * workload.element / cluster.memory_rate)
        seconds += workload.cache_bytes / cluster.memory_rate
    cost = Cost(seconds)
    if gpus > 1 and workload.self_attention != "local":
        merged = workload.batch * text.heads * (text.head_dim + 1) * FLOAT32
        cost += all_gather(cluster, gpus, merged) * text.layers
    if workload.weights_sharded:
        cost += all_gather(cluster, gpus, layers * workload.element // gpus)
    return Passes(cost)
