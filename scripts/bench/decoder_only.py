"""Measure a decoder-only video model on 1, 2 and 4 ranks: the memory of a training step, and the cost of a second
question.

    python scripts/bench/decoder_only.py [--family qwen2_5_vl|qwen3_vl] [--ranks 1 2 4] [--frames 256 512]
        [--grid 8 8] [--device cpu|cuda] [--questions 2]

The model is the real class with the tiny sizes of the tests, on real ranks. "Peak" is the largest number of bytes
allocated in forward and backward of the rank with most, without weights and their gradients. "Embeddings" are those of
all visual tokens, which a rank would hold if they were gathered. The first question reads the video and prefills it
with its text sharded; later questions continue its cache. The loss and the answers are compared with those of one rank
in the same run.
"""

from __future__ import annotations

import argparse
import gc
import time
from importlib import import_module
from typing import Any

import torch
from measure import peak_memory, print_environment, run_on_ranks, synchronize
from torch import Tensor

from mllm_seqpar import patch_model
from mllm_seqpar.comm import as_communicator

MIB = 2**20
WORDS = 32
"""Tokens of text beside the video's."""


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    print_environment(args.device)
    print("| tokens | ranks | peak, MiB | over one rank | embeddings, MiB | first question, s | next, s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for frames in args.frames:
        alone: dict[str, Any] | None = None
        for ranks in args.ranks:
            found = run_on_ranks(ranks, args.device, 1, measured, args, frames)
            row = found[0] | {"peak": max(rank["peak"] for rank in found)}
            alone = alone or row
            if abs(row["loss"] - alone["loss"]) > 1e-4 * alone["loss"] or row["answers"] != alone["answers"]:
                raise SystemExit(f"decoder_only.py: {ranks} ranks give another loss or other answers than one")
            first, *later = row["seconds"]
            print(
                f"| {row['tokens']:,} | {ranks} | {row['peak'] / MIB:,.1f} | {row['peak'] / alone['peak']:.2f} | "
                f"{row['embeddings'] / MIB:,.1f} | {first:.2f} | {min(later):.3f} | {first / min(later):,.0f} |",
                flush=True,
            )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen2_5_vl", choices=["qwen2_5_vl", "qwen3_vl"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, nargs="+", default=[256, 512], help="temporal patches of the video")
    parser.add_argument("--grid", type=int, nargs=2, default=[16, 16], help="height and width of a frame, in patches")
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    return parser.parse_args(argv)


def measured(args: argparse.Namespace, frames: int) -> dict[str, Any]:
    """Return the loss, the peak bytes, and the answers and seconds of the questions, on this rank."""
    testing = import_module(f"mllm_seqpar.patches.{args.family}.testing")
    tokens = frames * args.grid[0] * args.grid[1] // 4
    marks = frames * 4 if args.family == "qwen3_vl" else 2
    model = testing.tiny_model(max_position_embeddings=1 << 20).to(args.device)
    case = testing.Case(frames=(((frames, *args.grid),),), length=tokens + marks + WORDS)
    inputs = {
        name: x.to(args.device) if isinstance(x, Tensor) else x
        for name, x in testing.local_frames(testing.inputs_of(case, model), None).items()
    }
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    patch_model(model, shard_prompt_from=1)
    gc.collect()
    with peak_memory(torch.device(args.device)) as peak:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
    inputs.pop("labels")
    answers, seconds = ask(model, inputs, case.length, args)
    width = model.config.text_config.hidden_size * (3 if args.family == "qwen3_vl" else 1)
    found = {"loss": loss.item(), "peak": peak.bytes, "answers": answers, "seconds": seconds}
    return found | {"tokens": case.length, "embeddings": tokens * width * 4}


def ask(model: Any, inputs: dict[str, Any], length: int, args: argparse.Namespace) -> tuple[Any, list[float]]:
    """Return the tokens of the answers and the seconds of each question, the first with the video."""
    answers, seconds, more = [], [], dict[str, Any]()
    for number in range(args.questions):
        question = torch.full((1, 8), 5 + number, device=args.device)
        kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(question)], 1)
        given = inputs | {"input_ids": torch.cat([inputs["input_ids"], question], 1), "mm_token_type_ids": kinds}
        as_communicator(None).gather_ints([0])
        start = time.perf_counter()
        out = model.generate(
            **given, **more, max_new_tokens=1, do_sample=False, eos_token_id=None, return_dict_in_generate=True
        )
        synchronize(args.device)
        seconds.append(time.perf_counter() - start)
        answers.append(out.sequences[0, -1:].tolist())
        cache = out.past_key_values
        cache.crop(length - cache.get_seq_length())
        more = {"past_key_values": cache}
    return answers, seconds


if __name__ == "__main__":
    main()
