"""Measure a decoder-only video model on 1, 2 and 4 ranks: the memory of a training step, and the cost of a second
question.

    python scripts/bench/decoder_only.py [--family qwen2_5_vl|qwen3_vl] [--ranks 1 2 4] [--frames 512] [--grid 32 32]
        [--layers 2] [--heads 1] [--device cpu|cuda] [--questions 4] [--real] [--out ROWS.csv]

The model is the real class with the widths of the tests, on real ranks. "Peak" is the largest number of bytes allocated
in forward and backward of the rank with most, without weights and their gradients, with a frozen vision tower and
gradient checkpointing. Its attention blocks return zeros at once unless --real is given: transfers and buffers are the
same, and 128K tokens take seconds on a CPU. "Gathered" is the same step if each rank gathers the embeddings of all
frames and takes those of its rows, as frameworks with context parallelism do. "Exchange" is the peak of bringing the
embeddings to their rows and their gradients back, alone, for both ways.

The first question reads the video and prefills it with its text sharded; later questions continue its cache. They
compute real attention. The loss and the answers are compared with those of the first number of ranks in the same run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import rows
import torch
from measure import environment, peak_memory, print_environment, run_on_ranks, synchronize
from network_run import EmulatedKernel
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.runtime.visual_tokens import TokenPlaces, VisualTokens

MIB = 2**20
WORDS = 32
"""Tokens of text beside the video's."""


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    print_environment(args.device)
    for frames in args.frames:
        alone: dict[str, Any] | None = None
        for ranks in args.ranks:
            found = run_on_ranks(ranks, args.device, 1, measured, args, frames)
            row = found[0] | {name: max(rank["mib"][name] for rank in found) for name in found[0]["mib"]}
            alone = alone or row
            if abs(row["loss"] - alone["loss"]) > 1e-4 * alone["loss"] or row["answers"] != alone["answers"]:
                raise SystemExit(f"decoder_only.py: {ranks} ranks give another loss or other answers than the first")
            report(args, ranks, row)


def report(args: argparse.Namespace, ranks: int, row: dict[str, Any]) -> None:
    """Print the row of one number of ranks, and append it to the file of rows."""
    first, *later = row["seconds"]
    line = {
        "family": args.family,
        "tokens": row["tokens"],
        "ranks": ranks,
        "layers": args.layers,
        "attention": "real" if args.real else "emulated",
        **{name: row[name] for name in row["mib"]},
        "first_s": first,
        "next_s": median(later),
    }
    print(", ".join(f"{name} {value}" for name, value in rows.digits(line).items()), flush=True)
    if args.out:
        rows.append(args.out, [rows.digits(line | environment(args.device) | {"threads": 1})])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_vl", choices=["qwen2_5_vl", "qwen3_vl"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, nargs="+", default=[512], help="temporal patches of the video")
    parser.add_argument("--grid", type=int, nargs=2, default=[32, 32], help="height and width of a frame, in patches")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=1, help="of Qwen3-VL; Qwen2.5-VL has 4")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--real", action="store_true", help="compute the attention of the training step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", help="CSV file to append the rows to")
    return parser.parse_args(argv)


def measured(args: argparse.Namespace, frames: int) -> dict[str, Any]:
    """Return the loss, the peak bytes of both steps, and the answers and seconds of the questions, on this rank."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    testing = import_module(f"tiny_models.{args.family}")
    tokens = frames * args.grid[0] * args.grid[1] // 4
    marks = frames * 4 if args.family == "qwen3_vl" else 2
    text: dict[str, Any] = {"num_hidden_layers": args.layers, "max_position_embeddings": 1 << 20}
    if args.family == "qwen3_vl":
        text |= {"num_attention_heads": args.heads, "num_key_value_heads": 1}
    model = testing.tiny_model(**text).to(args.device)
    case = testing.Case(frames=(((frames, *args.grid),),), length=tokens + marks + WORDS)
    inputs = {
        name: x.clone().to(args.device) if isinstance(x, Tensor) else x  # not a view of the pixels of all ranks
        for name, x in testing.local_frames(testing.inputs_of(case, model), None).items()
    }
    found, loss = memory_of_steps(model, inputs, args)
    unpatch_model(model)
    inputs.pop("labels")
    patch_model(model.eval(), shard_prompt_from=1)
    answers, seconds = ask(model, inputs, case.length, args)
    return {"loss": loss, "mib": found, "answers": answers, "seconds": seconds, "tokens": case.length}


def memory_of_steps(model: Any, inputs: dict[str, Any], args: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return the peaks of a training step and of the exchange alone, both ways, in MiB, and the loss."""
    model.train().model.visual.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    kernel = EmulatedKernel(float("inf"))
    with nullcontext() if args.real else kernel.registered():
        patch_model(model, kernel="auto" if args.real else kernel.name)
        places: list[Any] = []
        found, losses = {}, []
        for name, routes in (("", TokenPlaces.routes), ("gathered_", GatheredRoutes)):
            with mock.patch.object(TokenPlaces, "routes", lambda *given, r=routes: places.append(given) or r(*given)):
                peak, loss = step(model, inputs, args.device)
            losses.append(loss)
            found[f"{name}peak_mib"] = peak / MIB
            width = model.config.text_config.hidden_size * (3 if args.family == "qwen3_vl" else 1)
            found[f"{name}exchange_mib"] = exchange_peak(routes, places[-1], width) / MIB
    assert abs(losses[1] - losses[0]) <= 1e-4 * losses[0], losses
    model.zero_grad()
    return found, losses[0]


def step(model: Any, inputs: dict[str, Any], device: str) -> tuple[int, float]:
    """Return the peak bytes and the loss of a training step."""
    gc.collect()
    as_communicator(None).kept.buffers.clear()  # so that each step allocates its own
    with peak_memory(torch.device(device)) as peak:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        synchronize(device)
    return peak.bytes, loss.item()


def exchange_peak(routes: Any, given: Any, width: int) -> int:
    """Return the peak bytes of bringing embeddings of this width to their rows, and their gradients back."""
    places, _, rank = given
    count = int(places.bounds[rank + 1] - places.bounds[rank])
    own = torch.randn(count, width, requires_grad=True)
    with peak_memory(own.device) as peak:
        routes(*given).exchange(own, as_communicator(None)).embeddings.sum().backward()
    return peak.bytes


class GatheredRoutes:
    """In place of `TokenRoutes`: each rank gathers all embeddings, and takes those of its rows."""

    def __init__(self, places: TokenPlaces, positions: Sequence[Tensor], rank: int) -> None:
        own = positions[rank]
        place = torch.full((1 + int(max(places.positions.max(), own.max())),), -1)
        place[own] = torch.arange(own.numel())
        row = place[places.positions]
        here = (row >= 0).nonzero().flatten()
        self._index, order = (places.samples[here] * own.numel() + row[here]).sort()
        self._numbers = places.embeddings[here][order]
        self._counts = places.bounds.diff().tolist()

    def exchange(self, embeddings: Tensor, comm: Communicator) -> VisualTokens:
        whole: Tensor = _GatherRows.apply(embeddings, self._counts, comm)
        return VisualTokens(whole[self._numbers.to(whole.device)], self._index.to(whole.device))


@dataclass
class _Gathered:
    comm: Communicator
    counts: list[int]


class _GatherRows(torch.autograd.Function):
    """(x, W) of this rank -> (N, W) of all ranks; backward sums over ranks, and takes the rows of this rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], comm: Communicator) -> Tensor:
        ctx.given = _Gathered(comm, counts)
        padded = torch.nn.functional.pad(own, (0, 0, 0, max(counts) - own.shape[0]))
        parts = comm.all_gather(padded, "gathered embeddings")
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        comm, counts = ctx.given.comm, ctx.given.counts
        return comm.all_reduce(grad, "gathered embeddings").split(counts)[comm.rank].contiguous(), None, None


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
