"""Measure a decoder-only video model on 1, 2 and 4 ranks: the memory of a training step and of a prompt, or the cost
of a second question.

    python scripts/bench/decoder_only.py --part memory [--ranks 1 2 4] [--frames 2048] [--device cpu|cuda]
        [--out rows.jsonl]
    python scripts/bench/decoder_only.py --part questions [--rounds 3] [--frames 512] ...

The model is Qwen3-VL's class with a tiny width, on real ranks. It has the proportions of the published 8B model: inner
width 3 C, queries C, keys and values C / 4 each, three layers with deepstack. Its vocabulary is tiny.

The part "memory": the largest number of bytes allocated on the rank with most, without weights and their gradients, in
forward and backward of a training step with a frozen vision tower and gradient checkpointing ("peak"), and in the pass
over a prompt that stores K and V ("prefill"). On a CPU, attention blocks return zeros at once: transfers and buffers
are those of real ones, and 128K tokens take seconds. A single rank, whose prompt takes torch's own attention, measures
the step only.

The part "questions": in each round, a first question reads the video and prefills it with its text sharded, and two
more questions continue its cache. They compute real attention. Times are medians over rounds, of the processor time of
all ranks together and of the clock.

The loss or the answers are compared with those of the first number of ranks in the same run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any

import harness
import report
import torch
from harness import synchronize
from network_calls import EmulatedKernel
from torch import Tensor

from memory_meters import peak_memory
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import as_communicator
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
    args = parse()
    harness.run(args, rows_of, report.decoder_only_table if args.part == "memory" else report.questions_table)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for frames in args.frames:
        alone: torch.Tensor | None = None
        for ranks in args.ranks:
            found = harness.run_on_ranks(ranks, args, measured, frames)
            result = torch.tensor(found[0]["result"])
            alone = result if alone is None else alone
            if not torch.allclose(result, alone, rtol=1e-4):
                raise SystemExit(f"decoder_only.py: {ranks} ranks give another loss or other answers than the first")
            facts = {"family": "qwen3_vl", "tokens": found[0]["tokens"], "ranks": ranks, "layers": LAYERS}
            facts["attention"] = "emulated" if args.part == "memory" and args.device == "cpu" else "real"
            yield facts | (peaks if args.part == "memory" else medians)(found)


def peaks(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the columns of the part "memory": those of the rank with most."""
    return {name: max(rank["mib"][name] for rank in found) for name in found[0]["mib"]}


def medians(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the columns of the part "questions": medians of the first questions, and of the later ones."""
    cpu_seconds = [sum(each) for each in zip(*(rank["cpu_seconds"] for rank in found), strict=True)]
    line: dict[str, float] = {}
    for name, seconds in {"cpu_s": cpu_seconds, "s": found[0]["seconds"]}.items():
        later = [value for index, value in enumerate(seconds) if index % (1 + LATER)]
        line |= {f"first_{name}": median(seconds[:: 1 + LATER]), f"next_{name}": median(later)}
    return line


def parse() -> argparse.Namespace:
    parser = harness.options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, nargs="+", default=[2048], help="temporal patches of the video")
    parser.add_argument("--part", choices=["memory", "questions"], required=True, help="what to measure")
    parser.add_argument("--rounds", type=int, default=3, help="of questions")
    return parser.parse_args()


def measured(args: argparse.Namespace, frames: int) -> dict[str, Any]:
    """Return the number of tokens, the loss or the answers as `result`, and the peaks or the times, on this rank."""
    text: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1 << 20}
    text |= {"intermediate_size": 192, "num_key_value_heads": 1, "deepstack": (0, 1, 2)}
    model = tiny_model("qwen3_vl", **text).to(args.device)
    # Few tokens have a target, as in fine-tuning on chats.
    case = qwen3_vl.Case(frames=(((frames, *GRID),),), length=frames * TOKENS + WORDS, labels="few")
    inputs = {
        name: x.clone().to(args.device) if isinstance(x, Tensor) else x  # not a view of the pixels of all ranks
        for name, x in qwen3_vl.local_frames(qwen3_vl.inputs_of(case, model), None).items()
    }
    found = (memory_of_passes if args.part == "memory" else ask)(model, inputs, args)
    return found | {"tokens": case.length}


def memory_of_passes(model: Any, inputs: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the peaks of a training step and of a prompt, in MiB, and the loss."""
    model.model.visual.requires_grad_(False)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    kernel = EmulatedKernel(float("inf"))
    found: dict[str, float] = {}
    with kernel.registered():
        patch_model(model, shard_prompt_from=1, kernel=kernel.name if args.device == "cpu" else "auto")
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        with peak_of_pass(args.device) as peak:
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
        found["peak_mib"] = peak.bytes / MIB
        model.eval().gradient_checkpointing_disable()
        if as_communicator(None).size > 1:  # a single rank's prompt takes torch's own attention
            prompt = {name: x for name, x in inputs.items() if name != "labels"}
            with torch.no_grad(), peak_of_pass(args.device) as peak:
                model(**prompt, use_cache=True, logits_to_keep=1)
            found["prefill_mib"] = peak.bytes / MIB
    return {"mib": found, "result": [loss.item()]}


@contextmanager
def peak_of_pass(device: str) -> Iterator[SimpleNamespace]:
    """Measure the peak `bytes` of the pass inside, which allocates its own receive buffers."""
    gc.collect()
    as_communicator(None).kept.buffers.clear()
    with peak_memory(torch.device(device)) as peak:
        yield peak
        synchronize(device)


def ask(model: Any, inputs: dict[str, Any], args: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the tokens of the answers, and the times of all questions, those of a round one after another."""
    inputs.pop("labels")
    length = inputs["input_ids"].shape[1]
    patch_model(model.eval(), shard_prompt_from=1)
    times: dict[str, list[Any]] = {"result": [], "cpu_seconds": [], "seconds": []}
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
        times["result"].append(out.sequences[0, -1:].tolist())
        cache = cache_of(out)
        cache.crop(length - cache.get_seq_length())
    return times


if __name__ == "__main__":
    main()
