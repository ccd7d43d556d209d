"""Time the block kernels against `scaled_dot_product_attention` on the same shapes.

    python scripts/bench/kernels.py [--device cpu|cuda] [--dtype float32|bfloat16|float16]
        [--kernels blocked_matmul torch_cpu] [--shape B,H,G,S,T,D ...] [--causal] [--repeats 7] [--out rows.jsonl]

For each kernel the table has the medians of forward and backward, their ratios to PyTorch's attention, and the TFLOP/s
(4 B H S T D in forward, 10 B H S T D in backward, half of it with --causal). Results are compared in the same run: a
kernel with different results is reported as wrong and not timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import harness
import report
import torch
from harness import Row
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.errors import ConfigError, first_line
from mllm_seqpar.kernels import FinalRows, available_kernels, choose_kernel
from mllm_seqpar.masks import Intervals

SHAPES = {
    # Cross-attention of mPLUG-Owl3 (1B and 7B) to a video: few text rows, many visual keys.
    "cpu": ["1,14,2,64,8192,64", "1,14,2,512,2048,64", "1,28,4,64,4096,128", "1,8,8,256,4096,64"],
    "cuda": ["1,14,2,1024,65536,64", "1,28,4,1024,65536,128", "1,28,4,4096,4096,128", "1,16,16,2048,16384,128"],
}
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
FLOPS = {"forward": 4, "backward": 10}
"""FLOP per B H S T D."""


def main(argv: list[str] | None = None) -> None:
    harness.run(parse(argv), rows_of, table)


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    for shape in args.shape or SHAPES[args.device]:
        sizes = tuple(map(int, shape.split(",")))
        yield from measure_shape(sizes, args.dtype, args.device, args.kernels, args.causal, args.repeats)


def table(rows: Sequence[Row]) -> str:
    units = {"ms": ("ms", ".2f"), "/ sdpa": ("ratio", ".2f"), "TFLOP/s": ("tflops", ".3f")}
    columns = {"B,H,G,S,T,D": "shape", "kernel": "kernel"}
    columns |= {f"{d}, {unit}": f"{d}_{name} {form}" for unit, (name, form) in units.items() for d in FLOPS}
    return report.table(rows, columns | {"problem": "problem"})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kernels", nargs="*", help="default: all available ones but the reference")
    parser.add_argument("--shape", nargs="*", help="B,H,G,S,T,D; default: four shapes of video cross-attention")
    parser.add_argument("--causal", action="store_true")
    return parser.parse_args(argv)


def measure_shape(
    sizes: tuple[int, ...], dtype: str, device: str, kernels: Sequence[str] | None, causal: bool, repeats: int
) -> list[Row]:
    """Return one row per kernel for one shape (B, H, G, S, T, D), PyTorch's own attention ("sdpa") first.

    A kernel that cannot run or has wrong results gets a row with "problem", and "wrong" if its results are wrong.
    """
    batch, heads, groups, rows, keys, dim = sizes
    sizes = batch, heads, groups, rows, rows if causal else keys, dim
    *leaves, do = operands(sizes, device, getattr(torch, dtype))
    options = {"is_causal": causal, "enable_gqa": heads != groups}
    theirs = passes(partial(F.scaled_dot_product_attention, *leaves, **options), leaves, do)
    runs, expected = {"sdpa": theirs}, [theirs["forward"](), *theirs["backward"]()]
    base = {"shape": ",".join(map(str, sizes)), "dtype": dtype, "causal": causal}
    result = [base | {"kernel": "sdpa"}]
    intervals = Intervals.causal(rows) if causal and rows > 1 else None
    q, k, v = (x.detach() for x in leaves)
    for name in kernels or available_kernels():
        row = base | {"kernel": name}
        try:
            kernel, _ = choose_kernel(name, q, k, intervals)
            forward = partial(kernel.forward, q, k, v, scale=dim**-0.5, intervals=intervals)
            o, lse = forward()
            backward = partial(kernel.backward, FinalRows(q, o, lse, do), k, v, scale=dim**-0.5, intervals=intervals)
            problem = difference((o, *backward()), expected)
            row |= {"problem": problem, "wrong": True} if problem else {}
            runs[name] = {"forward": forward, "backward": backward}
        except ConfigError as error:
            row["problem"] = first_line(error)
        except RuntimeError as error:
            row |= {"problem": first_line(error), "wrong": True}
        result.append(row)
    right = [row for row in result if "problem" not in row]
    both = {(row["kernel"], direction): runs[row["kernel"]][direction] for row in right for direction in FLOPS}
    times = harness.medians_ms(both, device, repeats)
    for row in right:
        row |= rates({d: times[row["kernel"], d] for d in FLOPS}, sizes, 0.5 if causal else 1.0)
        row |= {f"{d}_ratio": times[row["kernel"], d] / times["sdpa", d] for d in FLOPS}
    return result


def operands(sizes: Sequence[int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v, which require gradients, and do, for sizes (B, H, G, S, T, D)."""
    batch, heads, groups, rows, keys, dim = sizes
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, h, length, dim, generator=generator, device=device, dtype=dtype)
        for h, length in ((heads, rows), (groups, keys), (groups, keys), (heads, rows))
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def passes(attend: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the functions to time, forward without a graph."""
    o = attend()
    backward = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    return {"forward": torch.no_grad()(attend), "backward": backward}


def rates(ms: Mapping[str, float], sizes: Sequence[int], visible: float = 1.0) -> Row:
    """Return the columns of forward and backward; `visible` is the part of the entries that a mask shows."""
    batch, heads, _, rows, keys, dim = sizes
    entries = batch * heads * rows * keys * dim * visible
    row: Row = {f"{direction}_ms": value for direction, value in ms.items()}
    return row | {f"{d}_tflops": FLOPS[d] * entries / value / 1e9 for d, value in ms.items()}


def difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return how o, dq, dk, dv of a kernel differ from PyTorch's; None if they agree."""
    for name, x, y in zip(("o", "dq", "dk", "dv"), results, expected, strict=True):
        error = float((x.float() - y.float()).norm() / y.float().norm())
        if not error <= CLOSE[y.dtype]:
            return f"wrong: {name} differs by {error:.1e} from scaled_dot_product_attention"
    return None


if __name__ == "__main__":
    main()
