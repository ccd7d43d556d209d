"""What a rank keeps for backward, in bytes: its layers, what makes the features, and K and V where they are kept.

Counted as autograd saves it, each tensor once: `tests/planner/test_memory_measured.py` holds the formulas against real,
patched models. Dropout and position embeddings are left out. Norms are counted as RMS norms that compute in float32,
which keep most; layer norms, as in OpenFlamingo, keep less.
"""

from __future__ import annotations

from mllm_seqpar.schedules.bytes_sent import LSE_BYTES

from .candidates import ParallelSpec
from .model import ResamplerSizes, VisionSizes
from .workload import Workload

FLOAT32 = 4


def kept(run: Workload, way: ParallelSpec) -> int:
    """By what comes behind the features, but for the logits."""
    text, cross = run.model.text, run.model.cross
    stream = run.batch * run.rows * text.hidden * run.element
    decoder = attention_layer(run, text.heads, text.kv_heads, text.head_dim)
    decoder += mlp_layer(run, text.mlp_inner, text.mlp_matrices)
    crossing = attention_layer(run, cross.heads, 0, cross.head_dim) + (_own_block(run) if cross.own_queries else 0)
    crossing += _shares(run) if cross.gate == "per_head" else 0
    crossing += mlp_layer(run, cross.mlp_inner, cross.mlp_matrices) if cross.mlp_inner else 0
    visual = 0 if run.recompute else _projected(run, way)
    if run.checkpointing:  # the inputs of all, and the inside of one
        return (text.layers + cross.layers) * stream + decoder + crossing + visual
    return text.layers * decoder + cross.layers * (crossing + visual)


def kept_before(run: Workload) -> int:
    """By what makes the features."""
    return _connector(run) + _tower(run)


def attention_layer(run: Workload, heads: int, kv_heads: int, dim: int) -> int:
    """The norm before it; q, k, v; o, and o as its projection takes it; the log-sum-exp."""
    elements = 3 * heads * dim + 2 * kv_heads * dim
    return _norm(run) + run.batch * run.rows * (run.element * elements + heads * LSE_BYTES)


def mlp_layer(run: Workload, inner: int, matrices: int) -> int:
    """The norm before it, whose output is the MLP's input, and inner activations, unless chunks compute them anew."""
    return _norm(run) + (0 if run.chunked else run.batch * run.rows * inner_row(run, inner, matrices))


def inner_row(run: Workload, inner: int, matrices: int) -> int:
    """Inner activations of one token: 4 of a gated MLP (gate, its activation, up, product), 2 of a plain one."""
    return run.element * (4 if matrices == 3 else 2) * inner


def _norm(run: Workload) -> int:
    """Its input in float32, that normalised, and its output; its input as it came, too, where that is "mixed"."""
    text = run.model.text
    elements = 3 if text.norm == "mixed" and run.element < FLOAT32 else 2
    return run.batch * run.rows * text.hidden * (FLOAT32 + elements * run.element)


def _own_block(run: Workload) -> int:
    """Cross-attention that is a block of its own: the two results that its gates scale, and the norm of Q."""
    return run.batch * run.rows * (2 * run.model.text.hidden * run.element + _head_norm(run, run.model.cross.heads))


def _shares(run: Workload) -> int:
    """A gate that depends on the text: the share of the visual part and that of the text."""
    return run.batch * run.rows * 2 * run.model.cross.heads * run.model.cross.head_dim * run.element


def _head_norm(run: Workload, heads: int) -> int:
    """Of a token of Q or K: its float32 copy, what it normalised, a factor of each head; as it came, where "mixed"."""
    cross, element = run.model.cross, run.element
    if cross.key_norm == "none":
        return 0
    copies = 2 * element if cross.key_norm == "mixed" and element < FLOAT32 else element
    return heads * (cross.head_dim * (FLOAT32 + copies) + FLOAT32)


def visual_tokens(run: Workload, way: ParallelSpec) -> int:
    """Keys that a rank projects, of all batch items."""
    return run.local_frames * run.model.vision.keys * (run.gpus if way.strategy == "replicate" else 1)


def keys_values(run: Workload, way: ParallelSpec, element: int) -> int:
    """K and V of one layer."""
    cross = run.model.cross
    return 2 * visual_tokens(run, way) * cross.kv_heads * cross.head_dim * element


def _projected(run: Workload, way: ParallelSpec) -> int:
    """K and V of one layer, and what the norms on their way keep.

    A norm of the features keeps them in float32, which is a copy if they came in another dtype, a factor of each token,
    what it normalised if its weight is trained, and its result.
    """
    cross, element = run.model.cross, run.element
    token = _head_norm(run, cross.kv_heads)
    if cross.features_norm:
        copies = (FLOAT32 if element < FLOAT32 else 0) + (element if run.language_trained else 0)
        token += cross.visual_dim * (copies + element) + FLOAT32
    return keys_values(run, way, element) + visual_tokens(run, way) * token


def _connector(run: Workload) -> int:
    """What is between the tower and the features; it is trained wherever anything is."""
    model, frame = run.model, 0
    if model.projector:  # the input of its layers, and of the activation function between them
        frame += model.vision.keys * (model.projector[0] + 2 * sum(model.projector[1:-1])) * run.element
    if model.resampler:  # its input, the inside of each layer, and the input of the norm at the end
        frame += model.vision.width * (model.vision.tokens + model.vision.keys) * run.element
        frame += model.resampler.layers * _resampler_layer(model.resampler, model.vision, run.element)
    return run.local_frames * frame


def _resampler_layer(resampler: ResamplerSizes, vision: VisionSizes, element: int) -> int:
    """One frame: latents and patches are normalised, put together, and attended to by latents; an MLP.

    IDEFICS puts them together twice, for K and for V, and normalises Q and K; its MLP has a ReLU, which keeps one inner
    activation, where Flamingo's GELU keeps two. A layer norm keeps a mean and a factor of what it normalises.
    """
    latents, both, attended = vision.keys, vision.keys + vision.tokens, resampler.heads * resampler.head_dim
    idefics = resampler.code == "idefics"
    elements = both * ((2 if idefics else 1) * vision.width + (3 if idefics else 2) * attended)  # patches; k, v
    elements += latents * (4 * vision.width + (3 if idefics else 2) * attended)  # two norms; q, o
    elements += 2 * resampler.heads * latents * both  # probabilities, and those as the product with V takes them
    elements += latents * (1 if idefics else 2) * resampler.mlp_inner
    normalised = vision.tokens + 2 * latents + (resampler.heads * (both + latents) if idefics else 0)
    return element * elements + 2 * FLOAT32 * normalised


def _tower(run: Workload) -> int:
    """A trained tower: each layer's input and inside (norms, q, k, v, o, inner activations), or the inside of one."""
    if run.trained != "all":
        return 0
    vision = run.model.vision
    inside = 8 * vision.width + 2 * vision.mlp_inner
    elements = vision.layers * vision.width + inside if run.checkpointing else vision.layers * inside
    return run.local_frames * vision.tokens * elements * run.element
