"""Layer: one process. Distributed attention on loopback ranks against dense float64: outputs and every gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import Case, check, run_case, same_bits
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of
from selections import slow_unless

MASKS = (None, "random", "growing", "one frame", "first frame", "last frame", "nothing", "some rows", "holes")
KEYS: list[dict[str, Any]] = [
    {"batch": 1, "groups": 2},
    {"batch": 2, "groups": 4, "table": True},
    {"batch": 2, "groups": 1, "shared_keys": True},
]
"""One sample, two samples, and two samples that share their frames."""
LAYOUTS = ("zigzag", "striped", "contiguous")


def slow(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("op", "mask", "sizes"),
    slow_unless(
        lambda row: row[2] == (2, 3, 5) and (row[0] == "lv" or row[1] in (None, "random", "holes")),
        itertools.product(("lv", "ring"), MASKS, ((2, 3, 5), (1, 8, 4))),
    ),
)
def test_cross_attention(op: str, mask: str | None, sizes: tuple[int, ...]) -> None:
    for n, keys in zip(sizes, KEYS, strict=True):
        check(n, op=op, rows=6 * n, mask=mask, layout="contiguous", **keys)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_pairs_without_a_mask(n: int) -> None:
    for keys in KEYS:
        check(n, op="direct", rows=6 * n, layout="contiguous", **keys)
        check(n, op="direct", rows=6 * n, dtype=torch.bfloat16, **keys)


@pytest.mark.rounding
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_merge_adds_no_key_to_short_rows(op: str, n: int) -> None:
    """A merge that starts at a log-sum-exp of 0 adds one key to every row, which shows with 1, 2 or 3 keys."""
    for keys, tokens in itertools.product((1, 2, 3), (1, 2)):
        check(n, op=op, rows=2 * n, frames=keys, tokens=tokens, layout="striped", batch=2)
        check(n, op=op, rows=2 * n, frames=keys, tokens=tokens, mask="random")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", ["plain", "window", "packed", "padded", "padded left"])
def test_causal_text(text: str, layout: str) -> None:
    for n, rows, batch in ((1, 17, 2), (2, 24, 1), (5, 17, 2)) if layout == "zigzag" else ((3, 17, 2), (4, 32, 2)):
        check(n, op="causal", rows=rows, batch=batch, layout=layout, text=text)
    for n in (1, 3) if text == "plain" else ():
        check(n, op="causal", rows=8 * n, batch=3, layout=layout, shared_keys=True)


@pytest.mark.parametrize("mask", MASKS)
def test_one_softmax_over_text_and_frames(mask: str | None) -> None:
    for n, layout, text, shared in (
        (2, "zigzag", "padded left", True),
        (3, "striped", "window", True),
        (4, "zigzag", "plain", False),
    ):
        check(n, op="joint", rows=19, batch=2, mask=mask, layout=layout, text=text, shared_keys=shared)


@pytest.mark.parametrize(("frames", "n"), [(13, 1), (5, 2), (13, 3), (5, 4), (1, 4)])
def test_frames_in_two_ranges_of_a_rank(frames: int, n: int) -> None:
    for (mask, table), shared in itertools.product(
        (("growing", False), ("random", True), ("holes", False)), (True, False)
    ):
        options: dict[str, Any] = {"mask": mask, "table": table, "shared_keys": shared, "frames": frames}
        check(n, op="joint", rows=19, batch=2, frame_layout="zigzag", **options)
    for frames_by, tile in (("ring", None), ("ulysses", None), *(("mesh", tile) for tile in mesh_shapes_of(n))):
        options = {
            "mask": "growing",
            "shared_keys": True,
            "frames": frames,
            "frame_layout": "zigzag",
            "tile": tile,
            "heads": 12,
        }
        check(n, op="joint", frames_by=frames_by, rows=19, batch=2, **options)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_text_shorter_than_the_group(n: int) -> None:
    for layout, rows, (op, mask) in itertools.product(LAYOUTS, (1, 2), (("causal", None), ("joint", "growing"))):
        check(n, op=op, rows=rows, layout=layout, frames=1, tokens=1, mask=mask)


SHAPES: list[dict[str, Any]] = [
    {},
    {"mask": "random", "batch": 2, "groups": 4},
    {"mask": "holes", "batch": 2, "shared_keys": True, "groups": 1, "frames": 2},  # ranks without frames
]


def mesh_shapes(*sizes: int) -> list[tuple[int, tuple[int, int] | None]]:
    return [(n, shape) for n in sizes for shape in [None, *mesh_shapes_of(n)]]


@pytest.mark.parametrize(
    "n,tile", [*mesh_shapes(4), *slow(*mesh_shapes(3), (6, (2, 3)), (6, (3, 2)), (8, (2, 4)), (8, (4, 2)))]
)
def test_every_mesh_shape(n: int, tile: tuple[int, int] | None) -> None:
    mesh: dict[str, Any] = {"by": "mesh", "tile": tile}
    for shape in SHAPES:
        check(n, op="mesh", tile=tile, rows=6 * n, layout="contiguous", **shape)
    for layout, text in (("striped", "plain"), ("zigzag", "padded left"), ("contiguous", "window")):
        check(n, op="causal", rows=48 if text == "plain" else 17, layout=layout, text=text, **mesh)
    check(n, op="joint", frames_by="mesh", rows=19, batch=2, mask="growing", shared_keys=True, **mesh)


@pytest.mark.parametrize("n,groups", [(2, 1), (3, 8), (3, 4), *slow((4, 8), (4, 24), (6, 4), (8, 1))])
def test_head_sharding(groups: int, n: int) -> None:
    """24 query heads and every hybrid of n ranks. The KV heads divide the group, the group divides them, or neither."""
    heads: dict[str, Any] = {"heads": 24, "groups": groups, "dim": 4}
    tiles = [None, *(tile for part in range(2, n + 1) if n % part == 0 for tile in mesh_shapes_of(part))]
    for i, tile in enumerate(tiles):
        check(n, op="ulysses", tile=tile, rows=6 * n, layout="contiguous", **{**SHAPES[i % 3], **heads})
        check(n, op="causal", by="ulysses", tile=tile, rows=48, layout=LAYOUTS[i % 3], batch=2, **heads)
    options: dict[str, Any] = {"mask": "growing", "text": "padded", "batch": 2, "shared_keys": True, **heads}
    for by, frames_by in (("ulysses", "ulysses"), ("ring", "ulysses"), ("ulysses", "lv-xattn"), ("mesh", "ulysses")):
        check(n, op="joint", by=by, frames_by=frames_by, rows=19, **options)


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
def test_every_kernel_and_float64_inputs(op: str) -> None:
    mask = None if op == "causal" else "random"
    for kernel in ("blocked_matmul", "torch_cpu"):
        check(3, op=op, rows=30, batch=2, kernel=kernel, mask=mask)
    check(3, op=op, rows=18, dtype=torch.float64, mask=mask)


@pytest.mark.parametrize("op", ["lv", "mesh", "ulysses"])
def test_accumulation_in_float64_keeps_float32_lse(op: str) -> None:
    results = check(4, op=op, layout="contiguous", frames=2, accumulate=torch.float64)  # ranks without frames
    assert all(result["lse"].dtype is torch.float32 for result in results)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(op=op, rows=24, batch=2, mask="growing") for op in ("lv", "ring", "joint", "mesh", "ulysses")),
        Case(op="causal", rows=24, batch=2),
        *(Case(op="lv", rows=24, batch=2, shared_keys=True, mask=mask, frames=9) for mask in ("far frame", "holes")),
    ],
)
def test_results_are_bit_identical_run_to_run_and_without_overlap(case: Case) -> None:
    first = run_loopback(4, run_case, case)
    assert same_bits(first, run_loopback(4, run_case, case))
    assert same_bits(first, run_loopback(4, run_case, replace(case, overlap=False)))
