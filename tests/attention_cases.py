"""One distributed attention call as a case: every rank makes its inputs from the seed, runs the call, and reports.

    results = run_nccl_model(n, run_case, case)         # all ranks in this process
    results = ranks(n).run(over_gloo, [case, ...])      # real processes
    assert_exact(case, results)                         # against dense float64 attention
    assert_counted(case, n, results)                    # bytes, against the formulas of `schedules.bytes_sent`

Shapes as everywhere: q (B, H, S, D) with S rows of all ranks, k and v (B or 1, G, T, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_attention import dense_attention, squared_terms
from mllm_seqpar.attention import call_spec, lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import AccumulateDtype, accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.kernels import BlockKernel, FinalRows
from mllm_seqpar.kernels.rectangles import rectangles_of
from mllm_seqpar.masks import BlockMasks, FrameMask, Intervals
from mllm_seqpar.masks.block_masks import text_masks
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, mesh_bytes, ring_bytes, ulysses_bytes
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec, parallel_spec
from mllm_seqpar.sharding import (
    Spans,
    frame_bounds,
    frame_spans,
    in_frame_order,
    padded_length,
    sequence_positions,
    span_length,
    take_spans,
)
from nccl_model import run_nccl_model
from tolerances import EXACT, relative_error

FUNCTIONS = {"lv": lv_xattn, "ring": ring_attention, "mesh": mesh_attention, "ulysses": ulysses_attention}
TILED = ("mesh", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed.

    Attributes:
        op: "lv", "direct" (LV-XAttn among all pairs), "ring", "mesh" or "ulysses" for cross-attention, "causal" for
            text, "joint" for text and frames in one softmax; `by` and `frames_by` are the strategies of the text
            and of the frames in "causal" and "joint".
        rows: query rows of all ranks, before padding.
        frames, tokens: visual keys of all ranks.
        mask: a name of `frame_table`, or None; with `table`, by FrameMask.from_dense instead of intervals.
        frame_layout: how frames map to ranks; "zigzag" is for "joint" only.
        text: a name of `text_limits`; for "causal" and "joint".
        shared_keys: k and v of the frames (for "causal": of the text) have a batch of 1.
        size: factor of q, and so of the logits.
        offset: added to all logits of even rows, subtracted from those of odd rows.
    """

    op: str
    by: str = "ring"
    frames_by: str = "lv-xattn"
    tile: tuple[int, int] | None = None
    rows: int = 12
    batch: int = 1
    shared_keys: bool = False
    heads: int = 4
    groups: int = 2
    dim: int = 8
    frames: int = 7
    tokens: int = 3
    mask: str | None = None
    table: bool = False
    layout: str = "zigzag"
    frame_layout: str = "contiguous"
    text: str = "plain"
    size: float = 1.0
    offset: float = 0.0
    dtype: torch.dtype = torch.float32
    accumulate: AccumulateDtype = "auto"
    kernel: str = "auto"
    overlap: bool = True
    seed: int = 0

    def total(self, n: int) -> int:
        return padded_length(self.rows, n, self.layout)


def frame_table(case: Case, rows: int) -> tuple[Tensor, Tensor] | Tensor:
    """(first, stop), each (B, rows), or a table (B, rows, F), by the name in `case.mask`."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(case.seed + 7)

    shape, frames = (case.batch, rows), case.frames
    row, frame, item = torch.arange(rows).expand(shape), torch.arange(frames), torch.arange(case.batch)[:, None]
    zero, few = torch.zeros_like(row), max(1, frames // 8)
    random = torch.rand(*shape, frames, generator=generator())
    far = (row + 2 * rows // 3) % rows * frames // rows
    tables: dict[str | None, Any] = {
        # about a third of the rows attend to nothing
        "random": torch.randint(0, frames + 1, (2, *shape), generator=generator()).unbind(),
        "growing": (zero, row * (frames + 1) // rows),
        "one frame": (row % frames, row % frames + 1),  # visible on one rank only
        "first frame": (zero, zero + 1),  # all ranks but the first have no visible key
        "last frame": (zero + frames - 1, zero + frames),
        "all": (zero, zero + frames),
        # each sample attends to its own frames, in one list of all
        "own sample": (zero + item * frames // case.batch, zero + (item + 1) * frames // case.batch),
        "same place": (row * frames // rows, row * frames // rows + 1),  # early rows attend to early frames
        "nothing": (zero, zero),
        "some rows": (zero, torch.where(row < rows // 3, frames, 0)),  # only rows of one rank attend to anything
        "holes": random < 0.5,
        "all but one": frame != (row % frames)[..., None],  # a key of every rank with two frames: no pair is empty
        # scattered frames, almost the same for neighbouring rows
        "every third frame": (frame % 3 == item[..., None] % 3) & (random < 0.95),
        # one frame of the other half; every fifth row attends to nothing
        "far frame": (far, torch.where(row % 5 == 0, 0, far + 1)),
        # the first sample attends to the first frames, others to the rest
        "one sample in one place": (zero + (item > 0) * few, torch.where(item == 0, few, zero + frames)),
    }
    return tables[case.mask]


def frame_mask(case: Case, total: int, rows: Tensor) -> FrameMask | None:
    """The mask of the given rows; rows from `case.rows` on are padding that attends to nothing."""
    if case.mask is None:
        return None
    table = frame_table(case, total)
    if case.table or isinstance(table, Tensor):
        return FrameMask.from_dense(visible_frames(case, total)[:, rows, :: case.tokens], case.tokens)
    first, stop = table[0], torch.where(torch.arange(total) < case.rows, table[1], 0)
    return FrameMask.from_intervals(first[:, rows], stop[:, rows], case.tokens, case.frames)


def visible_frames(case: Case, total: int) -> Tensor | None:
    """(B, rows, keys) bool, by definition."""
    if case.mask is None:
        return None
    table, frame = frame_table(case, total), torch.arange(case.frames)
    if not isinstance(table, Tensor):
        table = (frame >= table[0][..., None]) & (frame < table[1][..., None])
    return (table & (torch.arange(total) < case.rows)[:, None]).repeat_interleave(case.tokens, -1)


def text_limits(case: Case, total: int) -> tuple[Tensor | None, Tensor | None]:
    """(first, valid) of `text_masks` by the name in `case.text`; padding is not valid."""
    position = torch.arange(total)
    real = position < case.rows
    valid = None if bool(real.all()) else real[None]
    # on the right, by a different length per sample; the last has one token
    lengths = torch.linspace(case.rows, 1, case.batch + 1).long()[1:, None]
    starts = torch.arange(1, case.batch + 1)[:, None] * case.rows // (case.batch + 2)
    return {
        "plain": (None, valid),
        "window": ((position - 2).clamp(min=0)[None], valid),
        "packed": (torch.where(position < total // 3, 0, total // 3)[None], valid),
        "padded": (None, position < lengths),
        "padded left": (None, (position >= starts) & real),  # the first rows attend to nothing
    }[case.text]


def visible_text(batch: int, total: int, first: Tensor | None, valid: Tensor | None) -> Tensor:
    """(B, rows, rows) bool, by definition."""
    position = torch.arange(total)
    visible = (position <= position[:, None]).expand(batch, -1, -1)
    if first is not None:
        visible = visible & (position >= first[..., None])
    return visible if valid is None else visible & valid[:, None]


def inputs(case: Case, total: int) -> dict[str, Tensor]:
    """q, do (B, H, total, D); k, v over frames; text_k, text_v (B, G, total, D)."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    rows = (case.batch, case.heads, total, case.dim)
    keys = (1 if case.shared_keys else case.batch, case.groups, case.frames * case.tokens, case.dim)
    made = {"q": normal(*rows) * case.size, "do": normal(*rows), "k": normal(*keys), "v": normal(*keys)}
    text = (1 if case.shared_keys and case.op == "causal" else case.batch, case.groups, total, case.dim)
    made |= {"text_k": normal(*text), "text_v": normal(*text)}
    if case.offset:
        made["k"][..., 0] = made["text_k"][..., 0] = 1.0
        made["q"][..., 0] = case.offset * case.dim**0.5 * (1 - 2 * (torch.arange(total) % 2))
    return made


def key_spans(case: Case, n: int) -> list[Spans]:
    """The keys of every rank."""
    by_rank = frame_spans(case.frames, n, case.frame_layout)
    return [tuple((start * case.tokens, stop * case.tokens) for start, stop in spans) for spans in by_rank]


def run_case(comm: Communicator, case: Case) -> dict[str, Any]:
    """This rank's o, lse, dq (its rows, in the order of the layout), dk, dv (its keys), text_dk, text_dv, and bytes."""
    total = case.total(comm.size)
    whole = inputs(case, total)
    rows = sequence_positions(total, comm.rank, comm.size, case.layout)
    keys = key_spans(case, comm.size)[comm.rank]
    own = {name: whole[name][:, :, rows] for name in ("q", "do", "text_k", "text_v")}
    own |= {name: take_spans(whole[name], keys, dim=2) for name in ("k", "v")}
    mask = frame_mask(case, total, rows)
    leaves = {name: x.clone().requires_grad_() for name, x in own.items() if name != "do"}
    comm.bytes.reset()
    o, lse = _call(comm, case, leaves, mask, total)
    forward = dict(comm.bytes.sent)
    comm.bytes.reset()
    o.backward(own["do"])
    grads = {f"{name[:-1]}d{name[-1]}": x.grad for name, x in leaves.items()}
    return {"o": o.detach(), "lse": lse, **grads, "forward": forward, "backward": dict(comm.bytes.sent)}


def _call(
    comm: Communicator, case: Case, x: dict[str, Tensor], mask: FrameMask | None, total: int
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"group": comm, "kernel": case.kernel, "overlap": case.overlap, "return_lse": True}
    options |= {"accumulate_dtype": case.accumulate}
    name = case.by if case.op == "causal" else case.op
    if name in TILED:
        options["tile"] = case.tile
    if case.op in FUNCTIONS:
        return FUNCTIONS[name](x["q"], x["k"], x["v"], mask=mask, **options)
    if case.op == "causal" and case.text == "plain" and total == case.rows:
        return FUNCTIONS[name](x["q"], x["text_k"], x["text_v"], causal=True, layout=case.layout, **options)
    n, dtype = comm.size, accumulation(case.accumulate, case.dtype)
    attention: Any = {"rows": "sharded", "comm": comm, "scale": case.dim**-0.5, "kernel": case.kernel}
    if case.op == "direct":
        lengths = tuple(map(span_length, key_spans(case, n)))
        full = BlockMasks.full(case.batch, total // n, lengths)
        problem = problem_of(x["q"].shape, x["k"].shape, lengths, case.dtype, case.accumulate)
        spec = call_spec_for(ParallelSpec("lv-xattn", (n, 1), all_pairs=True), full, problem, dtype, case.overlap)
        return attend(x["q"], [[GivenKeys(spec, x["k"], x["v"])]], **attention)[0]
    first, valid = text_limits(case, total)
    text = text_masks([sequence_positions(total, rank, n, case.layout) for rank in range(n)], first, valid)

    def source(strategy: str, blocks: BlockMasks, lengths: tuple[int, ...], k: Tensor, v: Tensor) -> GivenKeys:
        problem = problem_of(x["q"].shape, k.shape, lengths, case.dtype, case.accumulate)
        tile = case.tile if strategy in TILED else None
        spec = parallel_spec(strategy, tile, problem)
        return GivenKeys(call_spec_for(spec, blocks, problem, dtype, case.overlap), k, v)

    sources = [source(case.by, text, (total // n,) * n, x["text_k"], x["text_v"])]
    if case.op == "joint":
        lengths = tuple(map(span_length, key_spans(case, n)))
        full = BlockMasks.full(case.batch, total // n, lengths)
        spans = frame_spans(case.frames, n, case.frame_layout)
        blocks = full if mask is None else mask.blocks(comm, spans, layers=case.frames)
        sources.insert(0, source(case.frames_by, blocks, lengths, x["k"], x["v"]))
    return attend(x["q"], [sources], **attention)[0]


def computed_entries(q: Tensor, k: Tensor, intervals: Intervals | None) -> int:
    """Return the score entries that the CPU's kernel computes for a block, for one head."""
    if intervals is None:
        return q.shape[0] * q.shape[2] * k.shape[2]
    entries = 0
    for rectangle in rectangles_of(intervals):
        rows, keys = (x.stop - x.start for x in (rectangle.rows, rectangle.keys))
        items = q.shape[0] if rectangle.batch == slice(None) else 1
        entries += items * (rows * (rows + 1) // 2 if rectangle.kind == "causal" else rows * keys)
    return entries


class _CountedKernel:
    """A block kernel that passes the score entries that a call computes, and its direction, to `add`."""

    call_entries = 0  # otherwise small calls with many holes are one

    def __init__(self, kernel: BlockKernel, add: Callable[[int, str], None]) -> None:
        self._kernel, self._add = kernel, add

    def forward(self, q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
        self._add(computed_entries(q, k, options["intervals"]), "forward")
        return self._kernel.forward(q, k, *args, **options)

    def backward(self, rows: FinalRows, k: Tensor, *args: Any, **options: Any) -> Any:
        self._add(computed_entries(rows.q, k, options["intervals"]), "backward")
        return self._kernel.backward(rows, k, *args, **options)


def count_entries(monkeypatch: pytest.MonkeyPatch, add: Callable[[int, str], None]) -> None:
    """Pass the score entries of every block that is computed on the CPU, and the direction, to `add`."""
    choose = call_spec.choose_kernel

    def counted(*args: Any) -> tuple[Any, str]:
        kernel, reason = choose(*args)
        return _CountedKernel(kernel, add), reason

    monkeypatch.setattr(call_spec, "choose_kernel", counted)


def over_gloo(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """`run_case` for several cases, for `ranks(n).run`."""
    comm = as_communicator(None)
    return [run_case(comm, case) for case in cases]


def exact(case: Case, n: int) -> dict[str, Tensor]:
    """The results of one dense float64 attention; "terms o" and so on: the size of the terms that each sums."""
    op = case.op if case.op in ("causal", "joint") else "lv"
    how: dict[str, Any] = {"by": "ring", "frames_by": "lv-xattn", "tile": None, "frame_layout": "contiguous"}
    how |= {"table": False, "kernel": "auto", "accumulate": "auto", "overlap": True, "layout": "zigzag"}
    return _exact(replace(case, op=op, **how), case.total(n))  # none of which changes the result


@cache
def _exact(case: Case, total: int) -> dict[str, Tensor]:
    x = {name: t.double().requires_grad_() for name, t in inputs(case, total).items()}
    seen = visible_frames(case, total)
    text = ["text_k", "text_v"]
    names = {"causal": [text], "joint": [["k", "v"], text]}.get(case.op, [["k", "v"]])
    k, v = (torch.cat([x[pair[i]].expand(case.batch, -1, -1, -1) for pair in names], dim=2) for i in (0, 1))
    everything = torch.ones(case.batch, total, case.frames * case.tokens, dtype=torch.bool)
    parts = [everything if seen is None else seen, visible_text(case.batch, total, *text_limits(case, total))]
    visible = torch.cat({"causal": parts[1:], "joint": parts}.get(case.op, parts[:1]), dim=-1)
    o, lse = dense_attention(x["q"], k, v, visible, case.dim**-0.5)
    o.backward(x["do"].detach())
    found = {"o": o.detach(), "lse": lse.detach(), "dq": x["q"].grad}
    found |= {f"{p}d{t}": x[f"{p}{t}"].grad for p in ("", "text_") for t in "kv" if x[f"{p}{t}"].grad is not None}
    with torch.no_grad():
        terms = squared_terms(x["q"], k, v, x["do"], visible, case.dim**-0.5)
    lengths = [x[pair[0]].shape[2] for pair in names]
    for name in ("dk", "dv"):
        pieces = terms.pop(name).split(lengths, dim=-1)
        terms |= {pair[0].replace("k", name): piece for pair, piece in zip(names, pieces, strict=True)}
    return found | {f"terms {name}": x.sum().sqrt() for name, x in terms.items()}


def assemble(case: Case, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' results as whole tensors in the original order."""
    n = len(results)
    order = torch.cat([sequence_positions(case.total(n), rank, n, case.layout) for rank in range(n)]).argsort()
    names = [name for name, x in results[0].items() if isinstance(x, Tensor)]
    keys = key_spans(case, n)
    whole = {name: [result[name] for result in results] for name in names}
    return {
        name: in_frame_order(parts, keys, dim=2) if name in ("dk", "dv") else torch.cat(parts, dim=2)[:, :, order]
        for name, parts in whole.items()
    }


def errors(case: Case, results: list[dict[str, Any]]) -> dict[str, float]:
    """Relative error to float64 of o, lse and every gradient; exact zeros and -inf in rows without visible keys."""
    reference, found = exact(case, len(results)), assemble(case, results)
    wanted = {name for name in reference if not name.startswith("terms ")}
    assert wanted == set(found), (wanted, set(found))
    for name, x in found.items():
        assert not x.isnan().any(), f"{name} has NaN: {case}"
        assert x.shape == reference[name].shape, name
    empty = reference["lse"] == float("-inf")
    assert torch.equal(found["lse"] == float("-inf"), empty), f"rows without visible keys: {case}"
    for name in ("o", "dq"):
        assert not found[name][empty].any(), f"{name} of a row without visible keys must be 0: {case}"
    return {
        name: relative_error(*((x[~empty] if name == "lse" else x) for x in pair), reference[f"terms {name}"])
        for name, pair in ((name, (found[name], reference[name])) for name in wanted)
    }


def assert_exact(case: Case, results: list[dict[str, Any]]) -> None:
    for name, error in errors(case, results).items():
        assert error <= EXACT[case.dtype], f"{name} is off by {error:.1e} with {len(results)} ranks: {case}"


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


@cache
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


def has_formula(case: Case, n: int) -> bool:
    """Whether `expected_bytes` knows the case: no mesh shape that is chosen, no rows that a hybrid prunes."""
    if case.op == "joint" or (case.op == "causal" and (case.text != "plain" or case.shared_keys)):
        return False
    if "mesh" in (case.op, case.by):
        return case.tile is not None
    return case.op != "ulysses" or case.tile is None or case.mask is None or not case.tile[0] > 1 == case.tile[1]


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


def check(n: int, case: Case | None = None, **options: Any) -> list[dict[str, Any]]:
    """Assert that a case is exact on n ranks over the model of NCCL and sends the bytes of the formulas.

    Returns:
        the results of the ranks.
    """
    case = case or Case(**options)
    results = run_nccl_model(n, run_case, case)
    assert_exact(case, results)
    if has_formula(case, n):
        assert_counted(case, n, results)
    return results


def same_bits(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Whether two runs gave the same bits on every rank."""
    pairs = [(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


_MASKED: dict[str, Any] = {"mask": "growing", "batch": 2, "layout": "contiguous"}
_SHARED: dict[str, Any] = {"batch": 2, "shared_keys": True}
OVER_TRANSPORTS: list[tuple[tuple[int, ...], Case]] = [
    ((2, 3, 4), Case(op="lv", rows=24)),
    ((2, 3, 4), Case(op="lv", rows=24, mask="far frame", **_SHARED)),  # rows are sent point to point
    ((3, 4), Case(op="lv", rows=24, mask="some rows", frames=2)),  # some ranks have no frames, some post nothing
    ((2, 3, 4), Case(op="ring", rows=24, **_MASKED)),
    ((2, 3, 4), Case(op="causal", rows=19, batch=2, text="padded left")),
    ((3,), Case(op="causal", rows=1)),  # text shorter than the group
    ((4, 6), Case(op="mesh", rows=24, tile=None, **_MASKED)),
    ((4,), Case(op="mesh", rows=24, tile=(2, 2))),
    ((3,), Case(op="causal", by="mesh", layout="striped", rows=24, batch=2)),
    ((6,), Case(op="causal", by="mesh", tile=(3, 2), rows=24)),
    ((2, 3, 4), Case(op="ulysses", rows=24, heads=12, groups=2, **_MASKED)),
    ((4,), Case(op="causal", by="ulysses", tile=(2, 1), rows=24)),
    ((4,), Case(op="ulysses", tile=(1, 2), rows=24, mask="random")),
    ((2, 3, 4), Case(op="joint", rows=19, **_MASKED)),
    ((4,), Case(op="joint", by="ulysses", frames_by="lv-xattn", rows=19, mask="one frame")),
    ((3,), Case(op="joint", by="ulysses", frames_by="lv-xattn", heads=12, mask="holes", text="padded left", batch=2)),
]
"""Every kind of schedule, with the numbers of ranks on which the transports run it."""
