"""Time patched models against unpatched ones on one process: a forward pass, a training step, a prompt, and tokens.

    python scripts/bench/one_process.py [--family mplug_owl3 idefics ...] [--runs forward step decode] [--wide]
        [--kept] [--images N ...] [--prompt WORDS] [--tokens N] [--repeats N] [--device cpu|cuda] [--out rows.jsonl]

The models are those of `models.subject`, in float32, with batch 1. By default they have 40 layers of width 64 and a
prompt of 16 words after two images of 4 patches, so the time is that of the host; with --wide (8 layers of width 512,
128 words after 32 images), computation dominates. All options are the defaults of `patch_model`, which recompute K and
V of frames in backward; --kept keeps them, as unpatched models do. No gradient checkpointing.

`forward` has no gradients and no cache; `step` is forward and backward in training mode; `decode` is greedy `generate`:
the prompt, vision tower included, and the median of the tokens after the first one, each between its scores and those
of the next one. Unpatched IDEFICS and OpenFlamingo project K and V of all images again for every token; patched, they
project them once per prompt.

Patched and unpatched runs alternate. With one thread on a CPU, seconds are those of the processor, otherwise those of
the clock. A row has their medians, and the median and the quartiles of the ratio of a patched run to the unpatched run
before it. The benchmark fails if logits, loss or tokens differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import harness
import report
import torch
from harness import synchronize
from models import HOST, SMALL, SUBJECTS, Subject, subject
from torch import Tensor

from mllm_seqpar import patch_model

Run = tuple[dict[str, float], Tensor]
"""Seconds of each part, and a result that must be the same for patched and unpatched models."""


def forward(made: Subject, clock: Callable[[], float], **_: Any) -> Run:
    with torch.no_grad():
        start = clock()
        logits = made.model.eval()(**made.inputs, use_cache=False).logits
        return {"forward": clock() - start}, logits


def step(made: Subject, clock: Callable[[], float], **_: Any) -> Run:
    model, labels = made.model.train(), made.labels()
    model.zero_grad(set_to_none=True)
    start = clock()
    loss = model(**made.inputs, labels=labels, use_cache=False).loss
    loss.backward()
    return {"step": clock() - start}, loss.detach()


def decode(made: Subject, clock: Callable[[], float], *, tokens: int, patched: bool) -> Run:
    made.model.eval()
    ids, (prompt, *times) = made.decode(tokens, clock, patched=patched)
    return {"prompt": prompt, "token": median(times)}, ids


RUNS: dict[str, Callable[..., Run]] = {"forward": forward, "step": step, "decode": decode}
WARM_UP = 2


def main() -> None:
    harness.run(parse(), rows_of, table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=15)
    parser.add_argument("--family", nargs="+", default=SUBJECTS, choices=SUBJECTS)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--wide", action="store_true", help="models of width 512, in which computation dominates")
    parser.add_argument("--kept", action="store_true", help="keep K and V of frames: recompute_visual=False")
    parser.add_argument("--images", type=int, nargs="+", help="default: 2, or 32 with --wide")
    parser.add_argument("--prompt", type=int, help="number of words after the images; default: 16, or 128 with --wide")
    parser.add_argument("--tokens", type=int, default=12, help="number of tokens to decode")
    return parser.parse_args(argv)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for family in args.family:
        for images in args.images or [32 if args.wide else 2]:
            yield from measure(family, images, args)


def measure(family: str, images: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sizes, words = (SMALL, 128) if args.wide else (HOST, 16)
    unpatched, patched = (subject(family, images, args.prompt or words, sizes).to(args.device) for _ in range(2))
    patch_model(patched.model, recompute_visual=not args.kept)
    time_of = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter

    def clock() -> float:
        synchronize(args.device)
        return time_of()

    facts = {"family": family, "images": images, "visual_keys": patched.keys, "device": args.device, "dtype": "float32"}
    for name in args.runs:
        pairs = []
        for number in range(WARM_UP + args.repeats):
            before, expected = RUNS[name](unpatched, clock, tokens=args.tokens, patched=False)
            after, result = RUNS[name](patched, clock, tokens=args.tokens, patched=True)
            require_same(f"{family}, {name}", result, expected)
            if number >= WARM_UP:
                pairs.append((before, after))
        for part in pairs[0][0]:
            seconds = [(before[part], after[part]) for before, after in pairs]
            yield facts | {"run": part} | summary(seconds, sizes.layers)


def require_same(where: str, result: Tensor, expected: Tensor) -> None:
    """Raise SystemExit if floating-point results are not close, or tokens not equal."""
    exact = not expected.is_floating_point()
    if not (torch.equal(result, expected) if exact else torch.allclose(result, expected, rtol=1e-3, atol=1e-4)):
        found = f": {result[0].tolist()}, not {expected[0].tolist()}" if exact else ""
        raise SystemExit(f"{where}: results of the patched model differ from those of the unpatched one{found}")


def summary(pairs: Sequence[tuple[float, float]], layers: int) -> dict[str, float]:
    """Return the columns of one part, from its seconds in pairs of an unpatched and a patched run."""
    unpatched, patched = (median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = [after / before for before, after in pairs]
    lower, ratio, upper = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    extra = median(after - before for before, after in pairs) / layers * 1e6
    times = {"unpatched_s": unpatched, "patched_s": patched, "ratio": ratio, "lower": lower, "upper": upper}
    return times | {"extra_us_per_layer": extra}


def table(rows: Sequence[harness.Row]) -> str:
    columns = {"family": "family", "images": "images", "run": "run", "patched, ms": "patched_s .2f 1e3"}
    columns |= {"unpatched": "unpatched_s .2f 1e3", "ratio": "ratio .2f", "lower quartile": "lower .2f"}
    return report.table(rows, columns | {"upper": "upper .2f", "extra µs per layer": "extra_us_per_layer .0f"})


if __name__ == "__main__":
    main()
