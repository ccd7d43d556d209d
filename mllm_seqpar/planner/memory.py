"""What a rank holds at the peak of a step, in bytes, by kind. An upper estimate by formula, not a simulation.

parameters, gradients, optimizer: shares of FSDP2, over all ranks. features: the one copy of the visual features of a
rank's frames, and their gradient where it is needed. activations: what is kept for backward (`kept`), and the logits.
buffers: what comes and goes: a gathered layer; the keys and values of the cross-attention layer at work with their
gradients in float32, and the pieces of other ranks that its schedule holds at one time, or the inside of the MLP at
work. Where the vision tower, which runs before all that, needs more, that counts instead.
"""

from __future__ import annotations

from mllm_seqpar.schedules.bytes_sent import LSE_BYTES, Problem

from .activation_memory import FLOAT32, attention_layer, inner_row, kept, kept_before, keys_values, visual_tokens
from .candidates import ParallelSpec
from .workload import Workload

USABLE = 0.92
"""Share of a GPU's memory that a plan may fill: the rest is the driver's, the allocator's and NCCL's, and what
projecting a chunk of features again takes."""

KINDS = ("parameters", "gradients", "optimizer", "features", "activations", "buffers")


def memory(run: Workload, way: ParallelSpec) -> dict[str, int]:
    """Bytes of one rank at its peak, by kind (KINDS)."""
    model, n, behind = run.model, run.gpus, from_features(run, way)
    behind["activations"] += kept_before(run) if run.training else 0
    behind["buffers"] += _gathered(run)
    spare = tower_at_work(run) - behind["features"] - behind["activations"]
    return (
        {
            "parameters": model.parameters * run.parameter // n,
            "gradients": run.trained_parameters * run.parameter // n,
            "optimizer": run.trained_parameters * run.optimizer // n,
        }
        | behind
        | {"buffers": max(behind["buffers"], spare)}
    )


def from_features(run: Workload, way: ParallelSpec) -> dict[str, int]:
    """Features, activations and buffers of what comes behind the features: language model and cross-attention."""
    return {
        "features": _features(run, way),
        "activations": (kept(run, way) if run.training else _passing(run)) + _logits(run),
        "buffers": max(_cross_buffers(run, way), _mlp_buffers(run), _features_gathered(run, way)),
    }


def _features(run: Workload, way: ParallelSpec) -> int:
    once = run.local_frames * run.model.vision.keys * run.model.cross.visual_dim * run.element
    copies = run.gpus if way.strategy == "replicate" else 1
    return once * copies * (2 if run.training and run.visual.trained else 1)


def _passing(run: Workload) -> int:
    """Without backward: one layer's inside."""
    text = run.model.text
    stream = run.batch * run.rows * text.hidden * run.element
    mlp = run.mlp_rows * inner_row(run, text.mlp_inner, text.mlp_matrices)
    return 2 * stream + attention_layer(run, text.heads, text.kv_heads, text.head_dim) + mlp


def _logits(run: Workload) -> int:
    """Logits of a rank's own tokens, in their dtype and, with their gradient, in float32."""
    tokens = run.batch * run.rows
    return tokens * run.model.text.vocabulary * (run.element + (8 if run.training else 0))


def _gathered(run: Workload) -> int:
    """FSDP2: the layer at work and the next one, whole; in backward the gradient of one, before it is shared out."""
    if run.gpus == 1:
        return 0
    return run.model.largest_layer * run.element * (3 if run.training else 2)


def _cross_buffers(run: Workload, way: ParallelSpec) -> int:
    """The larger of forward and backward of one cross-attention call."""
    problem = run.cross_problem
    both = keys_values(run, way, problem.element)  # or, where they are kept already, their gradients in that dtype
    forward = both + _pieces(problem, way, backward=False)
    if not run.training:
        return forward
    gradients = both + keys_values(run, way, problem.accumulated)
    if not run.recompute:  # norms go backward over all frames at once, with three tensors in float32
        cross = run.model.cross
        normalised = cross.visual_dim if cross.features_norm else 0
        normalised += cross.kv_heads * cross.head_dim if cross.key_norm != "none" else 0
        gradients += 3 * FLOAT32 * visual_tokens(run, way) * normalised
    return max(forward, gradients + _pieces(problem, way, backward=True))


def _features_gathered(run: Workload, way: ParallelSpec) -> int:
    """Replication: the parts that the whole is made of; in backward gradients as parts, in float32, and in a row."""
    if way.strategy != "replicate" or run.gpus == 1:
        return 0
    backward = run.training and run.visual.trained
    width = run.element + (2 * FLOAT32 if backward else 0)
    return visual_tokens(run, way) * run.model.cross.visual_dim * width


def _mlp_buffers(run: Workload) -> int:
    """One MLP in backward: gradients of two inner activations; in chunks, all of one chunk, and sums in float32 of the
    weights' gradients."""
    if not run.training:
        return 0
    text, cross = run.model.text, run.model.cross
    most = 0
    for inner, matrices in ((text.mlp_inner, text.mlp_matrices), (cross.mlp_inner, cross.mlp_matrices)):
        work = run.mlp_rows * 2 * inner * run.element
        if run.chunked:
            work += run.mlp_rows * inner_row(run, inner, matrices) + matrices * text.hidden * inner * FLOAT32
        most = max(most, work)
    return most


def tower_at_work(run: Workload) -> int:
    """A tower without backward and the frames it encodes at once: outputs that are held, what attention made of the
    last, that normalised, inner activations before and after the function between them, and the mask of tiles."""
    if run.trained == "all":
        return 0
    vision = run.model.vision
    elements = (vision.outputs_held + 2) * vision.width + 2 * vision.mlp_inner
    elements += vision.tokens if vision.tiles > 1 else 0
    frames = min(run.local_frames, run.vision_chunk_size or run.local_frames)
    return frames * vision.tokens * elements * run.element


def _pieces(problem: Problem, way: ParallelSpec, *, backward: bool) -> int:
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
