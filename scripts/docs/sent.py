"""Prints what each strategy sends in two cases, as the table of docs/README.md.

    python scripts/docs/sent.py

Formulas only, `schedules/bytes_sent.py`; tests hold them equal to the bytes that are counted. bf16,
what is summed over ranks in float32; millions of bytes that the rank which sends most sends, per layer.

video: the paper's Video-MME, 5,514 query rows, 1,739,394 keys, 28 heads, 4 key heads of 128 (mPLUG-Owl3-7B). K and V
are made again in the backward pass, as a patched model does, and Ulysses then deals them again.

text: 32,768 tokens that attend to themselves, 32 heads, 8 key heads of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, mesh_bytes, ring_bytes, ulysses_bytes, video_mme
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

RANKS = 8
WIDTH, LAYERS = 3584, 4
"""Of mPLUG-Owl3-7B: the features' width, and the cross-attention layers that share them."""
VIDEO = video_mme(RANKS)
TEXT = Problem(rows=4096, keys=(4096,) * RANKS, heads=32, kv_heads=8, dim=128)
CASES = {"video": VIDEO, "text": TEXT}


def most(problem: Problem, name: str, backward: bool, tile: tuple[int, int] = (1, 1)) -> int:
    """Bytes of the rank that sends most."""
    ranks = [replace(problem, rank=rank) for rank in range(problem.ranks)]
    if name == "lv-xattn":
        return max(sum(lv_xattn_bytes(p, backward=backward).values()) for p in ranks)
    if name == "ring":
        return max(sum(ring_bytes(p, backward=backward).values()) for p in ranks)
    if name == "mesh":
        return max(sum(mesh_bytes(p, tile, backward=backward).values()) for p in ranks)
    if name == "ulysses":
        again = problem is VIDEO and backward
        return max(
            sum(ulysses_bytes(p, tile, backward=backward).values()) + (keys_dealt(p, tile) if again else 0)
            for p in ranks
        )
    features = (problem.ranks - 1) * max(problem.keys) * WIDTH  # gathered, their gradients added up
    return features * (problem.accumulated if backward else problem.element) // LAYERS


def keys_dealt(problem: Problem, tile: tuple[int, int]) -> int:
    """Bytes of K and V that a rank sends when they are dealt by heads."""
    size = problem.ranks // (tile[0] * tile[1])
    group, place = divmod(problem.rank, size)
    inside = replace(problem, keys=problem.keys[group * size : (group + 1) * size], rank=place)
    sent = ulysses_bytes(inside, backward=False)
    return sent["k"] + sent["v"]


def ways(problem: Problem) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(name in the table, strategy, tile)."""
    yield '`"lv-xattn"`', "lv-xattn", (1, 1)
    for tile in mesh_shapes_of(problem.ranks)[1:-1]:
        yield f'`"mesh"`, tile {tile}', "mesh", tile
    yield '`"ring"`', "ring", (1, 1)
    for groups in range(1, problem.ranks):
        if problem.ranks % groups == 0 and problem.heads % (problem.ranks // groups) == 0:
            for tile in mesh_shapes_of(groups):
                yield '`"ulysses"`' + (f", tile {tile}" if groups > 1 else ""), "ulysses", tile
            return


def table(case: str) -> str:
    """Forward and backward, megabytes."""
    problem = CASES[case]
    found = list(ways(problem))
    if case == "video":
        found.append(('`"replicate"`, a layer\'s share', "replicate", (1, 1)))
    else:
        found = [way for way in found if way[1] != "lv-xattn"]  # text attends to itself by the others
    lines = ["| | forward, MB | backward, MB |", "|---|---:|---:|"]
    for name, strategy, tile in found:
        forward, backward = (most(problem, strategy, back, tile) / 1e6 for back in (False, True))
        lines.append(f"| {name} | {forward:,.1f} | {backward:,.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Prints both."""
    for case in CASES:
        print(f"{case}\n\n{table(case)}\n")


if __name__ == "__main__":
    main()
