"""Time patched models against unpatched ones on one process.

    python scripts/bench/host_path.py [--family mplug_owl3 idefics ...] [--repeats 15] [--tokens 12]
    python scripts/bench/host_path.py --wide [--kept]

The models are those of `models.subject`: with 40 layers of width 64 and a prompt of 16 words after two images of 4
patches, the time is that of the host; with --wide (8 layers of width 512, 128 words after 32 images), computation
dominates. All options are the defaults of `patch_model`, which recompute K and V of frames in backward; --kept keeps
them, as unpatched models do. No gradient checkpointing. One thread; patched and unpatched runs alternate, in one
process. Each figure is the median over the repetitions of the ratio of CPU times, patched to unpatched, with the
quartiles. `forward` has no gradients and no cache; `step` is forward and backward in training mode; `token` is a token
of greedy `generate` after the first. Logits, loss and tokens must agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import report
import torch
from models import HOST, SMALL, SUBJECTS, Subject, subject
from torch import Tensor

from mllm_seqpar import patch_model

Run = tuple[float, Tensor]
"""CPU seconds, and a result that must agree between patched and unpatched."""


def forward(made: Subject, **_: Any) -> Run:
    model = made.model.eval()
    with torch.no_grad():
        start = time.process_time()
        logits = model(**made.inputs, use_cache=False).logits
        return time.process_time() - start, logits


def step(made: Subject, **_: Any) -> Run:
    model, labels = made.model.train(), made.labels()
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(**made.inputs, labels=labels, use_cache=False).loss
    loss.backward()
    return time.process_time() - start, loss.detach()


def token(made: Subject, *, tokens: int, patched: bool) -> Run:
    made.model.eval()
    ids, (_, *times) = made.decode(tokens, time.process_time, patched=patched)
    return statistics.median(times), ids


RUNS: dict[str, Callable[..., Run]] = {"forward": forward, "step": step, "token": token}


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield by family and run: median and quartiles of patched to unpatched, and the extra µs for each layer."""
    sizes, given = (SMALL, (32, 128)) if args.wide else (HOST, (2, 16))
    for family in args.family:
        unpatched, patched = (subject(family, *given, sizes) for _ in range(2))
        patch_model(patched.model, recompute_visual=not args.kept)
        for name, run in RUNS.items():
            pairs = []
            for repeat in range(args.repeats + 2):
                before, expected = run(unpatched, tokens=args.tokens, patched=False)
                after, actual = run(patched, tokens=args.tokens, patched=True)
                torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
                if repeat > 1:
                    pairs.append((after, before))
            low, middle, high = statistics.quantiles([after / before for after, before in pairs], n=4)
            extra = statistics.median(after - before for after, before in pairs) / sizes.layers * 1e6
            row = {"family": family, "run": name, "ratio": middle, "lower": low, "upper": high}
            yield row | {"extra_us_per_layer": extra}


def table(rows: Sequence[harness.Row]) -> str:
    columns = {"family": "family", "run": "run", "ratio": "ratio .2f", "lower quartile": "lower .2f"}
    columns |= {"upper quartile": "upper .2f", "extra µs per layer": "extra_us_per_layer .0f"}
    return report.table(rows, columns)


def main() -> None:
    parser = harness.options(__doc__, repeats=15, device=False)
    parser.add_argument("--family", nargs="+", default=SUBJECTS, choices=SUBJECTS)
    parser.add_argument("--tokens", type=int, default=12, help="tokens that are generated in each repetition")
    parser.add_argument("--wide", action="store_true", help="models of width 512, in which computation dominates")
    parser.add_argument("--kept", action="store_true", help="keep K and V of frames: recompute_visual=False")
    harness.run(parser.parse_args(), rows_of, table)


if __name__ == "__main__":
    main()
