"""The conclusions of the demonstration: accuracy, equal answers of one and four processes, evidence, and bytes sent.

python scripts/demo_check.py accuracy --answers answers.jsonl --at-least 0.95
python scripts/demo_check.py answers --one ONE.json --many MANY.json --expected green
python scripts/demo_check.py evidence --one ONE.json --many MANY.json --data long.jsonl
python scripts/demo_check.py bytes --model DIR --data long.jsonl --ranks 4
"""

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data import ChatDataset, chat_family, load_local_images
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.models.mplug_owl3.processing import MPlugOwl3Processor
from mllm_seqpar.schedules.bytes_sent import Problem, expanded, ring_bytes
from mllm_seqpar.sharding import frame_bounds

# Labels of the visual attention's transfers; Ring Attention alone sends k, v, dk, dv.
LABELS = ("q", "o", "do", "delta", "lse", "dq", "k", "v", "dk", "dv")


def answers(one: Path, many: Path, expected: str) -> int:
    """Return 0 if both runs gave the expected answer with the same tokens, else 1."""
    first, second = (json.loads(path.read_text()) for path in (one, many))
    tokens = [[answer["tokens"] for answer in run["answers"]] for run in (first, second)]
    text = second["answers"][0]["text"].strip()
    print(f"answer of {second['ranks']} processes about {second['frames']} frames: {text!r}; expected: {expected!r}")
    print(f"tokens of {second['ranks']} processes and of one: {'the same' if tokens[0] == tokens[1] else 'DIFFERENT'}")
    return int(text != expected or tokens[0] != tokens[1])


def accuracy(answers: Path, least: float) -> int:
    """Return 0 if at least this part of the answers of a data set is correct, else 1."""
    correct = [json.loads(line)["correct"] for line in answers.read_text().splitlines()]
    print(f"accuracy on unseen videos: {sum(correct)} of {len(correct)} right")
    return int(sum(correct) < least * len(correct))


def evidence(one: Path, many: Path, data: Path) -> int:
    """Return 0 if the frame with the marker is in one of the first three moments, the same in both runs, else 1."""
    marker = json.loads(data.read_text())["marker"]
    runs = [json.loads(path.read_text())["answers"][0]["evidence"] for path in (one, many)]
    places = [[n for n, moment in enumerate(run, 1) if moment["first"] <= marker <= moment["last"]] for run in runs]
    found = places[1][0] if places[1] else 0
    if not 1 <= found <= 3 or places[0] != places[1]:
        print(f"the marker is in frame {marker}, which is in moment {places[1]} of 4 processes and {places[0]} of one")
        return 1
    share, other = (run[found - 1]["share"] for run in reversed(runs))
    print(f"the marker is in frame {marker}: moment {found} of the evidence, with {share:.1%} of the attention")
    return int(abs(share - other) > 1e-3)


def count_bytes(model_path: Path, data: Path, ranks: int) -> int:
    """Print what each strategy sends for frames in one step; return 1 if Ring Attention differs from its formula."""
    model = MPlugOwl3ForConditionalGeneration.from_pretrained(model_path)
    processor = MPlugOwl3Processor.from_pretrained(model_path)
    batch = ChatDataset(data, processor).batch([0])
    with torch.no_grad():
        embeds = model.encode_frames(*load_local_images(batch, range(batch.frames), chat_family(processor)))
    names = ("input_ids", "attention_mask", "labels", "media_offset")
    inputs: dict[str, Any] = {name: getattr(batch, name) for name in names} | {"image_embeds": embeds}
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, 0)
    text_only = inputs | {"input_ids": ids, "media_offset": None, "image_embeds": embeds[:0]}

    def step(comm: Communicator, strategy: str, given: dict[str, Any]) -> tuple[float, int]:
        local = copy.deepcopy(model)
        patch_model(local, strategy, group=comm)
        loss = local(**given, use_cache=False).loss
        loss.backward()
        return loss.item(), sum(comm.bytes.sent[label] for label in LABELS)

    # Ring Attention over the text also uses the labels k and v; a step without frames measures its bytes.
    without_frames = run_loopback(ranks, step, "lv-xattn", text_only)
    sent, losses = {}, {}
    for strategy in ("lv-xattn", "ring"):
        results = run_loopback(ranks, step, strategy, inputs)
        losses[strategy] = results[0][0]
        sent[strategy] = sum(total - text for (_, total), (_, text) in zip(results, without_frames, strict=True))
    config = model.config
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    keys = tuple((stop - start) * embeds.shape[1] for start, stop in frame_bounds(batch.frames, ranks))
    dim = config.hidden_size // config.num_attention_heads
    problem = Problem(rows=1, keys=keys, **heads, dim=dim, element=4)
    grouped, repeated = (len(config.hyper_layers) * _ring_total(x) for x in (problem, expanded(problem)))
    if sent["ring"] != grouped:
        print(f"Ring Attention sent {sent['ring']} bytes; the formula says {grouped}")
        return 1
    lv = sent["lv-xattn"]
    print(
        f"bytes sent by the visual attention of one training step, {ranks} ranks, {batch.frames} frames of "
        f"{embeds.shape[1]} tokens, {ids.shape[1]} text tokens, float32 (losses {losses['lv-xattn']:.6f}, "
        f"{losses['ring']:.6f}):"
    )
    print(f"  LV-XAttn                             {lv / 1e6:9.2f} MB")
    print(f"  Ring Attention, KV heads             {grouped / 1e6:9.2f} MB   LV-XAttn sends {lv / grouped:.1%} of it")
    print(f"  Ring Attention, expanded to heads    {repeated / 1e6:9.2f} MB   LV-XAttn sends {lv / repeated:.1%} of it")
    return 0


def _ring_total(problem: Problem) -> int:
    """Return the bytes that Ring Attention sends in forward and backward of one layer, summed over all ranks."""
    calls = [replace(problem, rank=rank) for rank in range(problem.ranks)]
    return sum(sum(ring_bytes(call, backward=b).values()) for call in calls for b in (False, True))


def main(argv: Sequence[str]) -> int:
    """Run a command; return its exit status, 0 if the check passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("answers", help="compare the reports of two inference runs")
    comparing.add_argument("--one", type=Path, required=True)
    comparing.add_argument("--many", type=Path, required=True)
    comparing.add_argument("--expected", required=True)
    scoring = commands.add_parser("accuracy", help="require an accuracy of a data set of questions")
    scoring.add_argument("--answers", type=Path, required=True)
    scoring.add_argument("--at-least", type=float, required=True)
    looking = commands.add_parser("evidence", help="find the marker among the moments of two inference runs")
    looking.add_argument("--one", type=Path, required=True)
    looking.add_argument("--many", type=Path, required=True)
    looking.add_argument("--data", type=Path, required=True)
    counting = commands.add_parser("bytes", help="count the bytes that LV-XAttn and Ring Attention send")
    counting.add_argument("--model", type=Path, required=True)
    counting.add_argument("--data", type=Path, required=True)
    counting.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args(argv)
    if args.command == "answers":
        return answers(args.one, args.many, args.expected)
    if args.command == "accuracy":
        return accuracy(args.answers, args.at_least)
    if args.command == "evidence":
        return evidence(args.one, args.many, args.data)
    return count_bytes(args.model, args.data, args.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
