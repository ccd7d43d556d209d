"""Measure training steps with gradient checkpointing, before (attention is computed again) and after (it is kept).

    python scripts/bench/kept_attention.py [--family mllama ...] [--scale 16] [--text 128] [--frames N] [--ranks 2]
        [--strategy lv-xattn] [--repeats 5]

Text is short and video is long. A step starts at visual features that require a gradient, in the models of
`scaled_models.py`, and for Llama 3.2 Vision in that of `small_models.py`; ranks are threads of this process. "plain" is
a step without checkpointing, "before" one with recompute_attention=True, "after" one with the default. Each repetition
times all three in changing order; "ratio" is the median of the repetitions' ratios to "before". "Calls" are distributed
attention forward passes of a rank, "K, V" its projections of all its features for attention. "Peak" is the largest
number of bytes allocated at one time by a step on one rank alone, beyond weights and their gradients. Loss and
gradients of "after" must be bitwise equal to those of "before".
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import scaled_models
import small_models
import torch
from measure import peak_memory, print_environment
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from mllm_seqpar import FrameShard, frame_range, patch_model
from mllm_seqpar.attention import joint
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.runtime.visual_features import RecomputedKeys

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "before": {"recompute_attention": True},
    "after": {"recompute_attention": False},
}
FRAMES = {"idefics": 64, "open_flamingo": 64, "mllama": 64, "mplug_owl3": 8}
"""Frames by family; fewer than text tokens, because `scaled_models.py` has a placeholder for each of them."""
Inputs = Callable[[Communicator | None], dict[str, Any]]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    print_environment("cpu")
    print(f"{args.ranks} ranks, {args.strategy}, {args.text} text tokens, float32, widths divided by {args.scale}\n")
    print("| family | keys | step | calls | K, V | MB sent | peak, MiB | seconds | ratio |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for family in args.family:
        torch.manual_seed(0)
        model, inputs, keys = subject(family, args)
        for mode, cells in measure(model, inputs, args).items():
            print(f"| {family} | {keys:,} | {mode} | " + " | ".join(cells) + " |", flush=True)


def subject(family: str, args: argparse.Namespace) -> tuple[Any, Inputs, int]:
    """Return the model, the arguments of its forward by rank (None: a single process), and the visual keys."""
    frames = args.frames or FRAMES[family]
    if family == "mllama":
        given = small_models.mllama(1, args.text)
        ids, width = given.inputs["input_ids"], given.model.config.text_config.hidden_size

        def whole(comm: Communicator | None) -> dict[str, Any]:
            features = random_features(frames, given.keys, width)
            return {"input_ids": ids, "cross_attention_states": features, "labels": ids, "use_cache": False}

        return given.model, whole, frames * given.keys
    scaled = scaled_models.FAMILIES[family](args.scale)
    tokens, width = scaled.sizes.vision.keys, scaled.sizes.cross.visual_dim

    def local(comm: Communicator | None) -> dict[str, Any]:
        own = range(frames) if comm is None else frame_range(frames, comm)
        features = random_features(frames, tokens, width).detach()[own.start : own.stop].clone().requires_grad_()
        arguments = scaled.arguments(args.text, features, FrameShard(own.start, own.stop, frames))
        return arguments | ({} if family == "open_flamingo" else {"use_cache": False})

    return scaled.model, local, frames * tokens


def random_features(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def measure(model: Any, inputs: Inputs, args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the cells of each mode; raise SystemExit if kept results change the loss or a gradient."""
    models = {mode: [prepared(model, mode != "plain") for _ in range(args.ranks)] for mode in MODES}

    def patch(comm: Communicator) -> Communicator:
        for mode, options in MODES.items():
            patch_model(models[mode][comm.rank], args.strategy, group=comm, **options)
        return comm

    def run(mode: str) -> list[float]:
        return run_loopback(args.ranks, lambda comm: step(models[mode][comm.rank], inputs(comm)))

    def seconds(mode: str) -> float:
        start = time.perf_counter()
        run(mode)
        return time.perf_counter() - start

    comm, *_ = run_loopback(args.ranks, patch)
    cells, results = {}, {}
    for mode in MODES:
        comm.bytes.reset()
        with counted_calls() as calls:
            losses = run(mode)
        results[mode] = losses, [p.grad.clone() for m in models[mode] for p in m.parameters() if p.grad is not None]
        counts = [f"{calls[name] // args.ranks}" for name in ("attention", "keys and values")]
        cells[mode] = [*counts, f"{comm.bytes.total / 1e6:.2f}", f"{peak_of_one_rank(model, inputs, mode) / 2**20:.1f}"]
    (losses, grads), (expected_losses, expected) = results["after"], results["before"]
    if losses != expected_losses or not all(map(torch.equal, grads, expected)):
        raise SystemExit("kept_attention.py: kept results of attention change the loss or a gradient")
    times = []
    for repeat in range(args.repeats):
        order = [*MODES, *MODES][repeat % 3 : repeat % 3 + 3]
        times.append({mode: seconds(mode) for mode in order})
    for mode in MODES:
        ratio = median(row[mode] / row["before"] for row in times)
        cells[mode] += [f"{median(row[mode] for row in times):.3f}", f"{ratio:.3f}"]
    return cells


def peak_of_one_rank(model: Any, inputs: Inputs, mode: str) -> int:
    model = patch_model(prepared(model, mode != "plain"), **MODES[mode])
    arguments = inputs(None)
    step(model, arguments)  # the gradients exist before the measurement
    with peak_memory(torch.device("cpu")) as peak:
        step(model, arguments)
    return peak.bytes


def prepared(model: Any, checkpointing: bool) -> Any:
    """Return a copy for training, if asked for with checkpointed decoder and cross-attention layers."""
    model = copy.deepcopy(model).train()
    if hasattr(model, "lang_encoder") and checkpointing:  # as OpenFlamingo's training script does
        language_model = model.lang_encoder
        units = {*language_model.gated_cross_attn_layers, *language_model.old_decoder_blocks}
        apply_activation_checkpointing(model, check_fn=units.__contains__)
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count distributed attention forward passes, and projections of visual features for attention, of all ranks."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    with ExitStack() as stack:
        for owner, attribute, name in (
            (joint, "distributed_forward", "attention"),
            (joint, "forward_head_sharded", "attention"),
            (RecomputedKeys, "keys_values", "keys and values"),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, counted(name, getattr(owner, attribute))))
        yield calls


def step(model: Any, inputs: dict[str, Tensor]) -> float:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(FRAMES), default=list(FRAMES))
    parser.add_argument("--scale", type=int, default=16, help="divisor of the published widths")
    parser.add_argument("--text", type=int, default=128, help="text tokens")
    parser.add_argument("--frames", type=int, help="fewer than text tokens; default: by family")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="lv-xattn")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
