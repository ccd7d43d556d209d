"""Time decoding after many images: seconds per token, patched on any number of ranks and unpatched on one process.

    python scripts/bench/decode.py [--family idefics open_flamingo ...] [--images 256] [--tokens 32] [--ranks 1]
        [--repeats 3] [--threads 1] [--device cpu|cuda] [--csv rows.csv]

Unpatched IDEFICS and OpenFlamingo project K and V of all images again for every token. Patched, they project them once
per prompt. The benchmark runs greedy `generate` with batch 1 in float32. The time of a token lies between its scores
and those of the next one; the prompt, vision tower included, is timed separately. The benchmark fails if a timed
patched run gives other tokens than the unpatched model. Times are medians over the repeats of each token, then over the
tokens; `growth` is the time of the second half of the tokens over that of the first half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import transformers
from measure import environment, run_on_ranks, synchronize
from models import SUBJECTS, Subject, subject
from rows import append, as_text, digits
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mllm_seqpar import patch_model, unpatch_model

Run = tuple[Tensor, list[float]]
"""Tokens, and the seconds of the prompt and of every token but the first."""


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    machine = environment(args.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    rows = []
    for name in args.family:
        for images in args.images:
            rows.append(measure(name, images, args))
            if args.csv:
                append(args.csv, [rows[-1] | machine])
    print(report.decoding_table(as_text(rows)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["idefics", "open_flamingo"], choices=SUBJECTS)
    parser.add_argument("--images", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens to decode, 5 or more")
    parser.add_argument("--prompt", type=int, default=32, help="number of words before them")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the patched model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--csv", type=Path, help="append one row per measurement to this file")
    args = parser.parse_args(argv)
    if args.tokens < 5:
        parser.error(f"--tokens {args.tokens}: too few to compare their halves; use 5 or more")
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs; use --device cpu")
    return args


def measure(name: str, images: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return one row. On one rank, patched and unpatched runs alternate; on several, the patched ones come last."""
    made = make_subject(name, images, args)
    generate = made.unpatched_generate or made.model.generate
    unpatched, patched = [], []
    for _ in range(1 + args.repeats):
        unpatched.append(decode(generate, made, args))
        if args.ranks == 1:
            patched.append(decode_patched(made, args))
    unpatched, patched = unpatched[1:], patched[1:]  # the first ones warm up
    if args.ranks > 1:
        by_rank = run_on_ranks(args.ranks, args.device, args.threads, patched_runs, name, images, args)
        patched = by_rank[0]
        for other in by_rank[1:]:
            if not all(torch.equal(a, b) for (a, _), (b, _) in zip(patched, other, strict=True)):
                raise SystemExit(f"{name}: the ranks generated different tokens")
    expected = unpatched[0][0]
    for tokens, _ in [*unpatched, *patched]:
        if not torch.equal(tokens, expected):
            raise SystemExit(f"{name}: tokens {tokens[0].tolist()} differ from the unpatched {expected[0].tolist()}")
    row = {"family": name, "images": images, "visual_keys": made.keys, "ranks": args.ranks, "tokens": args.tokens}
    return row | {"device": args.device, "dtype": "float32", "tokens_equal": True} | summary(unpatched, patched)


def make_subject(name: str, images: int, args: argparse.Namespace) -> Subject:
    made = subject(name, images, args.prompt)
    made.model.to(args.device)
    return replace(made, inputs={key: x.to(args.device) for key, x in made.inputs.items()})


class TokenTimes(LogitsProcessor):
    """Records when the scores of each token are computed."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        synchronize(scores.device)
        self.times.append(time.perf_counter())
        return scores


def decode(generate: Callable[..., Tensor], made: Subject, args: argparse.Namespace) -> Run:
    """Run one greedy `generate` of exactly `args.tokens` tokens."""
    clock = TokenTimes()
    greedy = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = generate(**made.inputs, **greedy, use_cache=True, logits_processor=LogitsProcessorList([clock]))
    assert len(clock.times) == 1 + args.tokens
    return tokens[:, -args.tokens :].cpu(), [after - before for before, after in pairwise(clock.times)]


def decode_patched(made: Subject, args: argparse.Namespace) -> Run:
    patch_model(made.model)
    try:
        return decode(made.model.generate, made, args)
    finally:
        unpatch_model(made.model)


def patched_runs(name: str, images: int, args: argparse.Namespace) -> list[Run]:
    made = make_subject(name, images, args)
    return [decode_patched(made, args) for _ in range(1 + args.repeats)][1:]


def summary(unpatched: list[Run], patched: list[Run]) -> dict[str, float]:
    """Return medians over the runs, per token, and over the tokens."""
    result: dict[str, float] = {}
    for name, runs in (("unpatched", unpatched), ("patched", patched)):
        prompt, *tokens = (median(times) for times in zip(*(times for _, times in runs), strict=True))
        first, second = median(tokens[: len(tokens) // 2]), median(tokens[len(tokens) // 2 :])
        result |= {f"{name}_prompt_s": prompt, f"{name}_s_per_token": median(tokens)}
        result |= {f"{name}_first_half_s": first, f"{name}_second_half_s": second, f"{name}_growth": second / first}
    result["ratio"] = result["unpatched_s_per_token"] / result["patched_s_per_token"]
    return digits(result)


if __name__ == "__main__":
    main()
