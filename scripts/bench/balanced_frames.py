"""Processor time of each rank in passes of mPLUG-Owl3, with contiguous frames and with zigzag frames.

    python scripts/bench/balanced_frames.py [--frames 512] [--text 544] [--ranks 4] [--scale 16] [--repeats 5]

Every placeholder attends to the frames up to its own, so with contiguous frames the first rank computes most. The ranks
are threads of one process with one thread of computation each, and the time of a rank is that of its thread: what it
waits for the others does not count. Each row has the time of every rank divided by the mean over ranks, the median over
repetitions in which the layouts alternate; the mean itself; and the bytes that the rank that sends most sends. Both
layouts must give the same loss.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import scaled_models
import torch

from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.patching.patch import patch_of
from mllm_seqpar.sharding import FRAME_LAYOUTS, take_spans


def forward(model: Any, arguments: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(model(**arguments).loss)


def step(model: Any, arguments: dict[str, Any]) -> float:
    loss = model(**arguments).loss
    loss.backward()
    return float(loss.detach())


PASSES: dict[str, Callable[[Any, dict[str, Any]], float]] = {"forward": forward, "forward and backward": step}


def measure(args: argparse.Namespace) -> dict[tuple[str, str], list[tuple[list[float], list[int]]]]:
    """Return (seconds of each rank, bytes of each rank) of every repetition, by pass and layout."""
    subject = scaled_models.mplug_owl3(args.scale)
    tokens, width = subject.sizes.vision.keys, subject.sizes.cross.visual_dim
    features = torch.randn(args.frames, tokens, width, generator=torch.Generator().manual_seed(0))
    models = [copy.deepcopy(subject.model).train() for _ in range(args.ranks)]
    run_loopback(args.ranks, lambda comm: patch_model(models[comm.rank], group=comm))
    found: dict[tuple[str, str], list[tuple[list[float], list[int]]]] = {}
    losses: set[float] = set()

    def one_rank(comm: Communicator, name: str, layout: str) -> tuple[float, int, float]:
        model, shard = models[comm.rank], FrameShard.of(args.frames, comm, layout)
        own = take_spans(features, shard.spans).clone().requires_grad_()
        arguments = subject.arguments(args.text, own, shard) | {"use_cache": False}
        counter = patch_of(model).context.comm.bytes  # type: ignore[union-attr]
        counter.reset()
        start = time.thread_time()
        loss = PASSES[name](model, arguments)
        return time.thread_time() - start, counter.total, loss

    for repeat in range(args.repeats + 1):
        for name in PASSES:
            for layout in FRAME_LAYOUTS if repeat % 2 else FRAME_LAYOUTS[::-1]:
                seconds, sent, loss = zip(*run_loopback(args.ranks, one_rank, name, layout), strict=True)
                losses |= {round(x, 4) for x in loss}
                if repeat:  # the first pass plans
                    found.setdefault((name, layout), []).append(([*seconds], [*sent]))
    if len(losses) > 2:  # on both sides of a rounding
        raise SystemExit(f"balanced_frames.py: the layouts give different losses: {sorted(losses)}")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"frames": 512, "text": 544, "ranks": 4, "scale": 16, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| pass | frames | time of each rank / mean | mean, s | bytes of the busiest rank, MB |")
    print("|---|---|---|---:|---:|")
    for (name, layout), runs in measure(args).items():
        ratios = [median(seconds[rank] / mean(seconds) for seconds, _ in runs) for rank in range(args.ranks)]
        cells = [", ".join(f"{ratio:.2f}" for ratio in ratios), f"{median(mean(seconds) for seconds, _ in runs):.2f}"]
        print(f"| {name} | {layout} | {' | '.join(cells)} | {max(runs[0][1]) / 1e6:.1f} |")


if __name__ == "__main__":
    main()
