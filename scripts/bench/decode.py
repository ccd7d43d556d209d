"""Time decoding after many images: seconds per token, patched on any number of ranks and unpatched on one process.

    python scripts/bench/decode.py [--family idefics open_flamingo ...] [--images 256] [--tokens 32] [--ranks 1]
        [--repeats 3] [--threads 1] [--device cpu|cuda] [--out rows.csv]

Unpatched IDEFICS and OpenFlamingo project K and V of all images again for every token. Patched, they project them once
per prompt. The benchmark runs greedy `generate` with batch 1 in float32. The time of a token lies between its scores
and those of the next one; the prompt, vision tower included, is timed separately. The benchmark fails if a timed
patched run gives other tokens than the unpatched model. Times are medians over the repeats of each token, then over the
tokens; `growth` is the time of the second half of the tokens over that of the first half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import harness
import report
import torch
from models import SUBJECTS, Subject, subject
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model

Run = tuple[Tensor, list[float]]
"""Tokens, and the seconds of the prompt and of every token but the first."""


def main() -> None:
    args = parse()
    harness.run(args, rows_of, report.decoding_table, args.ranks)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.family:
        for images in args.images:
            yield measure(name, images, args)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=3)
    parser.add_argument("--family", nargs="+", default=["idefics", "open_flamingo"], choices=SUBJECTS)
    parser.add_argument("--images", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens to decode, 5 or more")
    parser.add_argument("--prompt", type=int, default=32, help="number of words before them")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the patched model")
    args = parser.parse_args(argv)
    if args.tokens < 5:
        parser.error(f"--tokens {args.tokens}: too few to compare their halves; use 5 or more")
    return args


def measure(name: str, images: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return one row. On one rank, patched and unpatched runs alternate; on several, the patched ones come last."""
    made = subject(name, images, args.prompt).to(args.device)
    unpatched, patched = [], []
    for _ in range(1 + args.repeats):
        unpatched.append(made.decode(args.tokens, time.perf_counter, patched=False))
        if args.ranks == 1:
            patched.append(decode_patched(made, args))
    unpatched, patched = unpatched[1:], patched[1:]  # the first ones warm up
    if args.ranks > 1:
        by_rank = harness.run_on_ranks(args.ranks, args.device, args.threads, patched_runs, name, images, args)
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


def decode_patched(made: Subject, args: argparse.Namespace) -> Run:
    patch_model(made.model)
    try:
        return made.decode(args.tokens, time.perf_counter, patched=True)
    finally:
        unpatch_model(made.model)


def patched_runs(name: str, images: int, args: argparse.Namespace) -> list[Run]:
    made = subject(name, images, args.prompt).to(args.device)
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
    return harness.digits(result)


if __name__ == "__main__":
    main()
