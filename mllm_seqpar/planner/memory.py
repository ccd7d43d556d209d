"""What a rank holds at the peak of a step, in bytes, by kind. An upper estimate by formula, not a simulation.

parameters, gradients, optimizer: shares of FSDP2, over all ranks. features: the one copy of the visual features of a
rank's frames, and their gradient where it is needed. activations: what layers keep for backward, and the logits.
buffers: what comes and goes: a gathered layer, the keys and values of the cross-attention layer at work with their
gradients in float32, and the pieces of other ranks that its schedule holds at one time.
"""

from __future__ import annotations

from ..schedules.traffic import LSE_BYTES, Problem
from .run import Run
from .strategies import Way

USABLE = 0.92
"""Share of a GPU's memory that a plan may fill: the rest is the driver's, the allocator's and NCCL's."""

KINDS = ("parameters", "gradients", "optimizer", "features", "activations", "buffers")


def memory(run: Run, way: Way) -> dict[str, int]:
    """Bytes of one rank at its peak, by kind (KINDS)."""
    model, n = run.model, run.gpus
    kept = _kept(run, way) if run.training else _passing(run)
    return {
        "parameters": model.parameters * run.parameter // n,
        "gradients": run.trained_parameters * run.parameter // n,
        "optimizer": run.trained_parameters * run.optimizer // n,
        "features": _features(run, way),
        "activations": kept + _logits(run),
        "buffers": _gathered(run) + _cross_buffers(run, way),
    }


def _features(run: Run, way: Way) -> int:
    once = run.local_frames * run.model.vision.keys * run.model.cross.visual_dim * run.element
    copies = run.gpus if way.strategy == "replicate" else 1
    return once * copies * (2 if run.training and run.visual.trained else 1)


def _kept(run: Run, way: Way) -> int:
    """What decoder and cross-attention layers keep; a trained vision tower keeps each layer's input (checkpointed)."""
    text, cross, tokens = run.model.text, run.model.cross, run.batch * run.rows
    stream = tokens * text.hidden * run.element
    attention = _attention_layer(run, text.heads, text.kv_heads, text.head_dim)
    mlp = _mlp_layer(run, text.mlp_inner, text.mlp_matrices)
    of_cross = _attention_layer(run, cross.heads, 0, cross.head_dim)
    of_cross += _mlp_layer(run, cross.mlp_inner, cross.mlp_matrices) if cross.mlp_inner else 0
    if run.checkpointing:  # the inputs of all, and the inside of one
        decoder = text.layers * stream + attention + mlp
        crossing = cross.layers * stream + of_cross
    else:
        decoder = text.layers * (attention + mlp)
        crossing = cross.layers * of_cross
        if not run.recompute:
            crossing += cross.layers * _keys_values(run, way, run.element)
    tower = 0
    if run.trained == "all":
        vision = run.model.vision
        tower = run.local_frames * vision.tokens * vision.width * vision.layers * run.element
    return decoder + crossing + tower


def _attention_layer(run: Run, heads: int, kv_heads: int, dim: int) -> int:
    """The norm before it; q, k, v; o, and o as its projection takes it; the log-sum-exp."""
    elements = 3 * heads * dim + 2 * kv_heads * dim
    return _norm(run) + run.batch * run.rows * (run.element * elements + heads * LSE_BYTES)


def _mlp_layer(run: Run, inner: int, matrices: int) -> int:
    """The norm before it, and the inner activations: 4 of a gated MLP (gate, its activation, up, product), 2 else."""
    return _norm(run) + run.batch * run.rows * run.element * (4 if matrices == 3 else 2) * inner


def _norm(run: Run) -> int:
    """Its input in float32, that normalised, and its output."""
    return run.batch * run.rows * run.model.text.hidden * (4 + 2 * run.element)


def _passing(run: Run) -> int:
    """Without backward: one layer's inside."""
    text = run.model.text
    stream = run.batch * run.rows * text.hidden * run.element
    inside = _attention_layer(run, text.heads, text.kv_heads, text.head_dim)
    return 2 * stream + inside + _mlp_layer(run, text.mlp_inner, text.mlp_matrices)


def _logits(run: Run) -> int:
    """Logits of a rank's own tokens, in their dtype and, with their gradient, in float32."""
    tokens = run.batch * run.rows
    return tokens * run.model.text.vocabulary * (run.element + (8 if run.training else 0))


def _gathered(run: Run) -> int:
    """FSDP2: the layer at work and the next one, whole; in backward the gradient of one, before it is shared out."""
    if run.gpus == 1:
        return 0
    return run.model.largest_layer * run.element * (3 if run.training else 2)


def _keys_values(run: Run, way: Way, element: int) -> int:
    problem = run.cross_problem
    keys = max(problem.keys) * (run.gpus if way.strategy == "replicate" else 1)
    return 2 * problem.key_batch * keys * problem.kv_heads * problem.dim * element


def _cross_buffers(run: Run, way: Way) -> int:
    """The larger of forward and backward of one cross-attention call."""
    problem = run.cross_problem
    forward = _keys_values(run, way, problem.element) + _pieces(problem, way, backward=False)
    if not run.training:
        return forward
    gradients = _keys_values(run, way, problem.element) + _keys_values(run, way, problem.accumulated)
    return max(forward, gradients + _pieces(problem, way, backward=True))


def _pieces(problem: Problem, way: Way, *, backward: bool) -> int:
    """Pieces of other ranks that are held at one time, with results on their way: two of each kind in a ring, all of
    the group's others in a mesh; Ulysses holds its share of heads of everything once more."""
    rows = problem.batch * problem.rows * problem.heads
    columns = 2 * problem.key_batch * max(problem.keys) * problem.kv_heads * problem.dim
    row_in = rows * (3 * problem.dim * problem.element + LSE_BYTES if backward else problem.dim * problem.element)
    row_out = rows * (problem.dim * problem.accumulated + (0 if backward else LSE_BYTES))
    column_in = columns * problem.element
    column_out = columns * problem.accumulated if backward else 0
    a, b = way.tile
    if way.strategy == "replicate":
        return row_out
    held_rows = min(a - 1, 2) if b == 1 else a - 1
    held_columns = min(b - 1, 2) if a == 1 else b - 1
    dealt = row_in + row_out + column_in + column_out if way.heads_over > 1 else 0
    return dealt + held_rows * (row_in + row_out) + held_columns * (column_in + column_out) + row_out
