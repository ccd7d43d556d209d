"""Tiles of the Triton kernel for intervals: time candidates on a GPU, or compile them for one on any machine.

    python scripts/bench/triton_tiles.py [--dims 128] [--rows 1280] [--keys 186624]
    python scripts/bench/triton_tiles.py --compile 9.0 [--dims 64 128 256] [--dtype bfloat16] [--all]

On a GPU, every row has the TFLOP/s of visible work of one candidate under a mask in which rows see earlier frames: 4 D
FLOP for each visible entry and head in forward, 10 D in backward. A candidate replaces the tiles of one program, and
the others keep theirs, so dq and (dk, dv) are compared by the time of a whole backward pass. The best of each belong in
`LAUNCHES` of `mllm_seqpar/kernels/triton_launches.py`. Rows for comparison: the kernel and cuDNN without a mask (all
work is visible); the mask in groups of rows, of which cuDNN computes the keys that all rows see and the kernel the rest
("split"); and FlexAttention, compiled for the same mask, with the gradients of its own output.

With --compile, the compiler of Triton's package compiles for a compute capability without a GPU. The rows have the
shared memory of a program, its registers, and the bytes that each thread spills; --all compiles the candidates too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import report
import torch
from harness import Row
from kernels import operands
from torch import Tensor

from mllm_seqpar.kernels import FinalRows, kernel_by_name, triton_launches
from mllm_seqpar.kernels.base import merge_
from mllm_seqpar.kernels.triton_launches import SHARED_MEMORY, Launch, Tiles, launch_of, padded, rows_at_once
from mllm_seqpar.masks import Intervals

CANDIDATES = {
    64: Launch(
        [Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3)],
        [Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 2)],
        [Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 3)],
    ),
    128: Launch(
        [Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 4), Tiles(64, 64, 4, 3)],
        [Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3)],
        [Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 3), Tiles(32, 128, 8, 3)],
    ),
    256: Launch([Tiles(64, 64, 4, 2)], [Tiles(64, 32, 8, 2)], [Tiles(32, 64, 8, 1)]),
}
"""What is tried besides the default, by padded head dim."""
PROGRAMS = {"forward": "forward", "dq": "backward_dq", "dk_dv": "backward_dk_dv"}
HEADS, GROUPS = 28, 4


def main(argv: list[str] | None = None) -> None:
    harness.run(parse(argv), rows_of, table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[128], help="head dims")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, default=1280, help="query rows")
    parser.add_argument("--keys", type=int, default=186624)
    parser.add_argument("--compile", help="a compute capability, such as 9.0: compile only")
    parser.add_argument("--all", action="store_true", help="with --compile: the candidates too")
    args = parser.parse_args(argv)
    if args.compile is None and args.device != "cuda":
        parser.error("there is no GPU; pass --compile 9.0 to compile without one")
    return args


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    for dim in args.dims:
        yield from compiled(args, dim) if args.compile else timed(args, dim)


def table(rows: list[Row]) -> str:
    columns = {"head dim": "dim", "program": "program", "rows, keys, warps, stages": "tiles"}
    columns |= {"shared KiB": "shared_kib .1f", "of": "limit_kib", "registers": "registers", "stack": "stack"}
    columns |= {"forward TFLOP/s": "forward .0f", "backward TFLOP/s": "backward .0f"}
    return report.table(rows, columns | {"problem": "problem"})


def timed(args: argparse.Namespace, dim: int) -> Iterator[Row]:
    """Yield the rates of the default tiles, of each candidate, and of kernels to compare with."""
    from triton.testing import do_bench

    dtype, sizes = getattr(torch, args.dtype), (1, HEADS, GROUPS, args.rows, args.keys, dim)
    q, k, v, do = (x.detach() for x in operands(sizes, "cuda", dtype))
    row = torch.arange(args.rows)[None]
    stairs = Intervals(torch.zeros_like(row), (row + 1) * args.keys // args.rows, args.keys)

    def rates(name: str, intervals: Intervals | None) -> Row:
        kernel, scale = kernel_by_name(name), dim**-0.5
        o, lse = kernel.forward(q, k, v, scale=scale, intervals=intervals)
        final = FinalRows(q, o, lse, do).with_delta()
        forward = do_bench(lambda: kernel.forward(q, k, v, scale=scale, intervals=intervals))
        backward = do_bench(lambda: kernel.backward(final, k, v, scale=scale, intervals=intervals))
        units = whole if intervals is None else shown
        return {"forward": 4 * units / forward, "backward": 10 * units / backward}

    work = HEADS * dim / 1e9
    shown, whole = stairs.visible * work, args.rows * args.keys * work
    for title, tiles, run in (
        ("triton_intervals", "default", lambda: rates("triton_intervals", stairs)),
        ("triton_intervals", "no mask", lambda: rates("triton_intervals", None)),
        ("cuda_cudnn", "no mask", lambda: rates("cuda_cudnn", None)),
        *(
            ("split", f"{n} groups", lambda n=n: {"forward": 4 * shown / do_bench(split(q, k, v, stairs, n))})
            for n in (2, 4)
        ),
        ("FlexAttention", "its own", lambda: flex_rates(q, k, v, do, stairs)),
    ):
        try:
            yield {"dim": dim, "program": title, "tiles": tiles, **run()}
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            yield {"dim": dim, "program": title, "tiles": tiles, "problem": str(error)[:80]}
    default = launch_of(dtype, dim, torch.cuda.get_device_capability())
    (key,) = (key for key, launch in triton_launches.LAUNCHES.items() if launch is default)
    for program in PROGRAMS:
        for tiles in getattr(CANDIDATES[max(64, padded(dim))], program):
            triton_launches.LAUNCHES[key] = default._replace(**{program: tiles})
            row_of = {"dim": dim, "program": program, "tiles": tuple(tiles)}
            try:
                yield row_of | rates("triton_intervals", stairs)
            except Exception as error:  # noqa: BLE001 - too much shared memory, among others
                yield row_of | {"problem": str(error)[:80]}
            finally:
                triton_launches.LAUNCHES[key] = default


def split(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, groups: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function for the forward pass in groups of rows: the keys that all of its rows see, and the border."""
    full, border, scale = kernel_by_name("cuda_cudnn"), kernel_by_name("triton_intervals"), q.shape[3] ** -0.5
    low, high, count = intervals.low.clone(), intervals.high, q.shape[2] // groups
    parts = [(slice(i * count, (i + 1) * count), int(high[:, i * count])) for i in range(groups)]
    for rows, stop in parts:  # the intervals start at key 0 and grow
        low[:, rows] = stop
    rest = Intervals(low, high, intervals.keys)

    def run() -> tuple[Tensor, Tensor]:
        o, lse = border.forward(q, k, v, scale=scale, intervals=rest)
        for rows, stop in parts:
            part = full.forward(q[:, :, rows], k[:, :, :stop], v[:, :, :stop], scale=scale)
            merge_(o[:, :, rows], lse[:, :, rows], *part)
        return o, lse

    return run


def flex_rates(q: Tensor, k: Tensor, v: Tensor, do: Tensor, intervals: Intervals) -> Row:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from triton.testing import do_bench

    low, high = intervals.on(q.device)

    def visible(item: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= low[0, row]) & (key < high[0, row])

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device, _compile=True)
    attend = torch.compile(flex_attention, dynamic=False)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, block_mask=mask, enable_gqa=True)
    backward = do_bench(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
    with torch.no_grad():
        forward = do_bench(lambda: attend(q, k, v, block_mask=mask, enable_gqa=True))
    work = intervals.visible * q.shape[1] * q.shape[3] / 1e9
    return {"forward": 4 * work / forward, "backward": 10 * work / backward}


def compiled(args: argparse.Namespace, dim: int) -> Iterator[Row]:
    """Yield what the programs of the default tiles, or of all candidates, need of a multiprocessor."""
    os.environ.pop("TRITON_INTERPRET", None)
    dtype, capability = getattr(torch, args.dtype), tuple(map(int, args.compile.split(".")))
    for program in PROGRAMS:
        candidates = [getattr(launch_of(dtype, dim, capability), program)]
        if args.all:
            candidates += getattr(CANDIDATES[max(64, padded(dim))], program)
        for tiles in candidates:
            row = {
                "dim": dim,
                "program": program,
                "tiles": tuple(tiles),
                "limit_kib": SHARED_MEMORY.get(capability, 99),
            }
            try:
                yield row | compile_program(program, tiles, dim, dtype, capability)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises
                yield row | {"problem": str(error)[:80]}


def compile_program(program: str, tiles: Tiles, dim: int, dtype: torch.dtype, capability: tuple[int, ...]) -> Row:
    """Compile one program for grouped heads under a mask."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mllm_seqpar.kernels import triton_kernels

    function = getattr(triton_kernels, PROGRAMS[program])
    number = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    types: dict[str, Any] = dict.fromkeys(("LOW", "HIGH"), "*i32") | dict.fromkeys(("Q", "K", "V", "DO"), f"*{number}")
    types |= dict.fromkeys(("OUT", "LSE", "DELTA", "DQ", "DK", "DV"), "*fp32") | {"scale": "fp32"}
    constants = triton_launches.constants(HEADS // GROUPS, dim, dtype, tiles, masked=True)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    constants |= {"ROWS_AT_ONCE": rows_at_once(HEADS // GROUPS)} | dict.fromkeys(
        ("stride_qd", "stride_kd", "stride_vd", "stride_od"), 1
    )
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if signature[n][0] == "*" or (n.startswith("stride") and n not in constants)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name != "stride_interval"}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    found = triton.compile(ASTSource(function, signature, values, attributes), target=target, options=options)
    row: Row = {"shared_kib": found.metadata.shared / 1024}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(found.asm["cubin"])
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        usage = dict(part.split(":") for part in text.split() if part.startswith(("REG:", "STACK:")))
        row |= {"registers": int(usage["REG"]), "stack": int(usage["STACK"])}
    return row


if __name__ == "__main__":
    main()
