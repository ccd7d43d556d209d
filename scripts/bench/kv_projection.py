"""Measure the projections of K and V in a training step: FLOPs, and seconds of the step, before and after.

    python scripts/bench/kv_projection.py [--family mplug_owl3 idefics ...] [--rows 128 32] [--keys 8192]
        [--scale 8] [--repeats 5] [--dtype float32|bfloat16]

"After" computes the gradients of a projection without repeating it (`KVProjection.direct_grads`), "before" by autograd,
which repeats it; both take turns in one process. The models are the real classes with the proportions of the published
ones and every width divided by --scale. The cost of a projection relative to attention grows with the width and falls
with the number of text rows: R rows at scale S have the proportions of R * S rows at the published widths. A step
starts at visual features that require a gradient; the vision tower is not run.

A row gives the FLOPs of a step's projections and their gradients, in units of one projection of K and V: forward,
backward, and the gradients of weights and of features make 4. Seconds are those of the processor, so that other
programs disturb them little; ratios are medians of pairs of steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from measure import print_environment
from scaled_models import FAMILIES as SCALED
from scaled_models import MEDIA, TEXT, WORDS, Inputs, Subject, random_weights, scaled
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar.runtime.kv_projection import KVProjection
from mllm_seqpar.runtime.visual_features import RecomputedKeys

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative difference of the gradient norms of the two ways."""
HEAD = (
    f"{'family':>14} {'rows':>5} {'keys':>6} {'FLOPs':>12} {'share saved':>11} {'before, s':>9} {'after, s':>8} ratio"
)


def mllama(scale: int) -> Subject:
    """Build Llama 3.2 Vision 11B: 1,601 keys per tile, 32 query heads, 8 KV heads; 4 of 8 cross-attention layers."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    sizes = scaled("llama-3.2-11b-vision", scale, layers=8)
    text = TEXT | {"hidden_size": sizes.text.hidden, "intermediate_size": sizes.text.mlp_inner, "num_hidden_layers": 8}
    text |= {"num_attention_heads": sizes.text.heads, "num_key_value_heads": sizes.text.kv_heads}
    layers = {"cross_attention_layers": [1, 3, 5, 7], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = {"hidden_size": 32, "attention_heads": 2, "intermediate_size": 48, "vision_output_dim": 64}
    tower |= {"num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    tower |= {"image_size": 560, "patch_size": 14, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(**tower),
        text_config=MllamaTextConfig(**text, **layers),
        image_token_index=WORDS,
    )

    def inputs(ids: Tensor, features: Tensor, shard: FrameShard) -> Inputs:
        visible = torch.ones(1, ids.shape[1], shard.total, 1, dtype=torch.long)
        states = {"cross_attention_states": features, "cross_attention_mask": visible}
        return {"input_ids": ids.masked_fill(ids == MEDIA, 3), "visual_shard": shard} | states

    return Subject(sizes, random_weights(MllamaForConditionalGeneration(config)), inputs)


FAMILIES = {**SCALED, "mllama": mllama}
KEYS_PER_FRAME = {"mplug_owl3": 729, "open_flamingo": 64, "idefics": 64, "mllama": 1601}
PLACEHOLDERS = ("mplug_owl3", "open_flamingo")  # the others' text may be shorter than the number of frames


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    print_environment("cpu")
    print(f"load average at start: {os.getloadavg()[0]:.1f}")
    print(HEAD)
    for family in args.family:
        torch.manual_seed(0)
        subject = FAMILIES[family](args.scale)
        subject.model.to(args.dtype).train()
        patch_model(subject.model, "lv-xattn")
        for rows in args.rows:
            measure(family, subject, rows, args)
    print(f"load average at end: {os.getloadavg()[0]:.1f}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 32], help="text tokens")
    parser.add_argument("--keys", type=int, default=8192, help="visual keys, at most as many as placeholders allow")
    parser.add_argument("--scale", type=int, default=8, help="divisor of all widths")
    parser.add_argument("--repeats", type=int, default=5, help="number of timed pairs of steps")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def measure(family: str, subject: Subject, rows: int, args: argparse.Namespace) -> None:
    """Print the row of one family and number of text rows.

    Raises:
        SystemExit: if the gradient norms of the two ways differ.
    """
    per_frame = KEYS_PER_FRAME[family]
    frames = max(1, args.keys // per_frame)
    if family in PLACEHOLDERS:
        frames = min(frames, rows - 4)
    shape = frames, per_frame, subject.sizes.cross.visual_dim
    features = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(args.dtype).requires_grad_()
    ids = torch.randint(3, WORDS - 2, (1, rows), generator=torch.Generator().manual_seed(1))
    if family in PLACEHOLDERS:
        ids[:, :frames] = MEDIA
    labels = ids.masked_fill(ids == MEDIA, -100)
    inputs = subject.inputs(ids, features, FrameShard(0, frames, frames)) | {"labels": labels, "use_cache": False}
    found = {}
    for name in ("before", "after"):
        with way(name), counted() as flops:
            norm = train_step(subject.model, inputs, features)[1]
        found[name] = (flops["keys_values"] + flops["input_grads"]) / (flops["keys_values"] / 2), norm
    (products, expected), (fewer, norm) = found["before"], found["after"]
    if not abs(norm - expected) <= CLOSE[args.dtype] * expected:
        raise SystemExit(f"{family}: gradient norm {norm} without a second projection, {expected} by autograd")
    pairs = []
    for _ in range(args.repeats):
        seconds = {}
        for name in ("before", "after"):
            with way(name):
                seconds[name] = train_step(subject.model, inputs, features)[0]
        pairs.append(seconds)
    before, after = (median(pair[name] for pair in pairs) for name in ("before", "after"))
    ratio = median(pair["after"] / pair["before"] for pair in pairs)
    print(
        f"{family:>14} {rows:>5} {frames * per_frame:>6} {f'{products:.2f} -> {fewer:.2f}':>12} "
        f"{1 - fewer / products:>11.1%} {before:>9.3f} {after:>8.3f} {ratio:.3f}",
        flush=True,
    )


@contextmanager
def way(name: str) -> Iterator[None]:
    """Inside the block, "before" differentiates every projection by autograd."""
    with ExitStack() as stack:
        if name == "before":
            stack.enter_context(mock.patch.object(KVProjection, "has_direct_grads", lambda *_: False))
        yield


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the FLOPs of `RecomputedKeys.keys_values` and `input_grads` in the block."""
    totals = {"keys_values": 0, "input_grads": 0}
    with ExitStack() as stack:
        for name in totals:
            stack.enter_context(mock.patch.object(RecomputedKeys, name, counting(name, totals)))
        yield totals


def counting(name: str, totals: dict[str, int]) -> Callable[..., Any]:
    """Return the method of `RecomputedKeys` such that it adds its FLOPs to `totals`."""
    method = getattr(RecomputedKeys, name)

    def call(*args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = method(*args)
        totals[name] += counter.get_total_flops()
        return result

    return call


def train_step(model: Any, inputs: Inputs, features: Tensor) -> tuple[float, float]:
    """Run forward and backward; return seconds of the processor and the norm of all gradients."""
    model.zero_grad(set_to_none=True)
    features.grad = None
    start = time.process_time()
    model(**inputs).loss.backward()
    seconds = time.process_time() - start
    assert features.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return seconds, float(sum(grad.double().square().sum() for grad in (features.grad, *grads)) ** 0.5)


if __name__ == "__main__":
    main()
