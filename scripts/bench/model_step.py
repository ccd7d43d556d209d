"""Time training steps and decoding on one process, patched and unpatched, at sizes where computation dominates.

    python scripts/bench/model_step.py [--family mplug_owl3 idefics ...] [--images 32] [--words 128] [--repeats 9]

The models are those of `small_models` (width 512, 8 layers, two with cross-attention), in float32 on one thread. No
gradient checkpointing; steps are forward and backward. Three rows per family:

    step, K and V kept          recompute_visual=False, which saves what the unpatched model saves
    step, K and V recomputed    the default: backward projects K and V again, and memory does not grow with layers
    token                       greedy decoding, default options

`ratio` is patched to unpatched CPU time, which other processes disturb less than elapsed time: the median over
alternating pairs, with quartiles. A row is as fast as the unpatched model if 1.00 is within the quartiles or above
them. Losses, gradient norms and tokens must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from host_path import Clock
from measure import print_environment
from profile_step import CLOSE, train_step
from small_models import FAMILIES, WORDS, Subject
from transformers import LogitsProcessorList

from mllm_seqpar import patch_model, unpatch_model

NAMES = [name for name in FAMILIES if name != "open_flamingo_all"]
ROWS: dict[str, dict[str, Any]] = {
    "step, K and V kept": {"recompute_visual": False},
    "step, K and V recomputed": {},
    "token": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are generated in each repetition")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_environment("cpu")
    print(f"{'family':>14} {'row':>25} {'unpatched, ms':>14} {'ratio':>6} {'quartiles':>12}")
    for family in args.family:
        torch.manual_seed(0)
        subject = FAMILIES[family](args.images, args.words)
        for name, options in ROWS.items():
            run = step_of(subject) if name.startswith("step") else token_of(subject, args.tokens)
            pairs = timed_pairs(subject.model, run, options, args.repeats)
            low, middle, high = quantiles([after / before for before, after in pairs], n=4)
            before = median(before for before, _ in pairs) * 1e3
            print(f"{family:>14} {name:>25} {before:>14.1f} {middle:>6.3f} {low:>6.3f} {high:>5.3f}", flush=True)


Run = Callable[[bool], tuple[float, list[float]]]
"""Takes whether the model is patched; returns seconds, and values that must agree."""


def timed_pairs(model: Any, run: Run, options: dict[str, Any], repeats: int) -> list[tuple[float, float]]:
    """Return (unpatched, patched) seconds of alternating runs after a warm-up; which one is first alternates too."""
    pairs = []
    for repeat in range(repeats + 1):
        found: dict[bool, tuple[float, list[float]]] = {}
        for patched in (False, True) if repeat % 2 else (True, False):
            if patched:
                patch_model(model, **options)
            found[patched] = run(patched)
            if patched:
                unpatch_model(model)
        for value, expected in zip(found[True][1], found[False][1], strict=True):
            if not abs(value - expected) <= CLOSE * abs(expected):
                raise SystemExit(f"the patched model gives {value}, the unpatched {expected}")
        if repeat:
            pairs.append((found[False][0], found[True][0]))
    return pairs


def step_of(subject: Subject) -> Run:
    ids = subject.inputs["lang_x" if "lang_x" in subject.inputs else "input_ids"]
    inputs = subject.inputs | {"labels": ids.masked_fill(ids >= WORDS - 2, -100), "use_cache": False}

    def run(patched: bool) -> tuple[float, list[float]]:
        start = time.process_time()
        _, *values = train_step(subject.model, inputs, None)
        return time.process_time() - start, values

    return run


def token_of(subject: Subject, tokens: int) -> Run:
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run(patched: bool) -> tuple[float, list[float]]:
        clock = Clock(time.process_time)
        generate = subject.model.generate if patched else subject.unpatched_generate or subject.model.generate
        found = generate(**subject.inputs, **greedy, logits_processor=LogitsProcessorList([clock]))
        seconds = (clock.times[-1] - clock.times[0]) / (tokens - 1)
        return seconds, [float(x) for x in found[0, -tokens:]]

    return run


if __name__ == "__main__":
    main()
