"""Measures one decoder layer with its MLP in chunks: what it keeps for backward, its peak, and the time of a step.

    python scripts/bench/mlp_chunks.py [--device cpu|cuda] [--dtype float32|bfloat16] [--shape 896,4864,14,2]
        [--tokens 1024 2048 4096] [--chunks 256 1024] [--checkpointing] [--repeats 3]

A Qwen2 decoder layer of transformers with scaled_dot_product_attention, by default of the shape of Qwen2-0.5B, the
language model of mPLUG-Owl3-1B; a shape is hidden size, intermediate size, heads, KV heads. Kept: bytes of the storages
that autograd saves between forward and backward, without weights. Peak: what forward and backward allocate at most
beyond weights and their gradients, as the allocator tells (the profiler's memory events, on CUDA its own statistics).
Step: the median of forward
and backward, on the CPU in the process's own processor time, which other users of the machine change less than a clock.
Results are compared in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from measure import environment, medians_ms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from mllm_seqpar import SeqParConfig
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext

CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}
MIB = 2**20


def main() -> None:
    """Prints a markdown table."""
    args = parse()
    print(", ".join(f"{key} {value}" for key, value in environment(args.device).items()))
    print(f"Qwen2 decoder layer {args.shape}, {args.dtype}, checkpointing {args.checkpointing}\n")
    print("| tokens | `mlp_chunk_size` | kept, MiB | peak, MiB | step, ms | step, ratio |")
    print("|---|---|---|---|---|---|")
    layer, rotary = layer_of(args)
    for tokens in args.tokens:
        x = torch.randn(1, tokens, layer.hidden_size, device=args.device, dtype=getattr(torch, args.dtype))
        positions = rotary(x, torch.arange(tokens, device=args.device)[None])
        x.requires_grad_()
        runs = {size: step_of(layer, x, positions, size, args) for size in [None, *args.chunks] if size != tokens}
        expected = gradients(layer, x, runs[None])
        memory = {}
        for size, run in runs.items():
            for mine, theirs in zip(gradients(layer, x, run), expected, strict=True):
                worst = (mine - theirs).norm() / theirs.norm()
                assert worst < CLOSE[args.dtype], f"chunks of {size}: gradients are {worst:.1e} off"
            memory[size] = kept(layer, run), peak(run, args.device)
        del expected
        clock = medians_ms if args.device == "cuda" else processor_ms
        times = clock({str(size): run for size, run in runs.items()}, args.device, args.repeats)
        for size, (saved, most) in memory.items():
            ms = times[str(size)]
            print(
                f"| {tokens:,} | {size or 'None'} | {saved / MIB:,.0f} | {most / MIB:,.0f} | {ms:,.0f} "
                f"| {ms / times['None']:.2f} |",
                flush=True,
            )


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=list(CLOSE))
    parser.add_argument("--shape", default="896,4864,14,2", help="hidden size, intermediate size, heads, KV heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing around the layer")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def layer_of(args: argparse.Namespace) -> tuple[nn.Module, nn.Module]:
    """The layer, with random weights, and its rotary embedding."""
    hidden, inner, heads, kv_heads = map(int, args.shape.split(","))
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = Qwen2DecoderLayer(config, 0).to(args.device, getattr(torch, args.dtype))
    return layer, Qwen2RotaryEmbedding(config).to(args.device)


def step_of(
    layer: nn.Module, x: Tensor, positions: tuple[Tensor, Tensor], size: int | None, args: argparse.Namespace
) -> Callable[..., None]:
    """Forward, within what it is given, and backward of the layer, patched for just this step."""
    context = SeqParContext(as_communicator(None), SeqParConfig(mlp_chunk_size=size))

    def forward(x: Tensor) -> Tensor:
        return layer(x, position_embeddings=positions)

    def step(hooks: Any = None) -> None:
        patch = Patch("layer", context)
        patch.chunk_forwards([layer.mlp])
        with hooks or nullcontext():
            y = checkpoint(forward, x, use_reentrant=False) if args.checkpointing else forward(x)
        y.backward(y.detach())
        patch.undo()

    return step


def gradients(layer: nn.Module, x: Tensor, run: Callable[[], None]) -> list[Tensor]:
    """Those of the input and all weights, of one step."""
    for p in (x, *layer.parameters()):
        p.grad = None
    run()
    return [p.grad.clone() for p in (x, *layer.parameters())]


def kept(layer: nn.Module, run: Callable[..., None]) -> int:
    """Bytes that autograd keeps, every storage once."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, int] = {}
    alive = []

    def note(x: Tensor) -> Tensor:
        alive.append(x)
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    run(torch.autograd.graph.saved_tensors_hooks(note, lambda x: x))
    return sum(count for address, count in found.items() if address not in weights)


def processor_ms(runs: dict[str, Callable[[], None]], device: str, repeats: int) -> dict[str, float]:
    """Medians of the processor time of each run, in milliseconds, taken in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append((time.process_time() - start) * 1e3)
    return {name: median(times) for name, times in found.items()}


def peak(run: Callable[[], None], device: str) -> int:
    """The most bytes that a step has allocated at once, beyond those there before it."""
    run()  # gradients of weights exist from here on
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


if __name__ == "__main__":
    main()
