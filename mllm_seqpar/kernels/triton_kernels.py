"""Triton programs of attention over intervals of keys; `triton_launches` launches them. Importing needs Triton.

Row s of item b attends to the keys low[b, s] <= j < high[b, s]. The query heads that share a KV head are folded into
rows, heads innermost: folded row i is row i // REPEAT of head i % REPEAT of the group. A tile of BLOCK_M folded rows
then has BLOCK_M / REPEAT different intervals, so few tiles of keys are on the border of some of them.

A tile of rows attends to the hull of its intervals, in three loops: over keys before those that all of its rows see,
over those (without comparisons), and over the rest. A tile of keys goes through the rows that see any of its keys in
the same way, ROWS_AT_ONCE rows at a time, which bounds the work for rows in between that see none. Rows that see no
key, and rows past the end, take part in no hull. Nothing is added atomically, so results are the same in every run.

Scores are in units of log 2: exp2 is one instruction. Offsets that grow with the numbers of rows and keys are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Stands for a maximum, or a log-sum-exp, of no scores: finite, so that a difference of two of them is 0, not NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _keys(pointers, inside, dims, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr):
    """Load a tile (BLOCK_N, BLOCK_D) of keys or values; 0 outside."""
    if BOUNDED:
        return tl.load(pointers, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _intervals(row, LOW, HIGH, S, T, MASKED: tl.constexpr):
    """Return the intervals (low, high) of some rows; low = high = 0 for rows past the end."""
    if MASKED:
        low = tl.load(LOW + row, mask=row < S, other=0)
        high = tl.load(HIGH + row, mask=row < S, other=0)
    else:
        low = tl.zeros_like(row)
        high = tl.where(row < S, T, 0)
    return low, high


@triton.jit
def _part_of_hull(low, high, T, part, parts, BLOCK_N: tl.constexpr):
    """Return (start, full_start, full_stop, stop): the keys of one of several parts of the hull of the intervals.

    All rows that see a key at all see the keys from full_start to full_stop, whole tiles counted from start.
    """
    some = low < high
    first = tl.min(tl.where(some, low, T), 0)
    last = tl.max(tl.where(some, high, 0), 0)
    tiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
    length = tl.cdiv(tiles, parts) * BLOCK_N
    start = first + part * length
    stop = tl.maximum(tl.minimum(start + length, last), start)
    all_from = tl.max(tl.where(some, low, 0), 0)
    all_to = tl.minimum(tl.min(tl.where(some, high, T), 0), stop)
    full_start = tl.minimum(start + tl.cdiv(tl.maximum(all_from - start, 0), BLOCK_N) * BLOCK_N, stop)
    full_stop = full_start + tl.maximum(all_to - full_start, 0) // BLOCK_N * BLOCK_N
    return start, full_start, full_stop, stop


@triton.jit
def _attend(
    acc, total, peak, q, K, V, start, stop, low, high, limit, scale, stride_kn, stride_kd, stride_vn, stride_vd,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from start to stop to the sums (acc, total) of exp2(score - peak)."""
    offsets, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    K += start.to(tl.int64) * stride_kn
    V += start.to(tl.int64) * stride_vn
    k_offset = offsets[:, None] * stride_kn + dims[None, :] * stride_kd
    v_offset = offsets[:, None] * stride_vn + dims[None, :] * stride_vd
    for n in range(start, stop, BLOCK_N):
        keys = n + offsets
        k = _keys(K + k_offset, keys < limit, dims, D, BLOCK_D, BORDER)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BORDER:
            visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]) & (keys < limit)[None, :]
            score = tl.where(visible, score * scale, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            p = tl.exp2(score - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
            p = tl.exp2(score * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        v = _keys(V + v_offset, keys < limit, dims, D, BLOCK_D, BORDER)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
        K += BLOCK_N * stride_kn
        V += BLOCK_N * stride_vn
    return acc, total, peak


@triton.jit(do_not_specialize_on_alignment=["LOW", "HIGH"], do_not_specialize=["S", "T", "stride_interval", "PARTS"])
def forward(
    Q, K, V, LOW, HIGH, OUT, LSE, scale,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_interval, B, G, S, T,
    PARTS, REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o (PARTS, B, G * REPEAT, S, D) and lse (PARTS, B, G * REPEAT, S) of each part of the keys.

    Grid: (tiles of rows, B * G, PARTS). The last rows start first: they have the longest intervals in masks that grow.
    """
    tile, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    item, group = tl.program_id(1) // G, tl.program_id(1) % G
    folded = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = folded // REPEAT, group * REPEAT + folded % REPEAT
    valid, dims = row < S, tl.arange(0, BLOCK_D)
    low, high = _intervals(row, LOW + item * stride_interval, HIGH + item * stride_interval, S, T, MASKED)
    Q += item.to(tl.int64) * stride_qb
    q_at = Q + (row.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh)[:, None] + dims[None, :] * stride_qd
    q = tl.load(q_at, mask=valid[:, None] & (dims < D)[None, :], other=0.0)
    K += item.to(tl.int64) * stride_kb + group.to(tl.int64) * stride_kh
    V += item.to(tl.int64) * stride_vb + group.to(tl.int64) * stride_vh
    start, full_start, full_stop, stop = _part_of_hull(low, high, T, part, PARTS, BLOCK_N)
    scale *= LOG2_E
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    edges = start, full_start, full_stop, stop
    for i in tl.static_range(3):
        acc, total, peak = _attend(
            acc, total, peak, q, K, V, edges[i], edges[i + 1], low, high, stop, scale, stride_kn, stride_kd, stride_vn,
            stride_vd, D, BLOCK_D, BLOCK_N, i != 1, PRECISION,
        )  # fmt: skip
    # A row without keys went through the keys that all others see; it has no sum.
    some = (low < high) & (total > 0.0)
    o = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * LN_2, -float("inf"))
    out = ((part * B + item).to(tl.int64) * (G * REPEAT) + head) * S + row
    tl.store(OUT + out[:, None] * D + dims[None, :], o, mask=valid[:, None] & (dims < D)[None, :])
    tl.store(LSE + out, lse, mask=valid)


@triton.jit(do_not_specialize=["rows", "PARTS"])
def merge_parts(
    PARTS_OUT, PARTS_LSE, OUT, LSE, rows, PARTS, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge PARTS_OUT (PARTS, rows, D) and PARTS_LSE (PARTS, rows) by their log-sum-exp. Grid: (tiles of rows,)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid, dims = row < rows, tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (dims < D)[None, :]
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    at = row.to(tl.int64)
    for part in range(PARTS):
        peak = tl.maximum(peak, tl.load(PARTS_LSE + at + part * rows.to(tl.int64), mask=valid, other=-float("inf")))
    base = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for part in range(PARTS):
        there = at + part * rows.to(tl.int64)
        weight = tl.exp(tl.load(PARTS_LSE + there, mask=valid, other=-float("inf")) - base)
        total += weight
        acc += weight[:, None] * tl.load(PARTS_OUT + there[:, None] * D + dims[None, :], mask=inside, other=0.0)
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + at[:, None] * D + dims[None, :], acc / divisor[:, None], mask=inside)
    tl.store(LSE + at, tl.where(total == 0.0, -float("inf"), base + tl.log(divisor)), mask=valid)


@triton.jit
def _at(index, heads, rows, stride_b, stride_h, stride_s):
    """Return the offset of each row, counted over items, heads and rows."""
    row, head = (index % rows).to(tl.int64), (index // rows % heads).to(tl.int64)
    return (index // (heads * rows)).to(tl.int64) * stride_b + head * stride_h + row * stride_s


@triton.jit(do_not_specialize=["count", "rows"])
def merge(
    OUT, LSE, NEW, NEW_LSE, stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh, stride_ls,
    stride_nb, stride_nh, stride_ns, stride_nd, stride_mb, stride_mh, stride_ms, count, heads, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge a partial result (NEW, NEW_LSE) into (OUT, LSE) as `base.merge_`. Grid: (tiles of rows,)."""
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid, dims = index < count, tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (dims < D)[None, :]
    lse_at = LSE + _at(index, heads, rows, stride_lb, stride_lh, stride_ls)
    lse = tl.load(lse_at, mask=valid, other=0.0)
    new = tl.load(NEW_LSE + _at(index, heads, rows, stride_mb, stride_mh, stride_ms), mask=valid, other=0.0)
    peak = tl.maximum(lse, new)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    total = peak + tl.log(tl.exp(lse - base) + tl.exp(new - base))
    weight = tl.exp(new - tl.where(total == -float("inf"), 0.0, total))
    o_at = _at(index, heads, rows, stride_ob, stride_oh, stride_os)[:, None] + dims[None, :] * stride_od
    n_at = _at(index, heads, rows, stride_nb, stride_nh, stride_ns)[:, None] + dims[None, :] * stride_nd
    o = tl.load(OUT + o_at, mask=inside, other=0.0).to(tl.float32)
    o_new = tl.load(NEW + n_at, mask=inside, other=0.0).to(tl.float32)
    # Exact for weights of 0 and of 1, as torch's lerp.
    weight = weight[:, None]
    merged = tl.where(weight < 0.5, o + weight * (o_new - o), o_new - (1.0 - weight) * (o_new - o))
    tl.store(OUT + o_at, merged, mask=inside)
    tl.store(lse_at, total, mask=valid)


@triton.jit(do_not_specialize=["count", "rows"])
def output_with_row_sums(
    DO, DELTA, OUT, stride_ob, stride_oh, stride_os, stride_od, count, heads, rows, limit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write an output (count, D) whose row sums of products with DO are DELTA (count,); see `base`."""
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid, dims = index < count, tl.arange(0, BLOCK_D)[None, :]
    inside = valid[:, None] & (dims < D)
    do_at = _at(index, heads, rows, stride_ob, stride_oh, stride_os)[:, None] + dims * stride_od
    do = tl.load(DO + do_at, mask=inside, other=0.0).to(OUT.dtype.element_ty).to(tl.float32)
    delta = tl.load(DELTA + index, mask=valid, other=0.0)
    # The largest element of each half of a row, and the first dim that has it.
    half: tl.constexpr = (D + 1) // 2
    left, right = tl.where(dims < half, tl.abs(do), -1.0), tl.where((dims >= half) & (dims < D), tl.abs(do), -1.0)
    left_at = tl.min(tl.where(left == tl.max(left, 1)[:, None], dims, BLOCK_D), 1)
    right_at = tl.min(tl.where(right == tl.max(right, 1)[:, None], dims, BLOCK_D), 1)
    is_left = tl.max(left, 1) >= tl.max(right, 1)
    first_at, second_at = tl.where(is_left, left_at, right_at), tl.where(is_left, right_at, left_at)
    first = tl.sum(tl.where(dims == first_at[:, None], do, 0.0), 1)
    second = tl.sum(tl.where(dims == second_at[:, None], do, 0.0), 1)
    o_first = (delta / tl.where(first == 0.0, 1.0, first)).to(OUT.dtype.element_ty)
    rest = (delta - first * o_first.to(tl.float32)) / tl.where(second == 0.0, 1.0, second)
    o_second = tl.minimum(tl.maximum(rest, -limit), limit)
    o = tl.where(dims == first_at[:, None], o_first.to(tl.float32)[:, None], 0.0)
    o += tl.where(dims == second_at[:, None], o_second[:, None], 0.0)
    tl.store(OUT + index.to(tl.int64)[:, None] * D + dims, o, mask=inside)


@triton.jit
def _add_to_dq(
    dq, q, do, lse, delta, K, V, start, stop, low, high, limit, scale, stride_kn, stride_kd, stride_vn, stride_vd,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from start to stop to dq, without the factor of the scores; lse in units of log 2."""
    offsets, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    K += start.to(tl.int64) * stride_kn
    V += start.to(tl.int64) * stride_vn
    k_offset = offsets[:, None] * stride_kn + dims[None, :] * stride_kd
    v_offset = offsets[:, None] * stride_vn + dims[None, :] * stride_vd
    for n in range(start, stop, BLOCK_N):
        keys = n + offsets
        k = _keys(K + k_offset, keys < limit, dims, D, BLOCK_D, BORDER)
        v = _keys(V + v_offset, keys < limit, dims, D, BLOCK_D, BORDER)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        if BORDER:
            visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]) & (keys < limit)[None, :]
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        K += BLOCK_N * stride_kn
        V += BLOCK_N * stride_vn
    return dq


@triton.jit(do_not_specialize_on_alignment=["LOW", "HIGH"], do_not_specialize=["S", "T", "stride_interval", "PARTS"])
def backward_dq(
    DO, Q, K, V, LOW, HIGH, LSE, DELTA, DQ, scale,
    stride_ob, stride_oh, stride_os, stride_od, stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd, stride_interval, B, G, S, T,
    PARTS, REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq (PARTS, B, G * REPEAT, S, D) of each part of the keys, from merged lse and delta (B, G * REPEAT, S).

    Grid: (tiles of rows, B * G, PARTS).
    """
    tile, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    item, group = tl.program_id(1) // G, tl.program_id(1) % G
    folded = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = folded // REPEAT, group * REPEAT + folded % REPEAT
    valid, dims = row < S, tl.arange(0, BLOCK_D)
    low, high = _intervals(row, LOW + item * stride_interval, HIGH + item * stride_interval, S, T, MASKED)
    inside = valid[:, None] & (dims < D)[None, :]
    row, head = row.to(tl.int64), head.to(tl.int64)
    Q += item.to(tl.int64) * stride_qb
    DO += item.to(tl.int64) * stride_ob
    q = tl.load(Q + (row * stride_qs + head * stride_qh)[:, None] + dims[None, :] * stride_qd, mask=inside, other=0.0)
    do_at = DO + (row * stride_os + head * stride_oh)[:, None] + dims[None, :] * stride_od
    do = tl.load(do_at, mask=inside, other=0.0).to(q.dtype)
    at = (item.to(tl.int64) * (G * REPEAT) + head) * S + row
    lse = tl.load(LSE + at, mask=valid, other=-float("inf"))
    # exp2(score - 1e30) is 0 in rows that see no key of this block.
    lse = tl.where((low < high) & (lse > LOWEST), lse * LOG2_E, -LOWEST)
    delta = tl.load(DELTA + at, mask=valid, other=0.0)
    K += item.to(tl.int64) * stride_kb + group.to(tl.int64) * stride_kh
    V += item.to(tl.int64) * stride_vb + group.to(tl.int64) * stride_vh
    start, full_start, full_stop, stop = _part_of_hull(low, high, T, part, PARTS, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    edges = start, full_start, full_stop, stop
    for i in tl.static_range(3):
        dq = _add_to_dq(
            dq, q, do, lse, delta, K, V, edges[i], edges[i + 1], low, high, stop, scale * LOG2_E, stride_kn, stride_kd,
            stride_vn, stride_vd, D, BLOCK_D, BLOCK_N, i != 1, PRECISION,
        )  # fmt: skip
    out = ((part * B + item).to(tl.int64) * (G * REPEAT) + head) * S + row
    tl.store(DQ + out[:, None] * D + dims[None, :], dq * scale, mask=inside)


@triton.jit
def _add_to_dk_dv(
    dk, dv, k, v, Q, DO, LSE, DELTA, LOW, HIGH, start, stop, first_key, S, T, scale,
    stride_qh, stride_qs, stride_qd, stride_oh, stride_os, stride_od,
    REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BORDER: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the folded rows from start to stop to dk (without the factor of the scores) and dv of a tile of keys."""
    offsets, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    keys = first_key + tl.arange(0, BLOCK_N)
    for first in range(start, stop, BLOCK_M):
        folded = first + offsets
        row, head = (folded // REPEAT).to(tl.int64), (folded % REPEAT).to(tl.int64)
        valid = folded < stop
        inside = valid[:, None] & (dims < D)[None, :]
        q_at = Q + (row * stride_qs + head * stride_qh)[:, None] + dims[None, :] * stride_qd
        q = tl.load(q_at, mask=inside, other=0.0)
        do_at = DO + (row * stride_os + head * stride_oh)[:, None] + dims[None, :] * stride_od
        do = tl.load(do_at, mask=inside, other=0.0).to(q.dtype)
        lse = tl.load(LSE + head * S + row, mask=valid, other=-float("inf"))
        lse = tl.where(lse > LOWEST, lse * LOG2_E, -LOWEST)
        delta = tl.load(DELTA + head * S + row, mask=valid, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
        if BORDER:
            low, high = _intervals(row, LOW, HIGH, S, T, MASKED)
            p = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize_on_alignment=["LOW", "HIGH"], do_not_specialize=["S", "T", "stride_interval"])
def backward_dk_dv(
    DO, Q, K, V, LOW, HIGH, LSE, DELTA, DK, DV, scale,
    stride_ob, stride_oh, stride_os, stride_od, stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd, stride_interval, B, G, S, T,
    REPEAT: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv (B, G, T, D) of all rows, from merged lse and delta (B, G * REPEAT, S).

    Grid: (tiles of keys, B * G).
    """
    first_key = tl.program_id(0) * BLOCK_N
    item, group = tl.program_id(1) // G, tl.program_id(1) % G
    last_key = tl.minimum(first_key + BLOCK_N, T)
    keys, dims = first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = (keys < T)[:, None] & (dims < D)[None, :]
    K += item.to(tl.int64) * stride_kb + group.to(tl.int64) * stride_kh
    V += item.to(tl.int64) * stride_vb + group.to(tl.int64) * stride_vh
    key = keys.to(tl.int64)[:, None]
    k = tl.load(K + key * stride_kn + dims[None, :] * stride_kd, mask=inside, other=0.0)
    v = tl.load(V + key * stride_vn + dims[None, :] * stride_vd, mask=inside, other=0.0)
    Q += item.to(tl.int64) * stride_qb + group.to(tl.int64) * REPEAT * stride_qh
    DO += item.to(tl.int64) * stride_ob + group.to(tl.int64) * REPEAT * stride_oh
    LSE += (item.to(tl.int64) * G + group) * REPEAT * S
    DELTA += (item.to(tl.int64) * G + group) * REPEAT * S
    LOW += item.to(tl.int64) * stride_interval
    HIGH += item.to(tl.int64) * stride_interval
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for first_row in range(0, S, ROWS_AT_ONCE):
        row = first_row + tl.arange(0, ROWS_AT_ONCE)
        low, high = _intervals(row, LOW, HIGH, S, T, MASKED)
        some = (low < last_key) & (high > first_key) & (low < high)
        whole = (low <= first_key) & (high >= last_key)
        start = tl.min(tl.where(some, row, S), 0)
        stop = tl.maximum(tl.max(tl.where(some, row + 1, 0), 0), start)
        # The first run of rows that see the whole tile.
        run_start = tl.minimum(tl.min(tl.where(whole, row, S), 0), stop)
        run_stop = tl.maximum(tl.min(tl.where((row >= run_start) & ~(whole), row, stop), 0), run_start)
        # Whole tiles of folded rows, counted from the start.
        start, stop = start * REPEAT, stop * REPEAT
        full_start = tl.minimum(start + tl.cdiv(run_start * REPEAT - start, BLOCK_M) * BLOCK_M, stop)
        full_stop = full_start + tl.maximum(run_stop * REPEAT - full_start, 0) // BLOCK_M * BLOCK_M
        edges = start, full_start, full_stop, stop
        for i in tl.static_range(3):
            dk, dv = _add_to_dk_dv(
                dk, dv, k, v, Q, DO, LSE, DELTA, LOW, HIGH, edges[i], edges[i + 1], first_key, S, T, scale * LOG2_E,
                stride_qh, stride_qs, stride_qd, stride_oh, stride_os, stride_od,
                REPEAT, D, BLOCK_D, BLOCK_M, BLOCK_N, i != 1, MASKED, PRECISION,
            )  # fmt: skip
    out = (((item.to(tl.int64) * G + group) * T) + keys)[:, None] * D + dims[None, :]
    tl.store(DK + out, dk * scale, mask=inside)
    tl.store(DV + out, dv, mask=inside)
