"""Measure a decoder-only video model on 1, 2 and 4 ranks: the memory of a training step and of a prompt, and the cost
of a second question.

    python scripts/bench/decoder_only.py [--ranks 1 2 4] [--frames 2048] [--device cpu|cuda] [--part memory|questions]
        [--rounds 3] [--real] [--vocabulary N] [--logits auto|...] [--out rows.jsonl]

The model is Qwen3-VL's class with a tiny width, on real ranks. It has the proportions of the published 8B model: inner
width 3 C, queries C, keys and values C / 4 each, three layers with deepstack. Its vocabulary is tiny.

"Peak" is the largest number of bytes allocated on the rank with most, without weights and their gradients: in forward
and backward of a training step with a frozen vision tower and gradient checkpointing, and in the pass over a prompt
that stores K and V ("prefill"). Attention blocks return zeros at once unless --real is given: transfers and buffers are
the same, and 128K tokens take seconds on a CPU. A single rank, whose prompt takes torch's own attention, then measures
the step only.

In each round, a first question reads the video and prefills it with its text sharded, and two more questions continue
its cache. They compute real attention. Times are medians over rounds, of the processor time of all ranks together and
of the clock. The loss and the answers are compared with those of the first number of ranks in the same run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import harness
import torch
from harness import synchronize
from network_calls import EmulatedKernel
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.config import CHOICES
from peak_memory import peak_memory
from tiny_models import qwen3_vl, tiny_model

MIB = 2**20
LAYERS = 3
GRID = 16, 16
"""Height and width of a frame, in patches."""
TOKENS = GRID[0] * GRID[1] // 4 + 4
"""Tokens of a temporal patch, with its timestamp and marks."""
WORDS = 32
"""Tokens of text beside the video's."""
LATER = 2
"""Questions of a round behind the first."""


def main() -> None:
    harness.run(parse(), rows_of)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for frames in args.frames:
        alone: dict[str, Any] | None = None
        for ranks in args.ranks:
            found = harness.run_on_ranks(ranks, args, measured, frames)
            row = found[0] | {name: max(rank["mib"][name] for rank in found) for name in found[0]["mib"]}
            row["cpu_seconds"] = [sum(each) for each in zip(*(rank["cpu_seconds"] for rank in found), strict=True)]
            alone = alone or row
            if abs(row["loss"] - alone["loss"]) > 1e-4 * alone["loss"] or row["answers"] != alone["answers"]:
                raise SystemExit(f"decoder_only.py: {ranks} ranks give another loss or other answers than the first")
            yield columns(args, ranks, row)


def columns(args: argparse.Namespace, ranks: int, row: dict[str, Any]) -> dict[str, Any]:
    line = {
        "family": "qwen3_vl",
        "tokens": row["tokens"],
        "ranks": ranks,
        "layers": LAYERS,
        "attention": "real" if args.real or args.part == "questions" else "emulated",
        **{name: row[name] for name in row["mib"]},
    }
    for name in ("cpu_seconds", "seconds") if row["seconds"] else ():
        firsts = row[name][:: 1 + LATER]
        later = [value for index, value in enumerate(row[name]) if index % (1 + LATER)]
        short = name.replace("econds", "")
        line |= {f"first_{short}": median(firsts), f"next_{short}": median(later)}
    return line


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, nargs="+", default=[2048], help="temporal patches of the video")
    parser.add_argument("--part", choices=["memory", "questions"], help="measure only one of the two; default: both")
    parser.add_argument("--rounds", type=int, default=3, help="of questions")
    parser.add_argument("--vocabulary", type=int, help="default: tiny")
    parser.add_argument("--logits", choices=CHOICES["logits"], default="auto", help="of the training step")
    parser.add_argument("--real", action="store_true", help="compute the attention of the training step")
    return parser.parse_args()


def measured(args: argparse.Namespace, frames: int) -> dict[str, Any]:
    """Return the loss, the peak bytes of both steps, and the answers and seconds of the questions, on this rank."""
    text: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1 << 20}
    text |= {"intermediate_size": 192, "num_key_value_heads": 1, "deepstack": (0, 1, 2)}
    if args.vocabulary:
        text["vocab_size"] = args.vocabulary
    model = tiny_model("qwen3_vl", **text).to(args.device)
    # Few tokens have a target, as in fine-tuning on chats.
    case = qwen3_vl.Case(frames=(((frames, *GRID),),), length=frames * TOKENS + WORDS, labels="few")
    inputs = {
        name: x.clone().to(args.device) if isinstance(x, Tensor) else x  # not a view of the pixels of all ranks
        for name, x in qwen3_vl.local_frames(qwen3_vl.inputs_of(case, model), None).items()
    }
    found: dict[str, Any] = {"mib": {}, "loss": 0.0, "answers": [], "cpu_seconds": [], "seconds": []}
    if args.part != "questions":
        found |= memory_of_passes(model, inputs, args)
        unpatch_model(model)
    inputs.pop("labels")
    if args.part != "memory":
        patch_model(model.eval(), shard_prompt_from=1)
        found |= ask(model, inputs, case.length, args)
    return found | {"tokens": case.length}


def memory_of_passes(model: Any, inputs: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the peaks of a training step and of a prompt, in MiB, and the loss."""
    model.model.visual.requires_grad_(False)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    kernel = EmulatedKernel(float("inf"))
    found: dict[str, float] = {}
    with nullcontext() if args.real else kernel.registered():
        patch_model(model, shard_prompt_from=1, kernel="auto" if args.real else kernel.name, logits=args.logits)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        with peak_of_pass(args.device) as peak:
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
        found["peak_mib"] = peak.bytes / MIB
        model.eval().gradient_checkpointing_disable()
        if args.real or as_communicator(None).size > 1:  # a single rank's prompt takes torch's own attention
            prompt = {name: x for name, x in inputs.items() if name != "labels"}
            with torch.no_grad(), peak_of_pass(args.device) as peak:
                model(**prompt, use_cache=True, logits_to_keep=1)
            found["prefill_mib"] = peak.bytes / MIB
    model.zero_grad()
    return {"mib": found, "loss": loss.item()}


@contextmanager
def peak_of_pass(device: str) -> Iterator[SimpleNamespace]:
    """Measure the peak `bytes` of the pass inside, which allocates its own receive buffers."""
    gc.collect()
    as_communicator(None).kept.buffers.clear()
    with peak_memory(torch.device(device)) as peak:
        yield peak
        synchronize(device)


def ask(model: Any, inputs: dict[str, Any], length: int, args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the tokens of the answers, and the times of all questions, those of a round one after another."""
    times: dict[str, list[Any]] = {"answers": [], "cpu_seconds": [], "seconds": []}
    for number in range(args.rounds * (1 + LATER)):
        more: dict[str, Any] = {} if number % (1 + LATER) == 0 else cache_argument(cache)  # noqa: F821
        question = torch.full((1, 8), 5 + number, device=args.device)
        kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(question)], 1)
        given = inputs | {"input_ids": torch.cat([inputs["input_ids"], question], 1), "mm_token_type_ids": kinds}
        as_communicator(None).gather_ints([0])
        start, cpu_start = time.perf_counter(), time.process_time()
        out = model.generate(
            **given, **more, max_new_tokens=1, do_sample=False, eos_token_id=None, return_dict_in_generate=True
        )
        synchronize(args.device)
        times["seconds"].append(time.perf_counter() - start)
        times["cpu_seconds"].append(time.process_time() - cpu_start)
        times["answers"].append(out.sequences[0, -1:].tolist())
        cache = cache_of(out)
        cache.crop(length - cache.get_seq_length())
    return times


if __name__ == "__main__":
    main()
