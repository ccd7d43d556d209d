"""Measure one GPU at the sizes of published models: attention, whole passes, memory and decoding.

    python scripts/bench/gpu.py [--parts attention mplug-owl3-7b ...] [--repeats 5] [--out rows.jsonl]
    python scripts/bench/gpu.py --tiny        # a rehearsal with tiny sizes, on the CPU if there is no GPU

The parts, in this order:

- ceilings: the rates of a copy and of a large matrix product.
- attention: every kernel that can run here, and `scaled_dot_product_attention` with each of its backends, forward and
  backward without a mask.
- masks: every kernel where each row sees the frames before it, counting visible entries only.
- ranks: all ranks of a call in threads of this process, over one rank.
- mplug-owl3-7b, qwen2_5_vl_7b: the vision tower; a forward pass; decoding; a layer whose time is that of its launches;
  a training step with a frozen tower and gradient checkpointing; how memory grows with the video, and the longest that
  fits if it goes on like that. Patched, unpatched, and, of cross-attention, with K and V stored. Patched and unpatched
  runs of decoding alternate.

Weights and inputs are random and made on the device. Features of frames are given, except for the tower. Results are
compared in the same run: a row whose results are wrong, or that could not be measured, has a "problem". The whole takes
less than 8 minutes on an H100: after BUDGET_S seconds it stops, with a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# The first folder is for a checkout that is not installed.
sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "scripts/lib")]

import gpu_models
import harness
import report
from gpu_models import MODELS, Model
from harness import Row, medians_ms, once_ms, rounds, synchronize
from kernels import measure_shape, operands, passes, rates

from memory_meters import peak_memory
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.attention import lv_xattn, ring_attention
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import first_line
from mllm_seqpar.kernels import available_kernels
from mllm_seqpar.masks import FrameMask

BUDGET_S = 450.0
GIB = 2**30
USABLE = 0.92
"""The part of the memory that the longest video may fill, as in the planner."""
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
BACKENDS |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
SHAPES = [
    *("1,28,4,1024,186624,128", "1,28,4,8192,65536,128", "1,8,8,8192,65536,64", "1,32,8,2048,131072,128"),
    "1,28,4,128,46656,128",
]
"""B, H, G, S, T, D: cross-attention of mPLUG-Owl3-7B to 256 frames, OpenFlamingo-9B, Llama-3.2-11B; few rows."""
MASKS = [(1280, 1024), (2048, 1024), (4352, 4096)]
"""Rows and frames, of 729 keys each, of mPLUG-Owl3-7B."""
SLOW_FRAMES = 4096
RANKS = 28, 4, 2048, 186624, 128
TOKENS = 2, 34
"""New tokens of the two answers whose difference is the time of a token."""
CLOSE, CLOSE_PASS = 2e-2, 1e-1
"""Largest relative difference of attention in bf16, and of logits and losses after all layers."""


def main(argv: list[str] | None = None) -> None:
    parser = harness.options(__doc__, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with tiny sizes")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.tiny:
        raise SystemExit("gpu.py: no CUDA GPU here; --tiny rehearses on the CPU")
    harness.run(args, rows_of, report.gpu_tables)


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all parts; what a part raises becomes a row, and the others still run."""
    deadline = time.monotonic() + BUDGET_S
    for name in args.parts:
        try:
            for row in PARTS[name](args):
                yield row
                if time.monotonic() > deadline:
                    break
        except Exception as error:  # noqa: BLE001 - such as a lack of memory
            yield {"measure": name, "problem": f"{type(error).__name__}: {first_line(error)}"}
        if time.monotonic() > deadline:
            yield {"measure": name, "problem": "stopped here: out of time"}
            return
        release(args.device)


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def ceilings(args: argparse.Namespace) -> Iterator[Row]:
    size, side = (2**32, 8192) if not args.tiny else (2**16, 64)
    x = torch.zeros(size, dtype=torch.uint8, device=args.device)
    y = torch.empty_like(x)
    a, b = (torch.randn(side, side, device=args.device, dtype=dtype_of(args.device)) for _ in range(2))
    ms = medians_ms({"copy": lambda: y.copy_(x), "matmul": lambda: a @ b}, args.device, args.repeats)
    yield {"measure": "ceiling", "name": "copy", "value": 2 * size / ms["copy"] / 1e9, "unit": "TB/s"}
    name = f"matmul {side} x {side} x {side}"
    yield {"measure": "ceiling", "name": name, "value": 2 * side**3 / ms["matmul"] / 1e9, "unit": "TFLOP/s"}


def attention(args: argparse.Namespace) -> Iterator[Row]:
    dtype = str(dtype_of(args.device)).removeprefix("torch.")
    for shape in SHAPES if not args.tiny else ["1,4,2,16,64,32"]:
        sizes = tuple(map(int, shape.split(",")))
        base = {"measure": "attention", "shape": shape, "dtype": dtype}
        yield from (base | row for row in sdpa_rows(sizes, args))
        for row in measure_shape(sizes, dtype, args.device, kernels(args), causal=False, repeats=args.repeats)[1:]:
            yield base | {name: x for name, x in row.items() if "ratio" not in name and name != "causal"}
        given = operands(sizes, args.device, dtype_of(args.device))
        yield base | {"kernel": "auto"} | timed(partial(lv_xattn, *given[:3], group="self"), given, sizes, args)
        release(args.device)


def kernels(args: argparse.Namespace) -> list[str]:
    """Return the names of the kernels that can run on the device."""
    return [name for name in available_kernels() if args.device == "cpu" or name != "torch_cpu"]


def timed(
    attend: Callable[[], Tensor],
    given: Sequence[Tensor],
    sizes: Sequence[int],
    args: argparse.Namespace,
    visible: float = 1.0,
) -> Row:
    """Return the columns of forward and backward; `visible` is the part of the entries that a mask shows."""
    repeats = args.repeats if visible == 1 else min(2, args.repeats)  # masks take long
    *leaves, do = given
    return rates(medians_ms(passes(attend, leaves, do), args.device, repeats), sizes, visible)


def sdpa_rows(sizes: Sequence[int], args: argparse.Namespace) -> Iterator[Row]:
    """Yield `scaled_dot_product_attention` with each backend; the efficient one takes K and V of every query head."""
    q, k, v, do = operands(sizes, args.device, dtype_of(args.device))
    for name, backend in BACKENDS.items():
        if (name == "math") != (args.device == "cpu"):
            continue
        grouped = q.shape[1] != k.shape[1]
        leaves = [q, k, v]
        if name == "efficient" and grouped:
            expanded = (x.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).requires_grad_() for x in (k, v))
            leaves, grouped = [q, *expanded], False

        def attend(leaves=leaves, backend=backend, grouped=grouped) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(*leaves, enable_gqa=grouped)

        try:
            yield {"kernel": f"sdpa {name}"} | timed(attend, [*leaves, do], sizes, args)
        except RuntimeError as error:
            yield {"kernel": f"sdpa {name}", "problem": first_line(error)}


def masks(args: argparse.Namespace) -> Iterator[Row]:
    """Yield every kernel, and "auto", where each row sees the frames before it, as many rows one frame more."""
    for rows, frames in MASKS if not args.tiny else [(16, 8)]:
        heads, groups, tokens, dim = (28, 4, 729, 128) if not args.tiny else (4, 2, 4, 32)
        sizes = 1, heads, groups, rows, frames * tokens, dim
        before = torch.arange(rows)[None] * (frames + 1) // rows
        mask = FrameMask.from_intervals(torch.zeros_like(before), before, tokens, frames)
        q, k, v, do = given = operands(sizes, args.device, dtype_of(args.device))
        base = {"measure": "masks", "shape": ",".join(map(str, sizes)), "frames": frames}
        # Blocked matmul is slow, and the longest mask takes seconds.
        names = [name for name in kernels(args) if name != "blocked_matmul"] if frames < SLOW_FRAMES else []
        for name in ["auto", *names]:
            attend = partial(lv_xattn, q, k, v, group="self", mask=mask, kernel=name)
            try:
                problem = wrong_rows(attend().detach(), q, k, v, before * tokens)
                found = {"problem": problem} if problem else {}
                found |= timed(attend, given, sizes, args, float(before.sum()) / rows / frames)
                yield base | {"kernel": name} | found
            except (RuntimeError, ValueError) as error:
                yield base | {"kernel": name, "problem": first_line(error)}
        release(args.device)


@torch.no_grad()
def wrong_rows(o: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> str | None:
    """Return what is wrong with a few rows of o, each of which sees the first `visible` keys; or None."""
    for row in (1, o.shape[2] // 2, o.shape[2] - 1):
        keys = int(visible[0, row])
        exact = o[:, :, row : row + 1].new_zeros(()).expand_as(o[:, :, row : row + 1])
        if keys:
            given = q[:, :, row : row + 1], k[:, :, :keys], v[:, :, :keys]
            exact = F.scaled_dot_product_attention(*given, enable_gqa=True)
        error = float((o[:, :, row : row + 1] - exact).float().norm())
        if not error <= CLOSE * max(float(exact.float().norm()), 1e-6):
            return f"wrong: row {row} differs by {error:.1e} from scaled_dot_product_attention"
    return None


def ranks(args: argparse.Namespace) -> Iterator[Row]:
    heads, groups, rows, keys, dim = RANKS if not args.tiny else (4, 2, 16, 64, 32)
    sizes = 1, heads, groups, rows, keys, dim
    q, k, v, _ = operands(sizes, args.device, dtype_of(args.device))
    algorithms: dict[str, Callable[..., Tensor]] = {"lv_xattn": lv_xattn, "ring": ring_attention}

    def one_rank(attend: Callable[..., Tensor], comm: Communicator) -> None:
        leaves = [x.detach().chunk(comm.size, 2)[comm.rank].contiguous().requires_grad_() for x in (q, k, v)]
        o = attend(*leaves, group=comm)
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    runs: dict[str, Callable[[], object]] = {
        f"{name} {n}": partial(run_loopback, n, partial(one_rank, attend))
        for name, attend in algorithms.items()
        for n in ((1, 2, 4, 8) if not args.tiny else (1, 2))
    }
    ms = medians_ms(runs, args.device, args.repeats)
    for name, value in ms.items():
        algorithm, n = name.split()
        one = ms[f"{algorithm} 1"]
        base = {"measure": "ranks in one process", "shape": ",".join(map(str, sizes)), "algorithm": algorithm}
        if n != "1":
            yield base | {"ranks": int(n), "ratio": value / one, "one_rank_ms": one}


def whole_model(args: argparse.Namespace, name: str) -> Iterator[Row]:
    made = MODELS[name](args.device, dtype_of(args.device), args.tiny)
    yield made.tower(partial(medians_ms, device=args.device, repeats=min(3, args.repeats)))
    made.model.requires_grad_(False).eval()
    yield from runs_of("forward", made, made.forwards, args)
    yield from decoding(made, args)
    made.train()
    yield launches(made, args)
    yield from runs_of("step", made, made.steps, args)
    yield from growth(made, args)


def runs_of(run: str, made: Model, sizes: Sequence[tuple[int, int]], args: argparse.Namespace) -> Iterator[Row]:
    """Yield time and peak memory of a pass in each mode; the results of the modes are compared."""
    for frames, text in sizes:
        given, expected = made.inputs(frames, text), None
        for mode in made.modes(run):
            if mode == "unpatched" and frames > made.unpatched_up_to[run]:
                continue
            base = {"measure": "pass", "run": run, "model": made.name, "mode": mode, "frames": frames, "text": text}
            call = partial(made.forward if run == "forward" else made.step, given)
            patched(made, mode)
            try:
                result = call()
                with peak_memory(torch.device(args.device)) as peak:
                    call()
                times = [once_ms(call, args.device) for _ in range(min(3, args.repeats))]
                row = base | {"ms": median(times), "peak_gib": peak.bytes / GIB}
                expected = result if expected is None else expected
                if not gpu_models.close(result, expected, CLOSE_PASS):
                    row["problem"] = "wrong: the result differs from that of the first mode"
                yield row
            except RuntimeError as error:
                yield base | {"problem": first_line(error)}
            made.model.zero_grad(set_to_none=True)
            release(args.device)
    patched(made, "unpatched")


def patched(made: Model, mode: str) -> None:
    with suppress(ValueError):  # it is not patched
        unpatch_model(made.model)
    if mode != "unpatched":
        patch_model(made.model, **({"recompute_visual": False} if mode == "stored" else {}))


def launches(made: Model, args: argparse.Namespace) -> Row:
    """Return the time of a patched decoder layer with a few tokens and no frame: that of the host's launches.

    These are `layer_forward_s` and `layer_backward_s` of a cluster file.
    """
    given = {"input_ids": made.inputs(*made.steps[0])["input_ids"][:, :1].repeat(1, 8)}
    patched(made, "patched")
    runs = {"forward": partial(made.forward, given), "step": partial(made.step, given)}
    ms = medians_ms(runs, args.device, args.repeats)
    made.model.zero_grad(set_to_none=True)
    layers = made.model.config.get_text_config().num_hidden_layers
    row = {"measure": "launches", "model": made.name, "layer_forward_s": ms["forward"] / 1e3 / layers}
    return row | {"layer_backward_s": (ms["step"] - ms["forward"]) / 1e3 / layers}


def growth(made: Model, args: argparse.Namespace) -> Iterator[Row]:
    """Yield how much memory a step needs for more frames, and the longest video that fits by that."""
    (fewer, more), text = made.growth
    total = torch.cuda.get_device_properties(0).total_memory if args.device == "cuda" else 16 * GIB
    for mode in made.modes("step"):
        patched(made, mode)
        base = {"measure": "memory", "model": made.name, "mode": mode, "text": text}
        held = sum(x.numel() * x.element_size() for x in made.model.parameters())  # peaks are those above the weights
        try:
            peaks = [step_peak(made, frames, text, args.device) for frames in (fewer, more)]
        except RuntimeError as error:
            yield base | {"problem": first_line(error)}
            continue
        per_frame = (peaks[1] - peaks[0]) / (more - fewer)
        longest = more + (USABLE * total - held - peaks[1]) / per_frame if per_frame > 0 else 0
        yield base | {"gib_per_1000_frames": 1000 * per_frame / GIB, "longest": int(longest)}
    patched(made, "unpatched")


def step_peak(made: Model, frames: int, text: int, device: str) -> int:
    """Return the peak bytes of a step above the weights, with its inputs and the gradients."""
    made.model.zero_grad(set_to_none=True)
    release(device)
    with peak_memory(torch.device(device)) as peak:
        made.step(made.inputs(frames, text))
    return int(peak.bytes)


def decoding(made: Model, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the time of a token, patched and unpatched in turn; the first round is not counted."""
    frames, text = made.forwards[0]
    given = made.inputs(frames, text)
    few, many = TOKENS if not args.tiny else (2, 6)
    times: dict[str, list[float]] = {"patched": [], "unpatched": []}
    answers = {}
    for mode, counts in rounds(times, repeats=min(3, args.repeats)):
        patched(made, mode)
        seconds = []
        for tokens in (few, few, many):
            start = time.perf_counter()
            answers[mode] = made.generate(given, tokens)
            synchronize(args.device)
            seconds.append(time.perf_counter() - start)
        if counts:
            times[mode].append((seconds[2] - seconds[1]) / (many - few) * 1e3)
    ms = {mode: median(values) for mode, values in times.items()}
    row: Row = {"measure": "decoding", "model": made.name, "frames": frames, "text": text}
    row |= {f"{mode}_ms": value for mode, value in ms.items()} | {"ratio": ms["patched"] / ms["unpatched"]}
    row["same_tokens"] = float((answers["patched"] == answers["unpatched"]).float().mean())
    yield row
    patched(made, "unpatched")


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "ceilings": ceilings,
    "attention": attention,
    "masks": masks,
    "ranks": ranks,
} | {name: partial(whole_model, name=name) for name in MODELS}


if __name__ == "__main__":
    main()
