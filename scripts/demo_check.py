"""What the demo concludes from its runs: the answers of one and of four processes, and the bytes that were sent.

python scripts/demo_check.py answers --one ONE.json --many MANY.json --expected green
python scripts/demo_check.py bytes --model DIR --data long.jsonl --ranks 4
"""

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data import ChatDataset, load_local_frames
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.models.mplug_owl3.processing import MPlugOwl3Processor
from mllm_seqpar.schedules.bytes_sent import Problem, expanded, ring_bytes

# Labels under which the visual attention's transfers are counted; what only "ring" sends is k, v, dk, dv.
ATTENTION = ("q", "o", "do", "lse", "dq", "k", "v", "dk", "dv")


def answers(one: Path, many: Path, expected: str) -> int:
    """0 when both runs gave the expected answer in the same tokens."""
    first, second = (json.loads(path.read_text()) for path in (one, many))
    tokens = [[answer["tokens"] for answer in run["answers"]] for run in (first, second)]
    text = second["answers"][0]["text"].strip()
    print(f"answer of {second['ranks']} processes about {second['frames']} frames: {text!r}; expected: {expected!r}")
    print(f"tokens of {second['ranks']} processes and of one: {'the same' if tokens[0] == tokens[1] else 'DIFFERENT'}")
    return int(text != expected or tokens[0] != tokens[1])


def count_bytes(model_path: Path, data: Path, ranks: int) -> int:
    """Prints what the visual attention of one training step on the long video sends, by each strategy."""
    model = MPlugOwl3ForConditionalGeneration.from_pretrained(model_path)
    processor = MPlugOwl3Processor.from_pretrained(model_path)
    batch = ChatDataset(data, processor).batch([0])
    with torch.no_grad():
        embeds = model.encode_frames(load_local_frames(batch, range(batch.frames), processor.image_processor))
    names = ("input_ids", "attention_mask", "labels", "media_offset")
    inputs = {name: getattr(batch, name) for name in names} | {"image_embeds": embeds}

    def step(comm: Communicator, strategy: str | None) -> tuple[float, int]:
        mine = copy.deepcopy(model)
        patch_model(mine, strategy or "lv-xattn", group=comm)
        given = inputs if strategy else {**inputs, "image_embeds": embeds[:0]} | text_only
        loss = mine(**given, use_cache=False).loss
        loss.backward()
        return loss.item(), sum(comm.bytes.sent[label] for label in ATTENTION)

    # The text's own ring attention uses labels k, v too: a step without frames says how much that is.
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, 0)
    text_only = {"input_ids": ids, "media_offset": None}
    without = run_loopback(ranks, step, None)
    sent, losses = {}, {}
    for strategy in ("lv-xattn", "ring"):
        results = run_loopback(ranks, step, strategy)
        losses[strategy] = results[0][0]
        sent[strategy] = sum(own - text for (_, own), (_, text) in zip(results, without, strict=True))
    config = model.config
    kept = sum(
        sum(ring_bytes(_problem(config, batch.frames, embeds.shape[1], ranks, rank), backward=backward).values())
        for rank in range(ranks)
        for backward in (False, True)
    ) * len(config.hyper_layers)
    grown = sum(
        sum(
            ring_bytes(
                expanded(_problem(config, batch.frames, embeds.shape[1], ranks, rank)), backward=backward
            ).values()
        )
        for rank in range(ranks)
        for backward in (False, True)
    ) * len(config.hyper_layers)
    if sent["ring"] != kept:
        print(f"Ring Attention sent {sent['ring']} bytes; the formula says {kept}")
        return 1
    lv = sent["lv-xattn"]
    print(
        f"bytes sent by the visual attention of one training step, {ranks} ranks, {batch.frames} frames of "
        f"{embeds.shape[1]} tokens, {ids.shape[1]} text tokens, float32 (losses {losses['lv-xattn']:.6f}, "
        f"{losses['ring']:.6f}):"
    )
    print(f"  LV-XAttn                             {lv / 1e6:9.2f} MB")
    print(f"  Ring Attention, K and V unexpanded   {kept / 1e6:9.2f} MB   LV-XAttn sends {lv / kept:.1%} of it")
    print(f"  Ring Attention, expanded to heads    {grown / 1e6:9.2f} MB   LV-XAttn sends {lv / grown:.1%} of it")
    return 0


def _problem(config: object, frames: int, tokens: int, ranks: int, rank: int) -> Problem:
    base, extra = divmod(frames, ranks)
    return Problem(
        rows=1,
        keys=tuple((base + (other < extra)) * tokens for other in range(ranks)),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=config.hidden_size // config.num_attention_heads,
        rank=rank,
        element=4,
    )


def main(argv: Sequence[str]) -> int:
    """The command line; 0 when what was asked for holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("answers", help="compare the reports of two inference runs")
    comparing.add_argument("--one", type=Path, required=True)
    comparing.add_argument("--many", type=Path, required=True)
    comparing.add_argument("--expected", required=True)
    counting = commands.add_parser("bytes", help="count what LV-XAttn and Ring Attention send")
    counting.add_argument("--model", type=Path, required=True)
    counting.add_argument("--data", type=Path, required=True)
    counting.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args(argv)
    if args.command == "answers":
        return answers(args.one, args.many, args.expected)
    return count_bytes(args.model, args.data, args.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
