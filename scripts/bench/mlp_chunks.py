"""Measure one decoder layer with its MLP in chunks: bytes saved for backward, peak memory, and the time of a step.

    python scripts/bench/mlp_chunks.py [--device cpu|cuda] [--dtype float32|bfloat16] [--shape 896,4864,14,2]
        [--tokens 1024 2048 4096] [--chunks 256 1024] [--checkpointing] [--repeats 3]

The layer is a Qwen2 decoder layer of transformers with scaled_dot_product_attention, by default with the sizes of
Qwen2-0.5B, the language model of mPLUG-Owl3-1B. "Saved" counts the storages that autograd saves between forward and
backward, without weights. "Peak" is the largest number of bytes allocated in forward and backward, beyond weights and
their gradients. "Step" is the median time of forward and backward; on a CPU it is processor time, which depends less
on the other users of the machine than elapsed time. The gradients with chunks are compared to those without in the same
run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from measure import SavedBytes, medians_ms, peak_memory, print_environment
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


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    print_environment(args.device)
    print(f"Qwen2 decoder layer {args.shape}, {args.dtype}, checkpointing {args.checkpointing}\n")
    print("| tokens | `mlp_chunk_size` | saved, MiB | peak, MiB | step, ms | step, ratio |")
    print("|---|---|---|---|---|---|")
    layer, rotary = make_layer(args)
    for tokens in args.tokens:
        x = torch.randn(1, tokens, layer.hidden_size, device=args.device, dtype=getattr(torch, args.dtype))
        positions = rotary(x, torch.arange(tokens, device=args.device)[None])
        x.requires_grad_()
        steps = {size: make_step(layer, x, positions, size, args) for size in [None, *args.chunks] if size != tokens}
        expected = gradients(layer, x, steps[None])
        memory = {}
        for size, step in steps.items():
            for found, reference in zip(gradients(layer, x, step), expected, strict=True):
                error = float((found - reference).norm() / reference.norm())
                if not error < CLOSE[args.dtype]:
                    raise SystemExit(f"mlp_chunks.py: gradients with chunks of {size} differ by {error:.1e}")
            saved = SavedBytes(layer.parameters())
            step(saved.counting())
            with peak_memory(x.device) as peak:
                step()
            memory[size] = saved.bytes, peak.bytes
        del expected
        named = {str(size): step for size, step in steps.items()}
        times = medians_ms(named, args.device, args.repeats, clock=time.process_time)
        for size, (saved_bytes, peak_bytes) in memory.items():
            ms = times[str(size)]
            numbers = f"{saved_bytes / MIB:,.0f} | {peak_bytes / MIB:,.0f} | {ms:,.0f} | {ms / times['None']:.2f}"
            print(f"| {tokens:,} | {size or 'None'} | {numbers} |", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=list(CLOSE))
    parser.add_argument("--shape", default="896,4864,14,2", help="hidden size, intermediate size, heads, KV heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing around the layer")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(argv)


def make_layer(args: argparse.Namespace) -> tuple[nn.Module, nn.Module]:
    hidden, inner, heads, kv_heads = map(int, args.shape.split(","))
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = Qwen2DecoderLayer(config, 0).to(args.device, getattr(torch, args.dtype))
    return layer, Qwen2RotaryEmbedding(config).to(args.device)


def make_step(
    layer: nn.Module, x: Tensor, positions: tuple[Tensor, Tensor], size: int | None, args: argparse.Namespace
) -> Callable[..., None]:
    """Return a function that patches the layer, runs forward (in a given context) and backward, and unpatches it."""
    context = SeqParContext(as_communicator(None), SeqParConfig(mlp_chunk_size=size))
    forward = partial(layer, position_embeddings=positions)

    def step(hooks: Any = None) -> None:
        patch = Patch("layer", context)
        patch.chunk_forwards([layer.mlp])
        with hooks or nullcontext():
            y = checkpoint(forward, x, use_reentrant=False) if args.checkpointing else forward(x)
        y.backward(y.detach())
        patch.undo()

    return step


def gradients(layer: nn.Module, x: Tensor, step: Callable[[], None]) -> list[Tensor]:
    for p in (x, *layer.parameters()):
        p.grad = None
    step()
    return [p.grad.clone() for p in (x, *layer.parameters())]


if __name__ == "__main__":
    main()
