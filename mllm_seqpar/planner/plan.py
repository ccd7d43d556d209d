"""A plan: for each strategy the time of a step by part, the memory by kind, and the longest video that fits.

Attention is simulated, linear layers count by FLOPs, parameter traffic by bytes. Linear layers cost 2 FLOPs per
parameter and token forward, the same in backward for the gradient of their input, and the same again for the gradient
of their weights if these are trained. LoRA computes the gradient of its adapters instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, TEXT_STRATEGIES, ParallelSpec

from .call_cost import MARGIN, AttentionCall, Candidate, Selection, select_strategy
from .cluster import Cluster, Cost, Passes, all_gather, all_to_all
from .memory import USABLE, peak_memory
from .workload import FLOAT32, Workload

MAX_FRAMES = 2**27
"""The longest video to consider: four years at one frame per second."""

DECODE_RATE = 400.0
"""Frames per second that one core decodes where the cluster file does not say: H.264 in 720p, measured."""

PARTS = ("vision tower", "self-attention", "cross-attention", "MLP", "vocabulary", "launches", "parameters")

HOST_LINK = 20e9
"""Bytes per second from pinned memory to a GPU: about four fifths of PCIe 4.0 with 16 lanes, 25 GB/s in practice."""

_ORDER = (*STRATEGIES, "local")


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(Passes):
    """The estimate of a step with one strategy."""

    spec: ParallelSpec  # with the fastest mesh shape that fits
    parts: Mapping[str, Passes]  # by PARTS, of which a model without cross-attention, or a cluster, may lack some
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
    if workload.model.decoder_only:
        strategies, text = TEXT_STRATEGIES if workload.self_attention == "auto" else (workload.self_attention,), None
    else:
        text = attention_selection(workload, cluster, "self-attention")
    possible = ("lv-xattn",) if workload.visual_offload else strategies
    by_strategy: dict[str, list[Candidate]] = {}
    for candidate in attention_selection(workload, cluster, workload.compared, possible).candidates:
        by_strategy.setdefault(candidate.spec.strategy, []).append(candidate)
    rows = [_strategy_plan(workload, cluster, candidates, text) for candidates in by_strategy.values()]
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
    spec = text.spec if text else rows[0].spec
    return Plan(workload, cluster, tuple(rows), illegal, spec, next(enough, None))


def _preferred_run(workload: Workload) -> tuple[Workload, ParallelSpec]:
    """Return the workload with the strategy that needs the least memory, which is preferred among equals."""
    if workload.model.decoder_only:
        return replace(workload, self_attention="ring"), ParallelSpec("ring", (1, workload.gpus))
    return workload, ParallelSpec("lv-xattn", (workload.gpus, 1))


def _strategy_plan(
    workload: Workload, cluster: Cluster, candidates: Sequence[Candidate], text: Candidate | None
) -> StrategyPlan:
    """Plan the fastest candidate that fits; if none fits, the fastest. In a decoder-only model, `text` is None."""
    if workload.self_attention == "auto":
        workload = replace(workload, self_attention=(text or candidates[0]).spec.strategy)
    text_spec = text.spec if text else None
    fits = (candidate for candidate in candidates if _fits(workload, cluster, candidate.spec, text_spec))
    fitting = next(fits, None)
    call = fitting or candidates[0]
    parts = step_parts(workload, cluster, call if text else None, text or call)
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
        strategies = TEXT_STRATEGIES if kind == "auto" else (kind,)
        if workload.gpus == 1 and kind != "local":  # one GPU has all of the text with any strategy
            strategies = ("ring",)
    problem, visual = workload.problem(part), workload.visual if part == "cross-attention" else None
    options: dict[str, Any] = {"visible": workload.visible(part), "visual": visual, "strategies": strategies}
    options["masked"] = part == "cross-attention" and workload.visible(part) < 1
    try:
        return select_strategy(problem, simulated_cluster(workload, cluster), training=workload.training, **options)
    except ConfigError as error:
        if part != "self-attention":
            raise
        raise ConfigError(
            f"self_attention: {kind} cannot shard {problem.heads} heads over {workload.gpus} GPUs; choose ring, or "
            "another number of GPUs"
        ) from error


def step_parts(workload: Workload, cluster: Cluster, cross: Candidate | None, text: Candidate) -> Mapping[str, Passes]:
    """Return the parts of a step (PARTS) with one candidate for cross-attention and one for self-attention.

    A decoder-only model has no cross-attention. An answer has one more part, "decoding". "launches" is the time in
    which the device waits for the host's launches.
    """
    model, chunked, checkpointing = workload.model, workload.chunked, workload.checkpointing
    parts = {"vision tower": _vision(workload, cluster)}
    parts["self-attention"] = _attention_call(workload, cluster, "self-attention", text) * model.text.layers
    if cross is not None:
        call = _attention_call(workload, cluster, "cross-attention", cross)
        parts["cross-attention"] = call * model.cross.layers

    def add(part: str, products: int, tokens: int, trained: bool, recomputed: int) -> None:
        """Add linear layers with these multiply-adds per token and number of recomputations in backward."""
        once = 2 * products * tokens / cluster.matmul
        backward = once * (1 + trained + recomputed) if workload.training else 0.0
        parts[part] = parts.get(part, Passes()) + Passes(Cost(once), Cost(backward))

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
            add(one.part, one.parameters, workload.tokens, trained, recomputed)
        if adapters := workload.adapter_parameters(one):
            part = "cross-attention" if one.target == "cross" else one.part
            add(part, adapters, workload.local_keys if one.visual else workload.tokens, True, checkpointing)
    head = model.text.vocabulary * model.text.hidden
    add("vocabulary", head, workload.scored_tokens, workload.language_trained, 0)
    if cluster.layer_forward_s or cluster.layer_backward_s:
        computed, layers = parts["self-attention"] + parts["MLP"], model.text.layers
        forward = max(0.0, layers * cluster.layer_forward_s - computed.forward.seconds)
        backward = max(0.0, layers * cluster.layer_backward_s - computed.backward.seconds)
        parts["launches"] = Passes(Cost(forward), Cost(backward if workload.training else 0.0))
    parts["parameters"] = _parameters(workload, cluster, sum(parts.values(), Passes()))
    return parts | ({"decoding": _decoded_token(workload, cluster) * workload.answer} if workload.answer else {})


def _vision(workload: Workload, cluster: Cluster) -> Passes:
    """Return the cost of tower, resampler and projector on a rank's frames; a frozen tower has no backward pass.

    In a decoder-only model, the embeddings are then sent to the ranks that have their tokens by one all-to-all, or with
    local text by one all-gather; in backward, the gradients are sent the other way.
    """
    model, vision, frames = workload.model, workload.model.vision, workload.local_frames
    full = vision.full_layers if vision.window else vision.layers

    def attended(tokens: int) -> int:
        return tokens * (full * tokens + (vision.layers - full) * min(vision.window, tokens))

    linear = 2 * workload.sum_over_frames(int) * vision.parameters / (cluster.tower or cluster.matmul)
    entries = workload.sum_over_frames(attended) * vision.width
    rates = cluster.tower or cluster.attention_forward, cluster.tower or cluster.attention_backward
    forward, backward = linear + 4 * entries / rates[0], 0.0
    if workload.trained == "all":
        backward = 2 * linear + 10 * entries / rates[1] + forward * workload.checkpointing
    products, r = workload.local_keys * model.parameters_of("connector"), model.resampler
    if r:  # K and V are projected from the patches, too
        products += frames * r.layers * 2 * vision.tokens * vision.width * r.heads * r.head_dim
    connector = 2 * products / cluster.matmul
    training = workload.training and workload.trains_features
    if training:
        backward += connector * (2 if workload.lora_r is None else 1)
    passes = Passes(Cost(forward + connector), Cost(backward))
    if not model.decoder_only or workload.gpus == 1:
        return passes
    gpus, size = workload.gpus, workload.local_keys * workload.embedding_width * workload.element
    local = workload.self_attention == "local"
    sent = all_gather(cluster, gpus, size) if local else all_to_all(cluster, gpus, gpus, size)
    return passes + Passes(sent, sent if training else Cost())


def _attention_call(workload: Workload, cluster: Cluster, part: str, candidate: Candidate) -> Passes:
    """Return the cost of one attention call.

    With checkpointing, backward repeats the forward pass with its transfers, or, if its results are kept, only the
    all-to-all of Q, and of given K and V, to head shards. With local text, every rank gathers the rows of O of the
    others for cross-attention; backward sums their gradients in float32.
    """
    problem, crossing = workload.problem(part), part == "cross-attention"
    again, degree = Cost(), candidate.spec.head_degree
    if workload.training and workload.checkpointing:
        if workload.recompute_attention:
            again = candidate.forward
        elif degree > 1:
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
        call += Passes(Cost(once), Cost(once * repeats if workload.training else 0.0))
    if crossing and workload.visual_offload:
        call = _with_copies(workload, call)
    if crossing and workload.self_attention == "local":
        elements = problem.batch * problem.rows * problem.heads * problem.dim
        rows, gradients = (
            all_gather(cluster, workload.gpus, elements * size) for size in (problem.element, problem.accumulated)
        )
        backward = gradients + rows * workload.checkpointing if workload.training else Cost()
        call += Passes(rows, backward)
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
    hidden = call.both.hidden / (2 if workload.training else 1)

    def exposing(cost: Cost, seconds: float) -> Cost:
        return replace(
            cost, seconds=max(cost.seconds + hidden, seconds), exposed=cost.exposed + cost.hidden, hidden=0.0
        )

    return Passes(exposing(call.forward, once), exposing(call.backward, once * copies) if workload.training else Cost())


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

    def waiting(under: float, *sizes: int) -> Cost:
        cost = sum((all_gather(cluster, workload.gpus, size / workload.gpus) for size in sizes), Cost())
        exposed = max(0.0, cost.seconds - under)
        return replace(cost, seconds=exposed, exposed=exposed, hidden=cost.seconds - exposed)

    backward = waiting(computed.backward.seconds, parameters, gradients) if workload.training else Cost()
    return Passes(waiting(computed.forward.seconds, parameters), backward)


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
