"""Layer: one process. Distributed attention against dense float64, all ranks as threads: the wide sweep."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from attention.cases import Case, assert_exact, run_case, same_bits
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

SIZES = (1, 2, 3, 4, 5, 8)
MASKS = ("random", "growing", "one frame", "first frame", "last frame", "nothing", "some rows", "holes")


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["lv", "ring"])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_cross_attention(op: str, mask: str | None, n: int) -> None:
    for batch, shared, groups, table in ((1, False, 2, False), (2, False, 4, True), (2, True, 1, False)):
        case = Case(
            op=op,
            rows=6 * n,
            batch=batch,
            shared_keys=shared,
            groups=groups,
            mask=mask,
            table=table,
            layout="contiguous",
        )
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.rounding
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_few_keys(op: str, n: int) -> None:
    """A merge that starts at a log-sum-exp of 0 lets every row see one more key: it shows with 1, 2 or 3 keys."""
    for keys, tokens, layout in itertools.product((1, 2, 3), (1, 2), ("striped", "zigzag")):
        case = Case(op=op, rows=2 * n, frames=keys, tokens=tokens, layout=layout, batch=2)
        assert_exact(case, run_loopback(n, run_case, case))
        case = Case(op=op, rows=2 * n, frames=keys, tokens=tokens, layout=layout, mask="random")
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("text", ["plain", "window", "packed", "padded", "padded left"])
def test_causal_text(text: str, layout: str, n: int) -> None:
    for rows, batch in ((24, 1), (17, 2), (8 * n, 2)):
        case = Case(op="causal", rows=rows, batch=batch, layout=layout, text=text)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_one_softmax_over_text_and_frames(mask: str | None, n: int) -> None:
    for layout, text, shared in (
        ("zigzag", "padded left", True),
        ("striped", "window", True),
        ("zigzag", "plain", False),
    ):
        case = Case(op="joint", rows=19, batch=2, layout=layout, text=text, shared_keys=shared, mask=mask)
        assert_exact(case, run_loopback(n, run_case, case))


SHAPES: list[dict[str, Any]] = [
    {},
    {"mask": "random", "batch": 2, "groups": 4},
    {"mask": "holes", "batch": 2, "shared_keys": True, "groups": 1, "frames": 2},  # ranks without frames
]


@pytest.mark.parametrize("n,tile", [(n, tile) for n in (1, 2, 3, 4, 6, 8) for tile in [None, *mesh_shapes_of(n)]])
def test_every_tile_of_a_mesh(n: int, tile: tuple[int, int] | None) -> None:
    for shape in SHAPES:
        case = Case(op="mesh", tile=tile, rows=6 * n, layout="contiguous", **shape)
        assert_exact(case, run_loopback(n, run_case, case))
    for layout, text in (("striped", "plain"), ("zigzag", "padded left"), ("contiguous", "window")):
        case = Case(op="causal", by="mesh", tile=tile, rows=48 if text == "plain" else 17, layout=layout, text=text)
        assert_exact(case, run_loopback(n, run_case, case))
    case = Case(op="joint", by="mesh", frames_by="mesh", tile=tile, rows=19, batch=2, mask="growing", shared_keys=True)
    assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("groups", [24, 8, 4, 1])
def test_heads_dealt_to_any_group(groups: int, n: int) -> None:
    """24 query heads: key heads that divide the group, that the group divides, and neither; and every hybrid."""
    heads: dict[str, Any] = {"heads": 24, "groups": groups, "dim": 4}
    tiles = [None, *(tile for part in range(2, n + 1) if n % part == 0 for tile in mesh_shapes_of(part))]
    for i, tile in enumerate(tiles):
        case = Case(op="ulysses", tile=tile, rows=6 * n, layout="contiguous", **{**SHAPES[i % 3], **heads})
        assert_exact(case, run_loopback(n, run_case, case))
        layout = ("zigzag", "striped", "contiguous")[i % 3]
        case = Case(op="causal", by="ulysses", tile=tile, rows=48, layout=layout, batch=2, **heads)
        assert_exact(case, run_loopback(n, run_case, case))
    for by, frames_by in (("ulysses", "ulysses"), ("ring", "ulysses"), ("ulysses", "lv-xattn"), ("mesh", "ulysses")):
        options: dict[str, Any] = {"mask": "growing", "text": "padded", "batch": 2, "shared_keys": True, **heads}
        case = Case(op="joint", by=by, frames_by=frames_by, rows=19, **options)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("op", ["causal", "joint"])
def test_text_shorter_than_the_group(op: str, n: int) -> None:
    for layout, rows in itertools.product(("zigzag", "striped", "contiguous"), (1, 2)):
        case = Case(op=op, rows=rows, layout=layout, frames=1, tokens=1, mask="growing" if op == "joint" else None)
        assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
@pytest.mark.parametrize("kernel", ["reference", "blocked_matmul", "torch_cpu"])
def test_every_kernel(kernel: str, op: str) -> None:
    case = Case(op=op, rows=30, batch=2, kernel=kernel, mask=None if op == "causal" else "random")
    assert_exact(case, run_loopback(3, run_case, case))


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
def test_float64_stays_float64(op: str) -> None:
    case = Case(op=op, rows=18, dtype=torch.float64, mask=None if op == "causal" else "random")
    assert_exact(case, run_loopback(3, run_case, case))


@pytest.mark.parametrize("op", ["lv", "mesh", "ulysses"])
def test_float32_inputs_summed_in_float64(op: str) -> None:
    case = Case(op=op, rows=12, layout="contiguous", frames=2, accumulate=torch.float64)  # ranks without frames
    results = run_loopback(4, run_case, case)
    assert_exact(case, results)
    assert all(result["lse"].dtype is torch.float32 for result in results)


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
def test_the_same_bits_run_to_run_and_with_or_without_overlap(op: str) -> None:
    case = Case(op=op, rows=24, batch=2, mask=None if op == "causal" else "growing")
    first = run_loopback(4, run_case, case)
    assert same_bits(first, run_loopback(4, run_case, case))
    assert same_bits(first, run_loopback(4, run_case, Case(**{**vars(case), "overlap": False})))
