"""The bytes that a case of `attention_cases` sends, by the formulas of `schedules.bytes_sent`."""

from __future__ import annotations

from typing import Any

import torch

from attention_cases import Case, visible_frames
from mllm_seqpar.attention.keys import accumulation
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, mesh_bytes, ring_bytes, ulysses_bytes
from mllm_seqpar.sharding import frame_bounds, sequence_positions

CONTROL = ("agreement", "mask")
"""Labels of the few numbers by which ranks check that they agree and learn each other's masks."""


def problem(case: Case, n: int, rank: int) -> Problem:
    """The sizes of a case for the byte formulas."""
    rows = case.total(n) // n
    frames = tuple((stop - start) * case.tokens for start, stop in frame_bounds(case.frames, n))
    return Problem(
        **{"rows": rows, "keys": (rows,) * n if case.op == "causal" else frames, "rank": rank},
        **{"heads": case.heads, "kv_heads": case.groups, "dim": case.dim, "element": case.dtype.itemsize},
        **{"batch": case.batch, "key_batch": 1 if case.shared_keys else case.batch},
        accumulated=accumulation(case.accumulate, case.dtype).itemsize,
        direct_element=case.dtype.itemsize if case.accumulate == "auto" else None,
    )


def visible_row_counts(case: Case, n: int) -> list[list[int]] | None:
    """How many rows of rank i attend to any key of rank j, counted in the dense mask."""
    total = case.total(n)
    visible = visible_frames(case, total)
    if visible is None:
        return None
    bounds = [(start * case.tokens, stop * case.tokens) for start, stop in frame_bounds(case.frames, n)]
    by_rank = torch.stack([visible[..., start:stop].any(-1) for start, stop in bounds], dim=-1)
    if not case.shared_keys:
        by_rank = by_rank.any(0, keepdim=True)
    rows = [sequence_positions(total, rank, n, case.layout) for rank in range(n)]
    return [by_rank[:, index].sum((0, 1)).tolist() for index in rows]


def prunes(case: Case, n: int) -> bool:
    """Whether some rank has rows that attend to no key of some other rank; if not, rows go around the ring."""
    visible, rows = visible_row_counts(case, n), case.total(n) // n * (case.batch if case.shared_keys else 1)
    return visible is not None and any(visible[i][j] < rows for i in range(n) for j in range(n) if i != j)


def expected_bytes(case: Case, n: int, rank: int, *, backward: bool) -> dict[str, int]:
    """Bytes that the formulas say a rank sends, by label."""
    by, sizes = case.by if case.op == "causal" else case.op, problem(case, n, rank)
    tile, visible = case.tile, visible_row_counts(case, n)
    if by in ("lv", "direct") or (by == "mesh" and tile == (n, 1) and visible is not None):
        visible = visible if prunes(case, n) else None
        sent = lv_xattn_bytes(sizes, backward=backward, visible_rows=visible, direct=by == "direct")
    elif by == "ring":
        sent = ring_bytes(sizes, backward=backward)
    else:
        mesh = by == "mesh"
        sent = (mesh_bytes if mesh else ulysses_bytes)(sizes, tile or (n if mesh else 1, 1), backward=backward)
    if case.dtype is torch.float64:
        sent |= {name: 2 * sent[name] for name in ("lse", "delta") if name in sent}  # float64 as well
    return {label: size for label, size in sent.items() if size}


def assert_counted(case: Case, n: int, results: list[dict[str, Any]]) -> None:
    """Hold the counted bytes of every rank against the formulas."""
    for rank, result in enumerate(results):
        for backward in (False, True):
            sent = dict(result["backward" if backward else "forward"])
            control = sum(sent.pop(label, 0) for label in CONTROL)
            assert control == 0 if backward else control < 4096 * n
            expected = expected_bytes(case, n, rank, backward=backward)
            assert {label: size for label, size in sent.items() if size} == expected, (rank, backward)
