"""Times the block kernels against `scaled_dot_product_attention` on the same shapes.

    python scripts/bench/kernels.py [--device cpu|cuda] [--dtype float32|bfloat16|float16] [--kernels tiled torch_cpu]
        [--shape B,H,G,S,T,D ...] [--causal] [--repeats 7] [--json rows.jsonl]

Per kernel: medians of forward and backward, their ratio to the framework's own forward and backward, achieved TFLOP/s
(forward 4 B H S T D, backward 10 B H S T D, half of it when causal). Results are compared in the same run; a kernel
whose result differs is reported as wrong instead of timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measure import environment, medians_ms
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import BlockKernel, available_kernels, choose_kernel

SHAPES = {
    # Video cross-attention of mPLUG-Owl3 at 1B and 7B: few text rows, many visual keys.
    "cpu": ["1,14,2,64,8192,64", "1,14,2,512,2048,64", "1,28,4,64,4096,128", "1,8,8,256,4096,64"],
    "cuda": ["1,14,2,1024,65536,64", "1,28,4,1024,65536,128", "1,28,4,4096,4096,128", "1,16,16,2048,16384,128"],
}
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def main() -> None:
    """Measure, print a table, and append rows to a file when asked to."""
    args = parse()
    where = environment(args.device)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(f"{'B,H,G,S,T,D':>26} {'kernel':>15} {'fwd ms':>9} {'bwd ms':>9} {'/sdpa':>6} {'/sdpa':>6} {'TFLOP/s':>15}")
    for shape in args.shape or SHAPES[args.device]:
        for row in measure_shape(shape, args):
            print(text(row), flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(row | where) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kernels", nargs="*", help="default: all that can run here but the reference")
    parser.add_argument("--shape", nargs="*", help="B,H,G,S,T,D; default: four shapes of video cross-attention")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="append one JSON row per measurement to this file")
    return parser.parse_args()


def measure_shape(shape: str, args: argparse.Namespace) -> list[dict]:
    """Return one row per kernel for one shape, the framework's own attention first."""
    dtype = getattr(torch, args.dtype)
    batch, heads, groups, rows, keys, dim = map(int, shape.split(","))
    keys = rows if args.causal else keys
    g = torch.Generator(args.device).manual_seed(0)
    sizes = [(heads, rows), (groups, keys), (groups, keys), (heads, rows)]
    q, k, v, do = (torch.randn(batch, h, s, dim, generator=g, device=args.device, dtype=dtype) for h, s in sizes)
    theirs, runs = framework(q, k, v, do, args.causal)
    found: dict[str, str | None] = {"sdpa": None}
    for name in args.kernels or [x for x in available_kernels() if x != "reference"]:
        try:
            kernel, _ = choose_kernel(name, q, k, causal=args.causal, masked=False)
            found[name], of_kernel = ours(kernel, q, k, v, do, args.causal, theirs)
        except (ConfigError, RuntimeError) as error:
            found[name], of_kernel = str(error).splitlines()[0], {}
        runs |= of_kernel
    times = medians_ms(runs, args.device, args.repeats)
    flops = batch * heads * rows * keys * dim * (0.5 if args.causal else 1.0)
    base = {"shape": f"{batch},{heads},{groups},{rows},{keys},{dim}", "dtype": args.dtype, "causal": args.causal}
    result = []
    for name, problem in found.items():
        row = base | {"kernel": name}
        if problem:
            result.append(row | {"problem": problem})
            continue
        for direction, count in (("forward", 4), ("backward", 10)):
            ms = times[f"{name} {direction}"]
            row[f"{direction}_ms"] = round(ms, 4)
            row[f"{direction}_ratio"] = round(ms / times[f"sdpa {direction}"], 3)
            row[f"{direction}_tflops"] = round(count * flops / ms / 1e9, 4)
        result.append(row)
    return result


def framework(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[list[Tensor], dict[str, Callable]]:
    """Return the framework's own o, dq, dk, dv, and what to time."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped)

    o = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    return [o.detach(), *backward()], {"sdpa forward": forward, "sdpa backward": backward}


def ours(
    kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, theirs: list[Tensor]
) -> tuple[str | None, dict[str, Callable]]:
    """Return what is wrong with a kernel's results (None: nothing), and what to time."""
    scale = q.shape[-1] ** -0.5
    o, lse = kernel.forward(q, k, v, scale=scale, causal=causal)
    results = [o, *kernel.backward(do, q, k, v, o, lse, scale=scale, causal=causal)]
    for name, x, y in zip(("o", "dq", "dk", "dv"), results, theirs, strict=True):
        error = float((x.float() - y.float()).norm() / y.float().norm())
        if not error <= CLOSE[q.dtype]:
            return f"wrong: {name} differs by {error:.1e} from scaled_dot_product_attention", {}
    return None, {
        f"{kernel.name} forward": lambda: kernel.forward(q, k, v, scale=scale, causal=causal),
        f"{kernel.name} backward": lambda: kernel.backward(do, q, k, v, o, lse, scale=scale, causal=causal),
    }


def text(row: dict) -> str:
    """Return a row of the table."""
    head = f"{row['shape']:>26} {row['kernel']:>15} "
    if "problem" in row:
        return head + row["problem"]
    ratios = f"{row['forward_ratio']:6.2f} {row['backward_ratio']:6.2f}"
    speeds = f"{row['forward_tflops']:7.3f} {row['backward_tflops']:7.3f}"
    return head + f"{row['forward_ms']:9.2f} {row['backward_ms']:9.2f} {ratios} {speeds}"


if __name__ == "__main__":
    main()
