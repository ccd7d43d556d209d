"""Layer: one process. Distributed attention on loopback ranks against dense float64: outputs and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from attention_cases import Case, assert_exact, run_case, same_bits
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of

MASKS = (None, "random", "growing", "one frame", "first frame", "last frame", "nothing", "some rows", "holes")
KEYS: list[dict[str, Any]] = [
    {"batch": 1, "groups": 2},
    {"batch": 2, "groups": 4, "table": True},
    {"batch": 2, "groups": 1, "shared_keys": True},
]
"""One sample, two samples, and two samples that share their frames."""


def check(n: int, **options: Any) -> None:
    case = Case(**options)
    assert_exact(case, run_loopback(n, run_case, case))


@pytest.mark.parametrize("op", ["lv", "ring"])
@pytest.mark.parametrize("mask", MASKS)
def test_cross_attention(op: str, mask: str | None) -> None:
    for n, keys in zip((2, 3, 5), KEYS, strict=True):
        check(n, op=op, rows=6 * n, mask=mask, layout="contiguous", **keys)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_cross_attention_under_every_mask(op: str, n: int) -> None:
    for mask, keys in itertools.product(MASKS, KEYS):
        check(n, op=op, rows=6 * n, mask=mask, layout="contiguous", **keys)


@pytest.mark.rounding
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_merge_adds_no_key_to_short_rows(op: str, n: int) -> None:
    """A merge that starts at a log-sum-exp of 0 adds one key to every row, which shows with 1, 2 or 3 keys."""
    for keys, tokens in itertools.product((1, 2, 3), (1, 2)):
        check(n, op=op, rows=2 * n, frames=keys, tokens=tokens, layout="striped", batch=2)
        check(n, op=op, rows=2 * n, frames=keys, tokens=tokens, mask="random")


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("text", ["plain", "window", "packed", "padded", "padded left"])
def test_causal_text(text: str, layout: str) -> None:
    for n, rows, batch in ((1, 17, 2), (2, 24, 1), (3, 17, 2), (4, 32, 2), (5, 17, 2)):
        check(n, op="causal", rows=rows, batch=batch, layout=layout, text=text)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_causal_text_with_keys_shared_by_all_samples(layout: str) -> None:
    for n in (1, 2, 3):
        check(n, op="causal", rows=8 * n, batch=3, layout=layout, shared_keys=True)


TEXTS: list[dict[str, Any]] = [
    {"layout": "zigzag", "text": "padded left", "shared_keys": True},
    {"layout": "striped", "text": "window", "shared_keys": True},
    {"layout": "zigzag", "text": "plain", "shared_keys": False},
]


@pytest.mark.parametrize("mask", MASKS)
def test_one_softmax_over_text_and_frames(mask: str | None) -> None:
    for n, text in zip((2, 3, 4), TEXTS, strict=True):
        check(n, op="joint", rows=19, batch=2, mask=mask, **text)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("op", ["causal", "joint"])
def test_text_shorter_than_the_group(op: str, n: int) -> None:
    for layout, rows in itertools.product(("zigzag", "striped", "contiguous"), (1, 2)):
        mask = "growing" if op == "joint" else None
        check(n, op=op, rows=rows, layout=layout, frames=1, tokens=1, mask=mask)


SHAPES: list[dict[str, Any]] = [
    {},
    {"mask": "random", "batch": 2, "groups": 4},
    {"mask": "holes", "batch": 2, "shared_keys": True, "groups": 1, "frames": 2},  # ranks without frames
]


def mesh_shapes(*sizes: int) -> Iterable[tuple[int, tuple[int, int] | None]]:
    return [(n, shape) for n in sizes for shape in [None, *mesh_shapes_of(n)]]


@pytest.mark.parametrize(
    "n,tile", [*mesh_shapes(3, 4), *(pytest.param(*x, marks=pytest.mark.slow) for x in mesh_shapes(6, 8))]
)
def test_every_mesh_shape(n: int, tile: tuple[int, int] | None) -> None:
    mesh: dict[str, Any] = {"by": "mesh", "tile": tile}
    for shape in SHAPES:
        check(n, op="mesh", tile=tile, rows=6 * n, layout="contiguous", **shape)
    for layout, text in (("striped", "plain"), ("zigzag", "padded left"), ("contiguous", "window")):
        check(n, op="causal", rows=48 if text == "plain" else 17, layout=layout, text=text, **mesh)
    check(n, op="joint", frames_by="mesh", rows=19, batch=2, mask="growing", shared_keys=True, **mesh)


def check_head_sharding(groups: int, n: int) -> None:
    """Check 24 query heads and every hybrid of n ranks."""
    heads: dict[str, Any] = {"heads": 24, "groups": groups, "dim": 4}
    tiles = [None, *(tile for part in range(2, n + 1) if n % part == 0 for tile in mesh_shapes_of(part))]
    for i, tile in enumerate(tiles):
        check(n, op="ulysses", tile=tile, rows=6 * n, layout="contiguous", **{**SHAPES[i % 3], **heads})
        layout = ("zigzag", "striped", "contiguous")[i % 3]
        check(n, op="causal", by="ulysses", tile=tile, rows=48, layout=layout, batch=2, **heads)
    for by, frames_by in (("ulysses", "ulysses"), ("ring", "ulysses"), ("ulysses", "lv-xattn"), ("mesh", "ulysses")):
        options: dict[str, Any] = {"mask": "growing", "text": "padded", "batch": 2, "shared_keys": True, **heads}
        check(n, op="joint", by=by, frames_by=frames_by, rows=19, **options)


@pytest.mark.parametrize("n,groups", [(2, 1), (3, 8), (3, 4), (4, 8), (4, 24)])
def test_head_sharding(groups: int, n: int) -> None:
    """The KV heads divide the group, the group divides them, and neither."""
    check_head_sharding(groups, n)


@pytest.mark.slow
@pytest.mark.parametrize("n,groups", [(6, 4), (8, 1), (8, 24)])
def test_head_sharding_in_larger_groups(groups: int, n: int) -> None:
    check_head_sharding(groups, n)


@pytest.mark.parametrize("op", ["lv", "causal", "joint"])
@pytest.mark.parametrize("kernel", ["reference", "blocked_matmul", "torch_cpu"])
def test_every_kernel(kernel: str, op: str) -> None:
    check(3, op=op, rows=30, batch=2, kernel=kernel, mask=None if op == "causal" else "random")


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
def test_float64_inputs_are_computed_in_float64(op: str) -> None:
    check(3, op=op, rows=18, dtype=torch.float64, mask=None if op == "causal" else "random")


@pytest.mark.parametrize("op", ["lv", "mesh", "ulysses"])
def test_accumulation_in_float64_keeps_float32_lse(op: str) -> None:
    case = Case(op=op, rows=12, layout="contiguous", frames=2, accumulate=torch.float64)  # ranks without frames
    results = run_loopback(4, run_case, case)
    assert_exact(case, results)
    assert all(result["lse"].dtype is torch.float32 for result in results)


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint", "mesh", "ulysses"])
def test_results_are_bit_identical_run_to_run_and_without_overlap(op: str) -> None:
    case = Case(op=op, rows=24, batch=2, mask=None if op == "causal" else "growing")
    first = run_loopback(4, run_case, case)
    assert same_bits(first, run_loopback(4, run_case, case))
    assert same_bits(first, run_loopback(4, run_case, Case(**{**vars(case), "overlap": False})))
