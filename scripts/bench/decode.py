"""Times decoding after many images: seconds per token, patched against unpatched on one process.

    python scripts/bench/decode.py [--family idefics open_flamingo ...] [--images 256] [--tokens 32] [--ranks 1]
        [--repeats 3] [--threads 1] [--device cpu|cuda] [--csv rows.csv]

Unpatched IDEFICS and OpenFlamingo project the K and V of all images again for every token; patched, they are projected
once per prompt and stay where they are. Greedy `generate` of each model, batch 1, float32; a token's time is from its
scores to the next one's, so the prompt (vision tower and all) is apart. Patched runs, on `--ranks` processes, must give
the unpatched tokens in the runs that are timed, or the row fails. Medians over the repeats, first of each token, then
of the tokens; `growth` is the second half of the tokens over the first half.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from decode_models import FAMILIES, Subject
from measure import environment
from torch import Tensor, multiprocessing
from transformers import LogitsProcessor, LogitsProcessorList

from mllm_seqpar import patch_model, unpatch_model

Run = tuple[Tensor, list[float]]
"""Tokens, and the seconds of the prompt and of every token but the first."""


def main() -> None:
    """Measure, print a table, and append rows to a file when asked to."""
    args = parse()
    torch.set_num_threads(args.threads)
    where = environment(args.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(HEAD)
    for name in args.family:
        for images in args.images:
            row = measured(name, images, args)
            print(text(row), flush=True)
            if args.csv:
                append(args.csv, row | where)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", default=["idefics", "open_flamingo"], choices=list(FAMILIES))
    parser.add_argument("--images", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, default=32, help="to decode, 5 or more")
    parser.add_argument("--prompt", type=int, default=32, help="words before them")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the patched model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process, on CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--csv", type=Path, help="append one row per measurement to this file")
    args = parser.parse_args()
    if args.tokens < 5:
        parser.error(f"--tokens {args.tokens}: halves of fewer than 5 tokens say nothing")
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs; try --device cpu")
    return args


def measured(name: str, images: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: patched and unpatched in turns where both run on this process, one after the other otherwise."""
    subject = subject_of(name, images, args)
    unpatched = subject.unpatched_generate or subject.model.generate
    alone: list[Run] = []
    ours: list[Run] = []
    for repeat in range(1 + args.repeats):  # the first one warms up
        theirs = once(unpatched, subject, args)
        mine = [once_patched(subject, args)] if args.ranks == 1 else []
        if repeat:
            alone.append(theirs)
            ours += mine
    if args.ranks > 1:
        ours = on_ranks(name, images, args)
    for tokens, _ in [*alone, *ours]:
        if not torch.equal(tokens, alone[0][0]):
            raise SystemExit(f"{name}: other tokens: {tokens[0].tolist()}, unpatched {alone[0][0][0].tolist()}")
    facts = {"family": name, "images": images, "visual_keys": subject.keys, "ranks": args.ranks, "tokens": args.tokens}
    return facts | {"device": args.device, "dtype": "float32", "tokens_equal": True} | summary(alone, ours)


def subject_of(name: str, images: int, args: argparse.Namespace) -> Subject:
    """The model, the same in every process, and its inputs, on the device of this one."""
    torch.manual_seed(0)  # what `random_weights` leaves as the class made it
    subject = FAMILIES[name](images, args.prompt)
    subject.model.to(args.device)
    return replace(subject, inputs={key: x.to(args.device) for key, x in subject.inputs.items()})


class Clock(LogitsProcessor):
    """The time at which the scores of each token are there."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Looks at the clock; on CUDA once the scores are computed."""
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def once(generate: Callable[..., Tensor], subject: Subject, args: argparse.Namespace) -> Run:
    """One greedy `generate` of exactly so many tokens."""
    clock = Clock()
    greedy = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = generate(**subject.inputs, **greedy, use_cache=True, logits_processor=LogitsProcessorList([clock]))
    assert len(clock.times) == 1 + args.tokens
    return tokens[:, -args.tokens :].cpu(), [after - before for before, after in pairwise(clock.times)]


def once_patched(subject: Subject, args: argparse.Namespace) -> Run:
    """The same with the model patched, and unpatched again."""
    patch_model(subject.model)
    try:
        return once(subject.model.generate, subject, args)
    finally:
        unpatch_model(subject.model)


def on_ranks(name: str, images: int, args: argparse.Namespace) -> list[Run]:
    """The timed runs of rank 0 of a group of processes; all ranks must have made the same tokens."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (name, images, args, folder), nprocs=args.ranks)  # type: ignore[attr-defined]
        runs = [torch.load(Path(folder) / f"rank{rank}") for rank in range(args.ranks)]
    for others in runs[1:]:
        if not all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in zip(runs[0], others, strict=True)):
            raise SystemExit(f"{name}: the ranks made different tokens")
    return runs[0]


def rank_main(rank: int, name: str, images: int, args: argparse.Namespace, folder: str) -> None:
    """One process of the group."""
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    subject = subject_of(name, images, args)
    runs = [once_patched(subject, args) for _ in range(1 + args.repeats)]
    torch.save(runs[1:], Path(folder) / f"rank{rank}")
    dist.destroy_process_group()


def summary(alone: list[Run], ours: list[Run]) -> dict[str, float]:
    """Medians over the runs, per token, and over the tokens."""
    result: dict[str, float] = {}
    for who, runs in (("unpatched", alone), ("patched", ours)):
        prompt, *curve = (median(times) for times in zip(*(times for _, times in runs), strict=True))
        half = len(curve) // 2
        result |= {f"{who}_prompt_s": prompt, f"{who}_s_per_token": median(curve)}
        result |= {f"{who}_first_half_s": median(curve[:half]), f"{who}_second_half_s": median(curve[half:])}
        result[f"{who}_growth"] = result[f"{who}_second_half_s"] / result[f"{who}_first_half_s"]
    result["ratio"] = result["unpatched_s_per_token"] / result["patched_s_per_token"]
    return {name: float(f"{value:.5g}") for name, value in result.items()}


def text(row: dict[str, Any]) -> str:
    """A row of the table; seconds as milliseconds."""
    ms = [row[f"{name}_s_per_token"] * 1e3 for name in ("unpatched", "patched")]
    halves = [row[f"patched_{half}_half_s"] * 1e3 for half in ("first", "second")]
    prompts = "{unpatched_prompt_s:.2f} / {patched_prompt_s:.2f}".format(**row)
    head = f"{row['family']:>18} {row['images']:>6} {row['visual_keys']:>6} {row['ranks']:>5} {prompts:>15}"
    numbers = f"{ms[0]:>12.2f} {ms[1]:>10.2f} {row['ratio']:>6.1f} {halves[0]:>11.2f} {halves[1]:>11.2f}"
    return f"{head} {numbers} {row['patched_growth']:>7.3f} {row['unpatched_growth']:>10.3f}"


HEAD = (
    f"{'family':>18} {'images':>6} {'keys':>6} {'ranks':>5} {'prompts, s':>15} {'unpatched ms':>12} {'patched ms':>10} "
    f"{'ratio':>6} {'1st half ms':>11} {'2nd half ms':>11} {'growth':>7} {'unpatched':>10}"
)


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a CSV file, with the names of the columns when it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
