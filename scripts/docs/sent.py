"""Print the bytes that each strategy sends in two cases, as the tables of docs/guides/choose_strategy.md.

    python scripts/docs/sent.py

The figures follow from the formulas of `schedules/bytes_sent.py`, which tests hold equal to the bytes counted. They are
millions of bytes per layer of the rank that sends most, with inputs in bf16 and accumulate_dtype="auto".

video: the Video-MME case of the LV-XAttn paper, 5,514 queries, 1,739,394 keys, 28 heads, 4 KV heads of 128
(mPLUG-Owl3-7B). Backward recomputes K and V, as in a patched model; Ulysses then shards them again.

text: self-attention of 32,768 tokens, 32 heads, 8 KV heads of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mllm_seqpar.schedules.bytes_sent import Problem, mesh_bytes, ulysses_bytes, video_mme
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

RANKS = 8
WIDTH, LAYERS = 3584, 4
"""Of mPLUG-Owl3-7B: channels of the visual features, and the cross-attention layers that share them."""
VIDEO = replace(video_mme(RANKS), direct_element=2)
TEXT = Problem(rows=4096, keys=(4096,) * RANKS, heads=32, kv_heads=8, dim=128, direct_element=2)
CASES = {"video": VIDEO, "text": TEXT}


def bytes_of_busiest_rank(problem: Problem, strategy: str, backward: bool, mesh_shape: tuple[int, int]) -> int:
    if strategy == "replicate":  # features are gathered, or their gradients summed, once for all layers
        features = (problem.ranks - 1) * max(problem.keys) * WIDTH
        return features * (problem.accumulated if backward else problem.element) // LAYERS

    def sent(rank: int) -> int:
        formula = ulysses_bytes if strategy == "ulysses" else mesh_bytes
        size = sum(formula(replace(problem, rank=rank), mesh_shape, backward=backward).values())
        if strategy == "ulysses" and backward and problem is VIDEO:  # K and V are recomputed and sharded again
            degree = problem.ranks // (mesh_shape[0] * mesh_shape[1])
            group, member = divmod(rank, degree)
            keys = problem.keys[group * degree : (group + 1) * degree]
            forward = ulysses_bytes(replace(problem, keys=keys, rank=member), backward=False)
            size += forward["k"] + forward["v"]
        return size

    return max(sent(rank) for rank in range(problem.ranks))


def rows(case: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield (name in the table, strategy, mesh shape)."""
    heads = CASES[case].heads
    if case == "video":
        yield '`"lv-xattn"`', "lv-xattn", (RANKS, 1)
    for mesh_shape in mesh_shapes_of(RANKS)[1:-1]:
        yield f'`"mesh"`, tile {mesh_shape}', "mesh", mesh_shape
    yield '`"ring"`', "ring", (1, RANKS)
    groups = next(n for n in range(1, RANKS) if RANKS % n == 0 and heads % (RANKS // n) == 0)
    for mesh_shape in mesh_shapes_of(groups):
        yield '`"ulysses"`' + (f", tile {mesh_shape}" if groups > 1 else ""), "ulysses", mesh_shape
    if case == "video":
        yield '`"replicate"`, a layer\'s share', "replicate", (1, 1)


def table(case: str) -> str:
    """Return the table of a case: megabytes, forward and backward."""
    lines = ["| | forward, MB | backward, MB |", "|---|---:|---:|"]
    for name, strategy, mesh_shape in rows(case):
        forward, backward = (
            bytes_of_busiest_rank(CASES[case], strategy, back, mesh_shape) / 1e6 for back in (False, True)
        )
        lines.append(f"| {name} | {forward:,.1f} | {backward:,.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for case in CASES:
        print(f"{case}\n\n{table(case)}\n")
