"""Time decoding after many images on one process: seconds per token of patched and of unpatched models.

    python scripts/bench/decode.py [--family idefics open_flamingo ...] [--images 256] [--tokens 32]
        [--repeats 3] [--threads 1] [--device cpu|cuda] [--out rows.jsonl]

Unpatched IDEFICS and OpenFlamingo project K and V of all images again for every token. Patched, they project them once
per prompt. The benchmark runs greedy `generate` with batch 1 in float32. The time of a token lies between its scores
and those of the next one; the prompt, vision tower included, is timed separately. The benchmark fails if a timed
patched run gives other tokens than the unpatched model. Times are medians over the repeats of each token, then over the
tokens.
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
    harness.run(parse(), rows_of, report.decoding_table)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.family:
        for images in args.images:
            yield measure(name, images, args)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=3)
    parser.add_argument("--family", nargs="+", default=SUBJECTS, choices=SUBJECTS)
    parser.add_argument("--images", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens to decode")
    parser.add_argument("--prompt", type=int, default=32, help="number of words before them")
    return parser.parse_args(argv)


def measure(name: str, images: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return one row; patched and unpatched runs alternate, and the first ones warm up."""
    made = subject(name, images, args.prompt).to(args.device)
    unpatched, patched = [], []
    for number in range(1 + args.repeats):
        runs = made.decode(args.tokens, time.perf_counter, patched=False), decode_patched(made, args)
        if number:
            unpatched.append(runs[0])
            patched.append(runs[1])
    expected = unpatched[0][0]
    for tokens, _ in [*unpatched, *patched]:
        if not torch.equal(tokens, expected):
            raise SystemExit(f"{name}: tokens {tokens[0].tolist()} differ from the unpatched {expected[0].tolist()}")
    row = {"family": name, "images": images, "visual_keys": made.keys, "tokens": args.tokens}
    return row | {"device": args.device, "dtype": "float32", "tokens_equal": True} | summary(unpatched, patched)


def decode_patched(made: Subject, args: argparse.Namespace) -> Run:
    patch_model(made.model)
    try:
        return made.decode(args.tokens, time.perf_counter, patched=True)
    finally:
        unpatch_model(made.model)


def summary(unpatched: list[Run], patched: list[Run]) -> dict[str, float]:
    """Return medians over the runs, per token, and over the tokens."""
    result: dict[str, float] = {}
    for name, runs in (("unpatched", unpatched), ("patched", patched)):
        prompt, *tokens = (median(times) for times in zip(*(times for _, times in runs), strict=True))
        result |= {f"{name}_prompt_s": prompt, f"{name}_s_per_token": median(tokens)}
    result["ratio"] = result["unpatched_s_per_token"] / result["patched_s_per_token"]
    return result


if __name__ == "__main__":
    main()
