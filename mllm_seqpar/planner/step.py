"""The time of a step: a list of terms, each a part of the step with its cost forward and in backward.

Attention is simulated, linear layers count by FLOPs, parameter traffic by bytes. Linear layers cost 2 FLOPs per
parameter and token forward, the same in backward for the gradient of their input, and the same again for the gradient
of their weights if these are trained. LoRA computes the gradient of its adapters instead.

The terms of backward are those of a training step. `step_parts` leaves them out of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .call_cost import AttentionCall, Candidate
from .cluster import ATTENTION_FLOPS, Cluster, Cost, Passes, all_gather, all_to_all
from .workload import FLOAT32, Workload

PARTS = ("vision tower", "self-attention", "cross-attention", "MLP", "vocabulary", "launches", "parameters")

HOST_LINK = 20e9
"""Bytes per second from pinned memory to a GPU: about four fifths of PCIe 4.0 with 16 lanes, 25 GB/s in practice."""

Term = tuple[str, Passes]
"""A part of a step, and a cost that counts in it."""


def step_parts(workload: Workload, cluster: Cluster, calls: Mapping[str, Candidate]) -> Mapping[str, Passes]:
    """Return the parts of a step (PARTS); an answer has one more, "decoding".

    `calls` has the candidate for the attention of each part. A decoder-only model has no cross-attention. "launches" is
    the time in which the device waits for the host's launches.
    """
    model, terms = workload.model, [*_vision(workload, cluster)]
    for part, candidate in calls.items():
        layers = model.cross.layers if part == "cross-attention" else model.text.layers
        terms.append((part, _attention_call(workload, cluster, part, candidate) * layers))
    parts: dict[str, Passes] = {}
    for part, passes in [*terms, *_linear_layers(workload, cluster)]:
        parts[part] = parts.get(part, Passes()) + passes
    if cluster.layer_forward_s or cluster.layer_backward_s:
        computed = parts["self-attention"] + parts["MLP"]
        forward = max(0.0, model.text.layers * cluster.layer_forward_s - computed.forward.seconds)
        backward = max(0.0, model.text.layers * cluster.layer_backward_s - computed.backward.seconds)
        parts["launches"] = Passes(Cost(forward), Cost(backward))
    parts["parameters"] = _parameters(workload, cluster, sum(parts.values(), Passes()))
    if not workload.training:
        parts = {part: Passes(passes.forward) for part, passes in parts.items()}
    if workload.answer:
        parts["decoding"] = _decoded_token(workload, cluster) * workload.answer
    return parts


def _linear_layers(workload: Workload, cluster: Cluster) -> Iterator[Term]:
    """Yield the linear layers on text, the head, and all adapters."""
    model, chunked, checkpointing = workload.model, workload.chunked, workload.checkpointing

    def linear(products: int, tokens: int, trained: bool, recomputed: int) -> Passes:
        """Return the cost of layers with these multiply-adds per token and number of recomputations in backward."""
        once = 2 * products * tokens / cluster.matmul
        return Passes(Cost(once), Cost(once * (1 + trained + recomputed)))

    for one in model.linear:
        decoder = one.target in ("attention", "mlp")
        if not one.visual:  # `_vision` and the attention calls have those on visual tokens
            recomputed = int(checkpointing)
            if one.part == "MLP":
                # Chunks of an MLP are recomputed in backward. The recomputation of a decoder layer stops before its
                # MLP, so that chunks are recomputed once. The MLP of a cross-attention layer is followed by a gate that
                # saves its result, so that it is recomputed by both.
                recomputed = int(checkpointing or chunked) if decoder else checkpointing + chunked
            trained = workload.language_trained if decoder else workload.lora_r is None
            yield one.part, linear(one.parameters, workload.tokens, trained, recomputed)
        if adapters := workload.adapter_parameters(one):
            part = "cross-attention" if one.target == "cross" else one.part
            tokens = workload.local_keys if one.visual else workload.tokens
            yield part, linear(adapters, tokens, True, checkpointing)
    head = model.text.vocabulary * model.text.hidden
    yield "vocabulary", linear(head, workload.scored_tokens, workload.language_trained, 0)


def _vision(workload: Workload, cluster: Cluster) -> Iterator[Term]:
    """Yield tower, resampler and projector on a rank's frames; a frozen tower has no backward pass.

    In a decoder-only model, the embeddings are then sent to the ranks that have their tokens by one all-to-all, or with
    local text by one all-gather; in backward, the gradients are sent the other way.
    """
    part, model, vision, gpus = "vision tower", workload.model, workload.model.vision, workload.gpus
    full = vision.full_layers if vision.window else vision.layers

    def attended(tokens: int) -> int:
        return tokens * (full * tokens + (vision.layers - full) * min(vision.window, tokens))

    linear = 2 * workload.sum_over_frames(int) * vision.parameters / (cluster.tower or cluster.matmul)
    entries = workload.sum_over_frames(attended) * vision.width
    rates = cluster.tower or cluster.attention_forward, cluster.tower or cluster.attention_backward
    attention, gradients = (flops * entries / rate for flops, rate in zip(ATTENTION_FLOPS, rates, strict=True))
    forward, backward = linear + attention, 0.0
    if workload.trained == "all":
        backward = 2 * linear + gradients + forward * workload.checkpointing
    yield part, Passes(Cost(forward), Cost(backward))
    products, r = workload.local_keys * model.parameters_of("connector"), model.resampler
    if r:  # K and V are projected from the patches, too
        products += workload.local_frames * r.layers * 2 * vision.tokens * vision.width * r.heads * r.head_dim
    connector = 2 * products / cluster.matmul
    backward = connector * (2 if workload.lora_r is None else 1) if workload.trains_features else 0.0
    yield part, Passes(Cost(connector), Cost(backward))
    if model.decoder_only and gpus > 1:
        size = workload.local_keys * workload.embedding_width * workload.element
        local = workload.self_attention == "local"
        sent = all_gather(cluster, gpus, size) if local else all_to_all(cluster, gpus, gpus, size)
        yield part, Passes(sent, sent if workload.trains_features else Cost())


def _attention_call(workload: Workload, cluster: Cluster, part: str, candidate: Candidate) -> Passes:
    """Return the cost of one attention call.

    With checkpointing, backward repeats the forward pass with its transfers, or, if its results are kept, only the
    all-to-all of Q, and of given K and V, to head shards. With local text, every rank gathers the rows of O of the
    others for cross-attention; backward sums their gradients in float32.
    """
    problem, crossing = workload.problem(part), part == "cross-attention"
    again, degree = Cost(), candidate.spec.head_degree
    if workload.checkpointing and workload.recompute_attention:
        again = candidate.forward
    elif workload.checkpointing and degree > 1:
        q, kv, _ = AttentionCall(problem, candidate.spec, cluster, backward=True).head_shard_bytes
        again = all_to_all(cluster, problem.ranks, degree, q + (0 if crossing and workload.recompute else kv))
    call = Passes(candidate.forward, candidate.backward + again)
    cross = workload.model.cross
    if crossing and cross.features_norm and cluster.memory_rate is not None:
        # The norm of the features before the projection, and the rotation of K, are bound by memory. Both compute in
        # float32, operator by operator: per channel they read and write 28 bytes, and four times the features' element.
        # Backward of the norm moves twice as many.
        keys = workload.local_keys * (workload.gpus if candidate.spec.strategy == "replicate" else 1)
        channels = cross.visual_dim + 2 * cross.kv_heads * cross.head_dim
        once = keys * channels * (28 + 4 * workload.element) / cluster.memory_rate
        repeats = workload.recompute + 2 * (workload.language_trained or workload.trains_features)
        call += Passes(Cost(once), Cost(once * repeats))
    if crossing and workload.visual_offload:
        call = _with_copies(workload, call)
    if crossing and workload.self_attention == "local":
        elements = problem.batch * problem.rows * problem.heads * problem.dim
        rows, gradients = (
            all_gather(cluster, workload.gpus, elements * size) for size in (problem.element, problem.accumulated)
        )
        call += Passes(rows, gradients + rows * workload.checkpointing)
    return call


def _with_copies(workload: Workload, call: Passes) -> Passes:
    """Return the cost of an attention call with features in host memory.

    A layer brings all features of the rank once per pass, under the computation of the chunk before, so a pass of a
    layer takes at least features / HOST_LINK seconds. Q, O and the log-sum-exp are exchanged before and after the
    computation, so none of these transfers overlaps with it.
    """
    once = workload.features_bytes / HOST_LINK
    copies = 1 + workload.trains_features  # copies in the two directions overlap
    copies += workload.checkpointing  # backward repeats the forward pass
    hidden = call.both.hidden / 2 if workload.training else call.forward.hidden

    def exposing(cost: Cost, seconds: float) -> Cost:
        return replace(
            cost, seconds=max(cost.seconds + hidden, seconds), exposed=cost.exposed + cost.hidden, hidden=0.0
        )

    return Passes(exposing(call.forward, once), exposing(call.backward, once * copies))


def _parameters(workload: Workload, cluster: Cluster, computed: Passes) -> Passes:
    """Return the cost of FSDP2: parameters are gathered forward and again in backward, and gradients are reduced.

    These transfers hide under all computation of the step.
    """
    if not workload.weights_sharded:
        return Passes()
    parameters = workload.model.parameters * workload.element
    if workload.lora_r is not None:  # frozen weights are gathered as they are stored
        parameters = workload.frozen_bytes + workload.trained_parameters * workload.element
    gradients = workload.trained_parameters * workload.parameter

    def waiting(under: Cost, *sizes: int) -> Cost:
        cost = sum((all_gather(cluster, workload.gpus, size / workload.gpus) for size in sizes), Cost())
        exposed = max(0.0, cost.seconds - under.seconds)
        return replace(cost, seconds=exposed, exposed=exposed, hidden=cost.seconds - exposed)

    return Passes(waiting(computed.forward, parameters), waiting(computed.backward, parameters, gradients))


def _decoded_token(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of generating one token: weights and K, V are read, and the ranks' partial results are merged.

    Every rank computes all layers of the token, over its own keys. Sharded weights are gathered for each token.
    """
    text, gpus = workload.model.text, workload.gpus
    layers = workload.model.parameters_of("attention", "mlp")
    weights = layers + text.vocabulary * text.hidden
    seconds = 2 * weights * workload.batch / cluster.matmul
    if cluster.memory_rate is not None:
        seconds = max(seconds, weights * workload.element / cluster.memory_rate)
        seconds += workload.cache_bytes / cluster.memory_rate
    cost = Cost(seconds)
    if workload.text_ranks > 1:
        merged = workload.batch * text.heads * (text.head_dim + 1) * FLOAT32
        cost += all_gather(cluster, gpus, merged) * text.layers
    if workload.weights_sharded:
        cost += all_gather(cluster, gpus, layers * workload.element // gpus)
    return Passes(cost)
