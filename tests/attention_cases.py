"""One distributed attention call as a case: every rank makes its inputs from the seed, runs the call, and reports.

    results = run_loopback(n, run_case, case)           # all ranks in this process
    results = ranks(n).run(over_gloo, [case, ...])      # real processes
    assert_exact(case, results)

Shapes as everywhere: q (B, H, S, D) with S rows of all ranks, k and v (B or 1, G, T, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dense_attention import dense_attention, squared_terms
from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.attention.call_spec import accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.joint import attend
from mllm_seqpar.attention.kv_sources import GivenKV
from mllm_seqpar.comm import Communicator, LoopbackCommunicator, as_communicator
from mllm_seqpar.masks import BlockMasks, CausalBlockMasks, FrameMask, FullBlockMasks
from mllm_seqpar.sharding import frame_bounds, frame_range, padded_length, sequence_positions
from strict_loopback import StrictLoopback
from tolerances import EXACT, relative_error

GRADS = ("dq", "dk", "dv")
TILED = {"mesh": mesh_attention, "ulysses": ulysses_attention}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed.

    Attributes:
        op: "lv", "ring", "mesh" or "ulysses" for cross-attention, "causal" for text, "joint" for text and frames in one
            softmax.
        by: the strategy of the text, for "causal" and "joint".
        frames_by: the strategy of the frames, for "joint".
        tile: for strategies with a mesh shape.
        rows: query rows of all ranks, before padding.
        frames, tokens: visual keys of all ranks.
        mask: a name of `frame_table`, or None; with `table`, by FrameMask.from_dense instead of intervals.
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
    text: str = "plain"
    size: float = 1.0
    offset: float = 0.0
    dtype: torch.dtype = torch.float32
    accumulate: torch.dtype | None = torch.float32
    kernel: str = "auto"
    overlap: bool = True
    seed: int = 0

    def total(self, n: int) -> int:
        return padded_length(self.rows, n, self.layout)


def frame_table(case: Case, rows: int) -> tuple[Tensor, Tensor] | Tensor:
    """(first, stop), each (B, rows), or a table (B, rows, F), by the name in `case.mask`."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    shape, frames = (case.batch, rows), case.frames
    row = torch.arange(rows).expand(shape)
    zero = torch.zeros(shape, dtype=torch.int64)
    match case.mask:
        case "random":  # about a third of the rows attend to nothing
            return (
                torch.randint(0, frames + 1, shape, generator=generator),
                torch.randint(0, frames + 1, shape, generator=generator),
            )
        case "growing":
            return zero, row * (frames + 1) // rows
        case "one frame":  # visible on one rank only
            return row % frames, row % frames + 1
        case "first frame":  # all ranks but the first have no visible key
            return zero, zero + 1
        case "last frame":
            return zero + frames - 1, zero + frames
        case "all":
            return zero, zero + frames
        case "own sample":  # each sample attends to its own frames, in one list of all
            item = torch.arange(case.batch)[:, None]
            return zero + item * frames // case.batch, zero + (item + 1) * frames // case.batch
        case "same place":  # early rows attend to early frames
            return row * frames // rows, row * frames // rows + 1
        case "nothing":
            return zero, zero
        case "some rows":  # only rows of one rank attend to anything
            return zero, torch.where(row < rows // 3, frames, 0)
        case "holes":
            return torch.rand(*shape, frames, generator=generator) < 0.5
        case "all but one":  # a key of every rank with two frames: no pair is empty
            return torch.arange(frames) != (row % frames)[..., None]
        case "every third frame":  # scattered frames, almost the same for neighbouring rows
            third = torch.arange(frames) % 3 == torch.arange(case.batch)[:, None, None] % 3
            return third & (torch.rand(*shape, frames, generator=generator) < 0.95)
        case "far frame":  # one frame of the other half; every fifth row attends to nothing
            first = (row + 2 * rows // 3) % rows * frames // rows
            return first, torch.where(row % 5 == 0, 0, first + 1)
        case "one sample in one place":  # the first sample attends to the first frames, others to the rest
            item = torch.arange(case.batch)[:, None]
            few = max(1, frames // 8)
            return zero + (item > 0) * few, torch.where(item == 0, few, zero + frames)
    raise ValueError(case.mask)


def frame_mask(case: Case, total: int, rows: Tensor) -> FrameMask | None:
    """The mask of the given rows; rows from `case.rows` on are padding that attends to nothing."""
    if case.mask is None:
        return None
    table = frame_table(case, total)
    real = torch.arange(total) < case.rows
    if isinstance(table, Tensor):
        return FrameMask.from_dense((table & real[:, None])[:, rows], case.tokens)
    first, stop = table[0], torch.where(real, table[1], 0)
    if case.table:
        frame = torch.arange(case.frames)
        return FrameMask.from_dense(((frame >= first[..., None]) & (frame < stop[..., None]))[:, rows], case.tokens)
    return FrameMask.from_intervals(first[:, rows], stop[:, rows], case.tokens, case.frames)


def visible_frames(case: Case, total: int) -> Tensor | None:
    """(B, rows, keys) bool, by definition."""
    mask = frame_mask(case, total, torch.arange(total))
    if mask is None:
        return None
    if mask.visible is not None:
        table = mask.visible
    else:
        frame = torch.arange(case.frames)
        table = (frame >= mask.bounds[0][..., None]) & (frame < mask.bounds[1][..., None])
    return table.repeat_interleave(case.tokens, -1)


def text_limits(case: Case, total: int) -> tuple[Tensor | None, Tensor | None]:
    """(first, valid) of CausalBlockMasks by the name in `case.text`; padding is not valid."""
    position = torch.arange(total)
    real = position < case.rows
    valid = None if bool(real.all()) else real[None]
    match case.text:
        case "plain":
            return None, valid
        case "window":
            return (position - 2).clamp(min=0)[None], valid
        case "packed":
            return torch.where(position < total // 3, 0, total // 3)[None], valid
        case "padded":  # on the right, by a different length per sample; the last has one token
            lengths = torch.linspace(case.rows, 1, case.batch + 1).long()[1:]
            return None, position < lengths[:, None]
        case "padded left":  # the first rows attend to nothing
            starts = torch.arange(1, case.batch + 1) * case.rows // (case.batch + 2)
            return None, (position >= starts[:, None]) & real
    raise ValueError(case.text)


def visible_text(case: Case, total: int) -> Tensor:
    """(B, rows, rows) bool, by definition."""
    position = torch.arange(total)
    visible = (position <= position[:, None]).expand(case.batch, -1, -1)
    first, valid = text_limits(case, total)
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


def run_case(comm: Communicator, case: Case, again: int = 1) -> dict[str, Any]:
    """This rank's o, lse, dq (its rows, in the order of the layout), dk, dv (its keys), text_dk, text_dv, and bytes."""
    if isinstance(comm, LoopbackCommunicator):
        comm = StrictLoopback(comm)
    total = case.total(comm.size)
    whole = inputs(case, total)
    rows = sequence_positions(total, comm.rank, comm.size, case.layout)
    frames = frame_range(case.frames, comm)
    keys = slice(frames.start * case.tokens, frames.stop * case.tokens)
    own = {name: whole[name][:, :, rows] for name in ("q", "do", "text_k", "text_v")}
    own |= {name: whole[name][:, :, keys] for name in ("k", "v")}
    mask = frame_mask(case, total, rows)
    for _ in range(again):
        leaves = {name: x.clone().requires_grad_() for name, x in own.items() if name != "do"}
        comm.bytes.reset()
        o, lse = _call(comm, case, leaves, mask, total)
        forward = dict(comm.bytes.sent)
        comm.bytes.reset()
        o.backward(own["do"])
    grads = {
        {"q": "dq", "k": "dk", "v": "dv", "text_k": "text_dk", "text_v": "text_dv"}[n]: x.grad
        for n, x in leaves.items()
    }
    return {"o": o.detach(), "lse": lse, **grads, "forward": forward, "backward": dict(comm.bytes.sent)}


def _call(
    comm: Communicator, case: Case, x: dict[str, Tensor], mask: FrameMask | None, total: int
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {
        "group": comm,
        "kernel": case.kernel,
        "overlap": case.overlap,
        "accumulate_dtype": case.accumulate,
        "return_lse": True,
    }
    if case.op == "lv":
        return lv_xattn(x["q"], x["k"], x["v"], mask=mask, **options)
    if case.op == "ring":
        return ring_attention(x["q"], x["k"], x["v"], mask=mask, **options)
    if case.op in TILED:
        return TILED[case.op](x["q"], x["k"], x["v"], mask=mask, tile=case.tile, **options)
    if case.op == "causal" and case.text == "plain" and total == case.rows:
        options |= {"causal": True, "layout": case.layout}
        if case.by in TILED:
            return TILED[case.by](x["q"], x["text_k"], x["text_v"], tile=case.tile, **options)
        return ring_attention(x["q"], x["text_k"], x["text_v"], **options)
    n, dtype = comm.size, accumulation(case.accumulate, case.dtype)
    first, valid = text_limits(case, total)
    text = CausalBlockMasks(case.batch, total, n, case.layout, first, valid)

    def source(strategy: str, blocks: BlockMasks, lengths: tuple[int, ...], k: Tensor, v: Tensor) -> GivenKV:
        problem = problem_of(x["q"].shape, k.shape, lengths, case.dtype, case.accumulate)
        tile = case.tile if strategy in TILED else None
        return GivenKV(call_spec_for(strategy, tile, blocks, problem, dtype, case.overlap), k, v)

    sources = [source(case.by, text, (total // n,) * n, x["text_k"], x["text_v"])]
    if case.op == "joint":
        bounds = frame_bounds(case.frames, n)
        lengths = tuple((stop - start) * case.tokens for start, stop in bounds)
        full = FullBlockMasks(case.batch, total // n, lengths)
        blocks = full if mask is None else mask.blocks(comm, bounds)
        sources.insert(0, source(case.frames_by, blocks, lengths, x["k"], x["v"]))
    return attend(x["q"], sources, comm=comm, scale=case.dim**-0.5, kernel=case.kernel)


def over_gloo(rank: int, world: int, cases: list[Case], again: int = 1) -> list[dict[str, Any]]:
    """`run_case` for several cases, for `ranks(n).run`."""
    comm = as_communicator(None)
    return [run_case(comm, case, again) for case in cases]


@cache
def exact(case: Case, n: int) -> dict[str, Tensor]:
    """The results of one dense float64 attention; "terms o" and so on: the size of the terms that each sums."""
    total = case.total(n)
    x = {name: t.double().requires_grad_() for name, t in inputs(case, total).items()}
    seen = visible_frames(case, total)
    text = ["text_k", "text_v"]
    names = {"causal": [text], "joint": [["k", "v"], text]}.get(case.op, [["k", "v"]])
    k, v = (torch.cat([x[pair[i]].expand(case.batch, -1, -1, -1) for pair in names], dim=2) for i in (0, 1))
    parts = []
    if ["k", "v"] in names:
        everything = torch.ones(case.batch, total, case.frames * case.tokens, dtype=torch.bool)
        parts.append(everything if seen is None else seen)
    if text in names:
        parts.append(visible_text(case, total))
    o, lse = dense_attention(x["q"], k, v, torch.cat(parts, dim=-1), case.dim**-0.5)
    o.backward(x["do"].detach())
    found = {"o": o.detach(), "lse": lse.detach(), "dq": x["q"].grad}
    found |= {f"{p}d{t}": x[f"{p}{t}"].grad for p in ("", "text_") for t in "kv" if x[f"{p}{t}"].grad is not None}
    with torch.no_grad():
        terms = squared_terms(x["q"], k, v, x["do"], torch.cat(parts, dim=-1), case.dim**-0.5)
    lengths = [x[pair[0]].shape[2] for pair in names]
    for name in ("dk", "dv"):
        pieces = terms.pop(name).split(lengths, dim=-1)
        terms |= {pair[0].replace("k", name): piece for pair, piece in zip(names, pieces, strict=True)}
    return found | {f"terms {name}": x.sum().sqrt() for name, x in terms.items()}


def assemble(case: Case, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' results as whole tensors in the original order."""
    n = len(results)
    total = case.total(n)
    order = torch.cat([sequence_positions(total, rank, n, case.layout) for rank in range(n)]).argsort()
    whole = {}
    for name, x in results[0].items():
        if not isinstance(x, Tensor):
            continue
        parts = torch.cat([result[name] for result in results], dim=2)
        whole[name] = parts if name in ("dk", "dv") else parts[:, :, order]
    return whole


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


def same_bits(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Whether two runs gave the same bits on every rank."""
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(first, second, strict=True)
        for name in a
        if isinstance(a[name], Tensor)
    )
