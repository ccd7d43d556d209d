"""Layer: one process. Distributed attention against dense float64, outputs and every gradient, and the bytes it sends.

Each check compares both (`attention_cases.check`). The number of ranks, the shapes of K and V and the layouts are
spread over the strategies and masks, so that each pair of them is somewhere.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import (
    CONTROL,
    Case,
    check,
    expected_bytes,
    problem,
    run_case,
    same_bits,
    visible_row_counts,
)
from mllm_seqpar.attention import decode_attention
from mllm_seqpar.attention.attend import SCATTER_ROWS
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.kernels import fused
from mllm_seqpar.schedules.bytes_sent import lv_xattn_bytes, ring_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of
from selections import slow_unless

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
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
        lambda row: row[1] == "random" or (row[0] == "lv" and row[1] in (None, "nothing", "some rows", "holes")),
        [
            (op, m, ((2, 3, 5), (1, 8, 4))[(i + j) % 2])
            for j, op in enumerate(("lv", "ring"))
            for i, m in enumerate(MASKS)
        ],
    ),
)
def test_cross_attention(op: str, mask: str | None, sizes: tuple[int, ...]) -> None:
    for n, kv in zip(sizes, KEYS, strict=True):
        check(n, op=op, rows=6 * n, mask=mask, layout="contiguous", **kv)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_pairs_without_a_mask(n: int) -> None:
    for i, kv in enumerate(KEYS):
        check(n, op="direct", rows=6 * n, dtype=(F32, BF16)[(n + i) % 2], layout="contiguous", **kv)


PRUNED = [
    *((mask, table) for mask in ("one frame", "far frame", "one sample in one place") for table in (False, True)),
    *(("same place", False), ("own sample", False), ("random", True), ("holes", False), ("all but one", False)),
]
"""Masks that make (row, rank) pairs empty, for which rows are not sent."""
BATCHES = ((1, False), (2, False), (2, True), (3, True))


@pytest.mark.parametrize("n", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask,table", PRUNED)
def test_pruned_rows(mask: str, table: bool, n: int) -> None:
    options: dict[str, Any] = {"op": "lv", "layout": "contiguous", "mask": mask}
    batches = BATCHES if n == 2 else BATCHES[2:] if table else BATCHES[1::2]
    for (batch, shared), (groups, frames) in zip(batches, itertools.cycle([(4, 11), (1, 3)])):
        check(n, rows=6 * n, batch=batch, shared_keys=shared, groups=groups, frames=frames, table=table, **options)
    if mask in ("one frame", "far frame") and not table and n == 2:
        for ranks, (batch, shared) in itertools.product((1, 2, 4), BATCHES[::2]):  # one row on each rank
            check(ranks, rows=ranks, batch=batch, shared_keys=shared, frames=2 * ranks, **options)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_keys_of_scattered_frames_are_gathered(op: str, n: int) -> None:
    for batch, shared in BATCHES[1:3]:
        check(n, op=op, rows=4 * n, batch=batch, shared_keys=shared, mask="every third frame", frames=80 * n)


@pytest.mark.rounding
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("op", ["lv", "ring"])
def test_merge_adds_no_key_to_short_rows(op: str, n: int) -> None:
    """A merge that starts at a log-sum-exp of 0 adds one key to every row, which shows with 1, 2 or 3 keys."""
    for frames, tokens in itertools.product((1, 2, 3), (1, 2)):
        mask, layout, batch = ((None, "striped", 2), ("random", "zigzag", 1))[(frames + tokens) % 2]
        check(n, op=op, rows=2 * n, frames=frames, tokens=tokens, layout=layout, batch=batch, mask=mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", ["plain", "window", "packed", "padded", "padded left"])
def test_causal_text(text: str, layout: str) -> None:
    for n, rows, batch in ((1, 17, 2), (2, 24, 1), (5, 17, 2)) if layout == "zigzag" else ((3, 17, 2), (4, 32, 2)):
        check(n, op="causal", rows=rows, batch=batch, layout=layout, text=text)
    for n in (1, 3) if text == "plain" else ():
        check(n, op="causal", rows=8 * n, batch=3, layout=layout, shared_keys=True)


@pytest.mark.parametrize(
    "mask",
    slow_unless(
        lambda mask: mask in (None, "random", "nothing", "holes", "far frame", "own sample"),
        [*MASKS, "far frame", "one sample in one place", "own sample"],
    ),
)
def test_one_softmax_over_text_and_frames(mask: str | None) -> None:
    """The frames of a batch may be folded and pruned, and their results merge with batched text."""
    for n, layout, text, shared in (
        (2, "zigzag", "padded left", True),
        (3, "striped", "window", True),
        (4, "zigzag", "plain", False),
    ):
        check(n, op="joint", rows=19, batch=2, mask=mask, layout=layout, text=text, shared_keys=shared)


@pytest.mark.parametrize(("frames", "n"), [(13, 1), (5, 2), *slow((13, 3), (5, 4)), (1, 4)])
def test_frames_in_two_ranges_of_a_rank(frames: int, n: int) -> None:
    common: dict[str, Any] = {"op": "joint", "rows": 19, "batch": 2, "frame_layout": "zigzag", "frames": frames}
    for (mask, table), shared in zip(
        (("growing", False), ("random", True), ("holes", False)) * 2,
        (True, True, False, False, False, True),
        strict=True,
    ):
        check(n, mask=mask, table=table, shared_keys=shared, **common)
    for frames_by, tile in (("ring", None), ("ulysses", None), *(("mesh", tile) for tile in mesh_shapes_of(n))):
        check(n, frames_by=frames_by, tile=tile, mask="growing", shared_keys=True, heads=12, **common)


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


@pytest.mark.parametrize("n,tile", [*mesh_shapes(4), *slow(*mesh_shapes(3), (6, (2, 3)), (6, (3, 2)), (8, (2, 4)))])
def test_every_mesh_shape(n: int, tile: tuple[int, int] | None) -> None:
    mesh: dict[str, Any] = {"by": "mesh", "tile": tile}
    for shape in SHAPES[n > 4 :]:
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
        if n < 6 or i % 2:
            check(n, op="ulysses", tile=tile, rows=6 * n, layout="contiguous", **{**SHAPES[i % 3], **heads})
        if n < 6 or not i % 2:
            check(n, op="causal", by="ulysses", tile=tile, rows=48, layout=LAYOUTS[i % 3], batch=2, **heads)
    options: dict[str, Any] = {"mask": "growing", "text": "padded", "batch": 2, "shared_keys": True, **heads}
    sources = (("ulysses", "ulysses"), ("ring", "ulysses"), ("ulysses", "lv-xattn"), ("mesh", "ulysses"))
    for by, frames_by in sources if n < 6 else sources[n % 4 // 2 :: 2]:
        check(n, op="joint", by=by, frames_by=frames_by, rows=19, **options)


@pytest.mark.parametrize("op", ["lv", "ring", "causal", "joint"])
def test_every_kernel_and_float64_inputs(op: str) -> None:
    mask = None if op == "causal" else "random"
    for kernel in ("blocked_matmul", "torch_cpu"):
        check(3, op=op, rows=30, batch=2, kernel=kernel, mask=mask)
    check(3, op=op, rows=18, dtype=F64, mask=mask)


@pytest.mark.parametrize("op", ["lv", "ring", "mesh", "joint"])
def test_masks_that_are_too_large_to_keep(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEPT_MASK", 0)
    check(2, op=op, rows=24, batch=2, mask="holes")


@pytest.mark.parametrize("op", ["lv", "mesh", "ulysses"])
def test_accumulation_in_float64_keeps_float32_lse(op: str) -> None:
    results = check(4, op=op, layout="contiguous", frames=2, accumulate=F64)  # ranks without frames
    assert all(result["lse"].dtype is F32 for result in results)


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


DTYPES = [
    Case(op="lv", frames=8, batch=2, groups=1, dtype=BF16),  # O and dQ in float32 beside 2-byte Q
    Case(op="lv", frames=8, mask="all", batch=2),  # no (row, rank) pair is empty: a ring
    Case(op="lv", rows=50, frames=11, mask="one frame", batch=2, shared_keys=True, dtype=BF16),
    Case(op="lv", rows=32, frames=13, mask="random", batch=2, groups=1),  # rows that no batch item needs are not sent
    Case(op="lv", rows=32, frames=9, mask="holes", batch=2, shared_keys=True, accumulate=None),
    Case(op="lv", rows=32, frames=9, mask="some rows", table=True, batch=2),
    Case(op="lv", dtype=BF16, accumulate=None),
    Case(op="lv", dtype=F64, frames=3),
    Case(op="lv", dtype=BF16, accumulate=F32),
    Case(op="lv", rows=32, frames=11, mask="random", dtype=BF16, accumulate=F32),
    Case(op="direct", frames=9, batch=2, shared_keys=True, dtype=BF16, accumulate=F32),
    Case(op="ring", frames=2, batch=2, groups=1, dtype=BF16),  # uneven frames, ranks without any
    Case(op="ring", dtype=BF16, accumulate=None),
    Case(op="causal", rows=48, groups=4, dtype=BF16),
]


@pytest.mark.parametrize("case", DTYPES)
def test_dtypes_of_what_is_sent(case: Case) -> None:
    for n in (2, 3):
        check(n, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(op="mesh", dtype=BF16, frames=5, batch=2),
        Case(op="causal", by="mesh", rows=48, layout="striped", dtype=BF16, accumulate=None),
        Case(op="ulysses", heads=24, groups=24, frames=5, dtype=BF16, batch=2),
        Case(op="ulysses", heads=24, groups=1, dtype=BF16),
        Case(op="ulysses", heads=24, groups=1, dtype=BF16, accumulate=F32),
    ],
)
def test_dtypes_of_what_mesh_shapes_and_hybrids_send(case: Case) -> None:
    for tile in (tile for part in ((1, 2, 4) if case.op == "ulysses" else (4,)) for tile in mesh_shapes_of(part)):
        check(4, replace(case, tile=tile))


@pytest.mark.parametrize("n", [2, 4])
def test_rows_are_sent_only_to_ranks_with_a_visible_frame(n: int) -> None:
    """A ring sends every row past n - 1 ranks; with one visible frame, a row is sent to one rank or to none."""
    case = Case(op="lv", rows=16 * n, frames=2 * n, mask="one frame", layout="contiguous")
    for backward in (False, True):
        ring = sum(lv_xattn_bytes(problem(case, n, 0), backward=backward).values()) * n
        sent = sum(sum(expected_bytes(case, n, rank, backward=backward).values()) for rank in range(n))
        assert sent == ring // n, "the rows of each rank attend to all ranks equally often"
    for result in run_loopback(n, run_case, replace(case, rows=8 * n, mask="same place")):
        assert set(result["forward"]) <= set(CONTROL) and not result["backward"], "rows attend to local frames only"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", [None, "far frame"])
def test_joint_softmax_sends_the_sum_of_its_sources(mask: str | None, n: int) -> None:
    case = Case(op="joint", rows=32, batch=2, shared_keys=True, mask=mask)
    text_case, visible = replace(case, op="causal", shared_keys=False), visible_row_counts(case, n)
    for rank, result in enumerate(run_loopback(n, run_case, case)):
        for backward in (False, True):
            frames = lv_xattn_bytes(problem(case, n, rank), backward=backward, visible_rows=visible)
            text = ring_bytes(problem(text_case, n, rank), backward=backward)
            sent = result["backward" if backward else "forward"]
            payload = sum(size for label, size in sent.items() if label not in CONTROL)
            assert payload == sum(frames.values()) + sum(text.values())


def decode(comm: Communicator, rows: int) -> int:
    x = torch.randn(2, 4, rows, 8)
    with torch.no_grad():
        decode_attention(x, x[:, :2], x[:, :2], group=comm)
    return sum(size for label, size in comm.bytes.sent.items() if label not in CONTROL)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_decoding_sends_results_only(n: int) -> None:
    """Few rows: (n - 1) of (O, log-sum-exp). Many rows: 2 (n - 1)/n of them, for any number of ranks."""
    row, many = 2 * 4 * (8 + 1) * 4, SCATTER_ROWS + 1
    assert run_loopback(n, decode, 3) == [(n - 1) * 3 * row] * n
    assert run_loopback(n, decode, many) == [2 * (n - 1) * -(-many // n) * row] * n
