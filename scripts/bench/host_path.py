"""Time patched models against unpatched ones on one process, or count the Python calls of one hyper layer.

    python scripts/bench/host_path.py [--family mplug_owl3 idefics ...] [--repeats 15] [--tokens 12]
    python scripts/bench/host_path.py --wide [--kept]
    python scripts/bench/host_path.py --count [--ranks 2] [--strategy lv-xattn] [--list]

The models are those of `models.subject`: with 40 layers of width 64 and a prompt of 16 words after two images of 4
patches, the time is that of the host; with --wide (8 layers of width 512, 128 words after 32 images), computation
dominates. All options are the defaults of `patch_model`, which recompute K and V of frames in backward; --kept keeps
them, as unpatched models do. No gradient checkpointing. One thread; patched and unpatched runs alternate, in one
process. Each figure is the median over the repetitions of the ratio of CPU times, patched to unpatched, with the
quartiles. `forward` has no gradients and no cache; `step` is forward and backward in training mode; `token` is a token
of greedy `generate` after the first. Logits, loss and tokens must agree.

With `--count`, a tiny mPLUG-Owl3 runs on loopback ranks. The first pass of the model fills lazy state; the last hyper
layer of the second pass is counted with `sys.setprofile` (generators and comprehension frames count as calls).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from harness import print_environment
from models import HOST, MEDIA, SMALL, Subject, subject
from torch import Tensor

import mllm_seqpar
from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from tiny_models import tiny_model

ROOTS = tuple(str(Path(path).resolve()) for path in (*mllm_seqpar.__path__, Path(__file__).parents[2] / "patches"))
FAMILIES = ("mplug_owl3", "open_flamingo", "idefics", "mllama")


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


def ratios(family: str, args: argparse.Namespace) -> dict[str, tuple[float, float, float, float]]:
    """Return by run: lower quartile, median and upper quartile of patched to unpatched; extra µs for each layer."""
    sizes, given = (SMALL, (32, 128)) if args.wide else (HOST, (2, 16))
    unpatched, patched = (subject(family, *given, sizes) for _ in range(2))
    patch_model(patched.model, recompute_visual=not args.kept)
    found = {}
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
        found[name] = low, middle, high, extra
    return found


def print_ratios(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print_environment("cpu")
    print(f"{'family':>14} {'run':>8} {'ratio':>6} {'quartiles':>12} {'us per layer more':>18}")
    for family in arguments.family:
        for name, (low, middle, high, extra) in ratios(family, arguments).items():
            print(f"{family:>14} {name:>8} {middle:>6.2f} {low:>6.2f} {high:>5.2f} {extra:>18.0f}", flush=True)


def count_calls(comm: Communicator, model: Any, options: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Return the calls by (file, function) of the last hyper layer's attention in the second forward pass."""
    patched = patch_model(copy.deepcopy(model), group=comm, **options)
    image = MEDIA["mplug_owl3"]
    ids = torch.randint(3, image, (1, 24), generator=torch.Generator().manual_seed(0))
    ids[0, [2, 6, 10, 14]] = image
    frames = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    calls: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOTS):
            calls[name, frame.f_code.co_name] += 1

    attention = patched.language_model.model.layers[2].self_attn
    patched(input_ids=ids, pixel_values=frames, use_cache=False)
    attention.register_forward_pre_hook(lambda *_: sys.setprofile(profile))
    attention.register_forward_hook(lambda *_: sys.setprofile(None))
    patched(input_ids=ids, pixel_values=frames, use_cache=False)
    return calls


def print_calls(arguments: argparse.Namespace) -> None:
    found = run_loopback(arguments.ranks, count_calls, tiny_model("mplug_owl3"), {"strategy": arguments.strategy})
    for rank, calls in enumerate(found):
        print(f"rank {rank}: {sum(calls.values())} calls in {len({name for name, _ in calls})} files")
    for (name, function), number in found[0].most_common() if arguments.list else ():
        print(f"{number:5d}  {'/'.join(Path(name).parts[-3:])}:{function}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=12, help="tokens that are generated in each repetition")
    parser.add_argument("--wide", action="store_true", help="models of width 512, in which computation dominates")
    parser.add_argument("--kept", action="store_true", help="keep K and V of frames: recompute_visual=False")
    parser.add_argument("--count", action="store_true", help="count the calls of a hyper layer instead")
    parser.add_argument("--ranks", type=int, default=2, help="with --count")
    parser.add_argument("--strategy", default="lv-xattn", help="with --count")
    parser.add_argument("--list", action="store_true", help="with --count: list the functions that rank 0 calls")
    arguments = parser.parse_args()
    (print_calls if arguments.count else print_ratios)(arguments)


if __name__ == "__main__":
    main()
