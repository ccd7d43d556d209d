"""The peak memory of one rank in a step, in bytes by kind. An upper estimate by formula, not a simulation.

Activations are counted as autograd saves them, each tensor once: `tests/unit/planner/test_memory_measured.py` compares
the formulas with real, patched models. Dropout and position embeddings are left out. Norms are counted as RMS norms
that compute in float32, which save the most; layer norms, as in OpenFlamingo, save less.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import product, zip_longest

from mllm_seqpar.schedules import Axis, MeshShape, TransferKind
from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem, problem_between_groups, sent_tensors, transfer_bytes
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec, parallel_spec

from .model_sizes import LayerSizes
from .workload import FLOAT32, Workload

USABLE = 0.92
"""Fraction of a GPU's memory that a plan may fill. The rest is for the driver, the allocator, and the projection of
recomputed chunks of features, and the gradients of a part of the keys beside their sums."""

COMMUNICATORS = 2
"""NCCL communicators of a rank: one of FSDP2, and one of the exchanges."""

COMMUNICATOR_BYTES = 2**30
"""Assumed device memory of one NCCL communicator. One of two ranks that shared an H200 over sockets took 498 MiB.

NCCL allocates a buffer of NCCL_BUFFSIZE, 4 MiB by default, per channel and connection: 256 MiB for 32 channels and the
two connections of a ring, without the buffers of its other protocols. Users report up to about 1.6 GB (NVIDIA/nccl
issue 864). Fewer channels (NCCL_MAX_NCHANNELS) or smaller buffers take less.
"""

CHUNK_BYTES = 64 << 20
"""As `runtime.visual_features.CHUNK_BYTES`, the size of a chunk of features in host memory."""

KINDS = ("parameters", "gradients", "optimizer", "features", "activations", "transfers", "buffers")
"""parameters, gradients, optimizer: the shards of FSDP2. features: the visual features of the rank's frames, and their
gradient where it is needed; in a decoder-only model, the embeddings of the visual tokens of its rows. activations:
what autograd saves for backward, and the logits. transfers: receive buffers, which stay allocated over calls, and
NCCL's memory. buffers: temporary memory. An answer also has "cache", the K and V of the rank's tokens."""


def peak_memory(workload: Workload, spec: ParallelSpec, text_spec: ParallelSpec | None = None) -> dict[str, int]:
    """Return the bytes of one rank at its peak, by kind (KINDS).

    `spec` is the spec of cross-attention, or of self-attention in a decoder-only model. `text_spec` is that of
    self-attention beside cross-attention; None for what runs without a `tile` (for "auto", a ring).
    """
    model, text, element, lora = workload.model, workload.model.text, workload.element, workload.lora_r
    n = workload.gpus if workload.weights_sharded else 1
    trained = workload.trained_parameters
    kinds = memory_after_tower(workload, spec, text_spec)
    activations = kinds["activations"] + saved_before_features(workload)
    if workload.trained == "all":  # the first layer of a trained tower saves the pixels
        activations += pixels_on_device(workload)
    stored = model.parameters * workload.parameter
    if lora is not None:
        stored = workload.frozen_bytes + trained * workload.parameter
        # The r channels between the two layers of each adapter on text.
        adapted = [one for one in model.linear if one.target in workload.lora_target and not one.visual]
        count = sum(len(one.channels) * (1 if workload.checkpointing else one.layers) for one in adapted)
        activations += count * lora * workload.tokens * element
    # The buffers of the moment that needs the most. First, a layer, with what FSDP2 has gathered, whose units are the
    # layers: the parameters of one, and those of the next, which arrive in a buffer that stays until they are copied
    # out of it. Embeddings and head belong to the outermost unit, which stays gathered.
    buffers = kinds["buffers"]
    if n > 1:
        layer = model.parameters_of("attention", "mlp") // text.layers
        layer = max(layer, model.parameters_of("cross") // max(1, model.cross.layers))
        buffers += (3 * layer + text.embeddings) * element
        if workload.language_trained:
            # The gradients of a layer in the form in which they are reduced; backward begins with that of the head.
            buffers += (layer + text.vocabulary * text.hidden) * element
    # Before it, the vision tower with the pixels of a chunk of frames.
    tower = frozen_tower_memory(workload) + pixels_on_device(workload, workload.vision_chunk_size)
    buffers = max(buffers, tower - kinds["features"] - activations)
    if n > 1 and workload.language_trained:  # at the end: the outermost unit, its gradients and their copy
        buffers = max(buffers, 3 * text.embeddings * element - activations)
    communicators = COMMUNICATORS * COMMUNICATOR_BYTES if workload.gpus > 1 else 0
    return {
        "parameters": stored // n,
        "gradients": trained * workload.parameter // n,
        "optimizer": trained * workload.optimizer // n,
        "features": kinds["features"],
        "activations": activations,
        "transfers": kinds["transfers"] + communicators,
        "buffers": buffers,
        **({"cache": workload.cache_bytes} if workload.answer else {}),
    }


def pixels_on_device(workload: Workload, at_once: int | None = None) -> int:
    """Return the bytes of the pixels of a rank's frames, or of a number of them at once, which move from host memory
    (`HostFrames`) as float32."""
    vision = workload.model.vision
    token = 3 * vision.temporal_patch * vision.patch**2 * FLOAT32
    return workload.sum_over_frames(lambda tokens: tokens * token, at_once)


def memory_after_tower(workload: Workload, spec: ParallelSpec, text_spec: ParallelSpec | None = None) -> dict[str, int]:
    """Return features, activations, receive buffers and other buffers of the language model and cross-attention."""
    model, text, element, training = workload.model, workload.model.text, workload.element, workload.training
    if model.decoder_only:  # those of deepstack are released after the layers, before the logits
        placed = workload.batch * -(-workload.visual_tokens // workload.text_ranks)
        features = placed * (text.hidden if training else workload.embedding_width)
    else:
        features = _visual_tokens(workload, spec) * model.cross.visual_dim
    copies = 1
    if workload.visual_offload:  # two chunks of features; two of their gradient, and one more to add
        copies = 5 if workload.trains_features else 2
    elif workload.trains_features and not model.decoder_only:  # there, the gradient is computed after those of layers
        copies = 2
    buffers = _attention_buffers(workload, spec)
    for sizes in (text, model.cross) if training else ():
        # An MLP in backward: gradients of two inner activations; in chunks, also the inner activations of one chunk
        # and the float32 sums of the weight gradients.
        inner, matrices = sizes.mlp_inner, sizes.mlp_matrices
        size = workload.mlp_tokens * 2 * inner * element
        if workload.chunked:
            size += workload.mlp_tokens * _mlp_token(element, inner, matrices)
            size += matrices * text.hidden * inner * FLOAT32
        buffers = max(buffers, size)
    if spec.strategy == "replicate" and workload.gpus > 1:
        # The shards before concatenation; in backward, the gradient's shards, float32 sums and whole.
        buffers = max(buffers, features * (element + (2 * FLOAT32 if workload.trains_features else 0)))
    if training:
        activations = saved_for_backward(workload, spec)
    else:  # one layer at a time
        activations = 2 * workload.tokens * text.hidden * element + _layer(workload, text)
    logits = workload.scored_tokens * text.vocabulary * (element + (2 * FLOAT32 if training else 0))
    calls = [(workload.problem(workload.compared), spec)]
    if workload.self_attention != "local" and not model.decoder_only:
        problem, strategy = workload.problem("self-attention"), workload.self_attention
        calls.append((problem, text_spec or parallel_spec("ring" if strategy == "auto" else strategy, None, problem)))
    return {
        "features": features * element * copies,
        "activations": activations + logits,
        "transfers": receive_buffer_bytes(calls, training=training),
        "buffers": buffers,
    }


def saved_for_backward(workload: Workload, spec: ParallelSpec) -> int:
    """Return the bytes that the language model and cross-attention save, without the logits."""
    text, cross, element, tokens = workload.model.text, workload.model.cross, workload.element, workload.tokens
    decoder, crossing = _layer(workload, text), _layer(workload, cross)
    if text.head_norm:
        decoder += tokens * _head_norm("float32", text.heads + text.kv_heads, text.head_dim, element)
    if cross.own_queries:  # the two results that the gates scale, and the norm of Q
        crossing += tokens * 2 * text.hidden * element
        crossing += tokens * _head_norm(cross.key_norm, cross.heads, cross.head_dim, element)
    if cross.gate == "per_head":  # the visual and the text part that it weights
        crossing += tokens * 2 * cross.heads * cross.head_dim * element
    if not workload.recompute:  # K and V, and what the norms before them save
        token = 2 * cross.kv_heads * cross.head_dim * element
        token += _head_norm(cross.key_norm, cross.kv_heads, cross.head_dim, element)
        if cross.features_norm:  # a float32 copy of another dtype, the normalized features for its weight, its result
            copies = FLOAT32 if element < FLOAT32 and workload.trains_features else 0
            copies += element if workload.language_trained else 0
            token += cross.visual_dim * (copies + element) + FLOAT32
        crossing += _visual_tokens(workload, spec) * token
    layers, crossings = text.layers, cross.layers
    if not workload.checkpointing:
        return layers * decoder + crossings * crossing
    # The input of every layer, and the inside of one of each kind.
    saved = (layers + crossings) * tokens * text.hidden * element + decoder + min(crossings, 1) * crossing
    if workload.recompute_attention:
        return saved
    # The results that recomputation keeps: o, with head sharding by heads and by rows, and the log-sum-exp of each
    # call. Text and frames share a call unless the layer has two outputs.
    local = workload.self_attention == "local"  # torch's own attention
    calls: list[tuple[str, LayerSizes, bool]] = []
    if not local:
        calls.append(("self-attention", text, workload.self_attention == "ulysses"))
    if local or cross.own_queries or cross.gate == "per_head":
        calls.append(("cross-attention", cross, spec.head_degree > 1))
    for part, sizes, sharded in calls:
        problem, row = workload.problem(part), sizes.head_dim * element * (2 if sharded else 1) + LSE_BYTES
        saved += sizes.layers * problem.batch * problem.rows * sizes.heads * row
    return saved


def saved_before_features(workload: Workload) -> int:
    """Return the bytes that the projector, the resampler and a trained vision tower save."""
    model, vision, element, saved = workload.model, workload.model.vision, workload.element, 0
    if not workload.trains_features:
        return 0
    if model.projector:  # the input of its layers, and of the activation function between them; the normalized input
        inputs = model.projector[0] * (1 + model.keys_vary) + 2 * sum(model.projector[1:-1])
        saved += workload.local_keys * inputs * (1 + vision.deepstack) * element
    if resampler := model.resampler:
        # Latents and patches are normalized and concatenated, latents attend to both, and an MLP follows. IDEFICS
        # concatenates for K and for V, and normalizes Q and K. Its ReLU saves one inner activation, Flamingo's GELU
        # two. A layer norm saves a mean and a factor per normalized row.
        latents, both, attended = vision.keys, vision.keys + vision.tokens, resampler.heads * resampler.head_dim
        idefics = resampler.code == "idefics"  # a bool counts as 0 or 1
        elements = both * ((1 + idefics) * vision.width + (2 + idefics) * attended)  # concatenation; k, v
        elements += latents * (4 * vision.width + (2 + idefics) * attended)  # two norms; q, o
        elements += 2 * resampler.heads * latents * both  # probabilities, and their copy for the product with V
        elements += latents * (2 - idefics) * resampler.mlp_inner
        normalized = vision.tokens + 2 * latents + idefics * resampler.heads * (both + latents)
        layer = element * elements + 2 * FLOAT32 * normalized
        # and the input of the first layer and of the last norm
        saved += workload.local_frames * (vision.width * both * element + resampler.layers * layer)
    if workload.trained == "all":
        # A layer saves q, k, v, o, inner activations, and two norms with their results. Rotated q and k are saved
        # beside the projection that v is a part of, and o once more as the next layer takes it.
        width = vision.width * element
        norm = _normalized(vision.norm, vision.width, element) if vision.norm == "float32" else width
        inside = (7 if vision.rotary else 4) * width + 2 * (norm + width)
        inside += _mlp_token(element, vision.mlp_inner, vision.mlp_matrices)
        token = vision.layers * width + inside if workload.checkpointing else vision.layers * inside
        saved += workload.sum_over_frames(lambda tokens: tokens * token)
    return saved


def _layer(workload: Workload, sizes: LayerSizes) -> int:
    """Return the bytes of one layer, without K and V of frames: what it saves, or in inference what is alive.

    These are the norm before attention, q, k, v, o twice (once as its projection takes it), the log-sum-exp, the norm
    before the MLP, and its inner activations. An MLP in chunks recomputes them.
    """
    text, tokens, element = workload.model.text, workload.tokens, workload.element
    norm = _normalized(text.norm, text.hidden, element) + text.hidden * element  # with its output
    kv_heads = sizes.kv_heads if sizes is text else 0
    token = norm + element * (3 * sizes.heads + 2 * kv_heads) * sizes.head_dim + sizes.heads * LSE_BYTES
    inner = _mlp_token(element, sizes.mlp_inner, sizes.mlp_matrices)
    if not workload.training:
        return tokens * token + workload.mlp_tokens * inner
    if sizes.mlp_inner:
        token += norm + (0 if workload.chunked else inner)
    return tokens * token


def _mlp_token(element: int, inner: int, matrices: int) -> int:
    """Return the inner activations per token in bytes: 4 in a gated MLP (gate, activation, up, product), else 2."""
    return element * (4 if matrices == 3 else 2) * inner


def _head_norm(kind: str, heads: int, dim: int, element: int) -> int:
    """Return the saved bytes per token of a norm over heads, including a factor per head."""
    return 0 if kind == "none" else heads * (_normalized(kind, dim, element) + FLOAT32)


def _normalized(kind: str, width: int, element: int) -> int:
    """Return the bytes that a norm saves for `width` values: in float32, normalized, and if it is "mixed" as given."""
    return width * (FLOAT32 + element * (2 if kind == "mixed" and element < FLOAT32 else 1))


def _visual_tokens(workload: Workload, spec: ParallelSpec) -> int:
    """Return the visual tokens that cross-attention of a rank has on the device at one time."""
    if workload.visual_offload:  # one chunk of frames is computed with at a time
        keys = workload.model.vision.keys
        frame = keys * workload.model.cross.visual_dim * workload.element
        return min(workload.local_keys, max(1, CHUNK_BYTES // frame) * keys)
    return workload.local_keys * (workload.gpus if spec.strategy == "replicate" else 1)


def frozen_tower_memory(workload: Workload) -> int:
    """Return the bytes of a vision tower without backward at work on one chunk of frames.

    These are the layer outputs that are held, the last attention output and its norm, the inner activations before and
    after the activation function, and the mask of image tiles. Where Q and K are rotated in float32, that needs more:
    the norm and Q, K and V, then Q and K in float32, and three terms of the rotation of K beside the rotated Q.
    """
    if workload.trained == "all":
        return 0
    vision, element = workload.model.vision, workload.element
    elements = (vision.outputs_held + 2) * vision.width + vision.mlp_matrices * vision.mlp_inner
    elements += vision.tokens if vision.tiles > 1 else 0
    token = elements * element
    if vision.rotary:
        factors = 2 * vision.width // vision.heads
        rotated = (4 if element == FLOAT32 else 6) * vision.width + factors
        token = max(token + factors * FLOAT32, (vision.outputs_held + 4) * vision.width * element + rotated * FLOAT32)
        token += vision.deepstack * workload.model.text.hidden * vision.keys // vision.tokens * element
    return workload.sum_over_frames(lambda tokens: tokens * token, workload.vision_chunk_size)


def _attention_buffers(workload: Workload, spec: ParallelSpec) -> int:
    """Return the buffer bytes of one call of the compared attention, the larger of forward and backward.

    K and V of text are activations; K and V of frames are projected in each pass, unless backward has kept them.
    Backward holds the gradients of K and V as they are added up, and those of the features twice: the sum of the layers
    after this one, which counts as features, and its own.
    """
    problem, cross, training = workload.problem(workload.compared), workload.model.cross, workload.training
    forward = _partial_results(problem, spec, backward=False)
    if workload.model.decoder_only:
        grads = 2 * problem.batch * problem.rows * problem.kv_heads * problem.dim * problem.accumulated
        return max(forward, grads + _partial_results(problem, spec, backward=True)) if training else forward
    visual = _visual_tokens(workload, spec)
    elements = 2 * visual * cross.kv_heads * cross.head_dim
    kv, grads = elements * problem.element, elements * problem.accumulated
    if workload.visual_offload:  # the rows of all ranks and their results, as they are sent and as they are computed
        shape, kinds = (problem.ranks, 1), ("input", "result")
        rows = sum(transfer_bytes(problem, shape, kind, "q", backward=training) for kind in kinds)
        return kv + (2 * workload.gpus - 1) * rows + (grads if training else 0)
    if not training:
        return kv + forward
    backward = kv + grads + _partial_results(problem, spec, backward=True)
    normalized = cross.kv_heads * cross.head_dim if cross.key_norm != "none" else 0
    if workload.recompute:  # K before its norm; then, without K and V, this layer's gradient of the features
        before_norm = problem.element * visual * normalized
        backward += before_norm
        if workload.trains_features and cross.layers > 1:
            backward = max(backward, grads + before_norm + visual * cross.visual_dim * workload.element)
    else:  # norms run backward over all frames at once, with three tensors in float32
        if cross.features_norm and workload.trains_features:
            normalized += cross.visual_dim
        elif cross.features_norm and workload.language_trained:  # the gradient of the result, for its weight alone
            backward += workload.element * visual * cross.visual_dim
        backward += 3 * FLOAT32 * visual * normalized
    return max(kv + forward, backward)


def _partial_results(problem: Problem, spec: ParallelSpec, *, backward: bool) -> int:
    """Return the bytes of a rank's results, and of the partial results for other ranks that it holds at one time.

    A ring holds two of each kind, a mesh one for every other rank of its groups. Ulysses holds all its heads once more.
    """
    held = replace(problem, direct_element=None)  # results are rounded, if at all, when they are sent
    shards = product(("q", "kv"), ("input", "result"))
    q, o, kv, dkv = (transfer_bytes(held, spec.mesh_shape, kind, axis, backward=backward) for axis, kind in shards)
    dkv = dkv if backward else 0
    if spec.strategy == "replicate":
        return o
    held_q, held_kv = shards_at_one_time(spec.mesh_shape)
    head_shards = q + o + kv + dkv if spec.head_degree > 1 else 0
    return head_shards + held_q * o + held_kv * dkv + o


def receive_buffer_bytes(calls: Iterable[tuple[Problem, ParallelSpec]], *, training: bool) -> int:
    """Return the bytes of the receive buffers that stay allocated over these calls; in training, of both passes.

    Tensors reuse one buffer (`comm.receive_buffers`) if they belong to the same axis, are both inputs or both results,
    and have the same dtype and number of dimensions. There are as many buffers of each such kind as any call uses at
    one time, and each is as long as the calls need.
    """
    merged: defaultdict[Hashable, list[int]] = defaultdict(list)  # by kind, longest first
    for (problem, spec), backward in product(calls, (False, True) if training else (False,)):
        if spec.strategy == "replicate" or spec.mesh_shape == (1, 1):
            continue
        inner = problem_between_groups(problem, spec.head_degree)
        # A received result is added to the rank's own before the next one of its axis is received.
        (a, b), (held_q, held_kv) = spec.mesh_shape, shards_at_one_time(spec.mesh_shape)
        counts: dict[tuple[TransferKind, Axis], int] = {("input", "q"): held_q, ("input", "kv"): held_kv}
        counts |= {("result", "q"): int(a > 1), ("result", "kv"): int(b > 1 and backward)}
        used: defaultdict[Hashable, list[int]] = defaultdict(list)
        for (kind, axis), count in counts.items():
            sent = sent_tensors(inner, spec.mesh_shape, kind, axis, backward=backward, direct=spec.all_pairs)
            for label, (elements, element) in sent.items():
                used[kind, axis, label in ("lse", "delta"), element] += [elements * element] * count
        for key, sizes in used.items():
            merged[key] = [max(pair) for pair in zip_longest(merged[key], sizes, fillvalue=0)]
    return sum(map(sum, merged.values()))


def shards_at_one_time(mesh_shape: MeshShape) -> tuple[int, int]:
    """Return the number of Q shards and of KV shards of other ranks that a rank holds at one time.

    A ring holds the shard that it computes with and the next one, a mesh at most all of its groups.
    """
    a, b = mesh_shape
    return (min(a - 1, 2) if b == 1 else a - 1), (min(b - 1, 2) if a == 1 else b - 1)
