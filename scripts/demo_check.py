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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data import ChatDataset, chat_family, load_local_images
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.processors.mplug_owl3.processing import MPlugOwl3Processor

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


def accuracy(answers: Path, at_least: float) -> int:
    """Return 0 if at least this part of the answers of a data set is correct, else 1."""
    correct = [json.loads(line)["correct"] for line in answers.read_text().splitlines()]
    print(f"accuracy on unseen videos: {sum(correct)} of {len(correct)} right")
    return int(sum(correct) < at_least * len(correct))


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


def count_bytes(model: Path, data: Path, ranks: int) -> int:
    """Print what each strategy sends for frames in one step; return 1 if LV-XAttn sends more than Ring Attention."""
    processor = MPlugOwl3Processor.from_pretrained(model)
    loaded = MPlugOwl3ForConditionalGeneration.from_pretrained(model)
    batch = ChatDataset(data, processor).batch([0])
    with torch.no_grad():
        embeds = loaded.encode_frames(*load_local_images(batch, range(batch.frames), chat_family(processor)))
    inputs: dict[str, Any] = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "labels")}
    inputs |= {**batch.text.extras, "image_embeds": embeds}
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == loaded.config.image_token_id, 0)
    text_only = inputs | {"input_ids": ids, "media_offset": None, "image_embeds": embeds[:0]}

    def step(comm: Communicator, strategy: str, given: dict[str, Any]) -> tuple[float, int]:
        local = copy.deepcopy(loaded)
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
    # Repeated for every query head, K, V, dK and dV have as many times the bytes.
    config, lv, grouped = loaded.config, sent["lv-xattn"], sent["ring"]
    repeated = grouped * config.num_attention_heads // config.num_key_value_heads
    print(
        f"bytes sent by the visual attention of one training step, {ranks} ranks, {batch.frames} frames of "
        f"{embeds.shape[1]} tokens, {ids.shape[1]} text tokens, float32 (losses {losses['lv-xattn']:.6f}, "
        f"{losses['ring']:.6f}):"
    )
    print(f"  LV-XAttn                             {lv / 1e6:9.2f} MB")
    print(f"  Ring Attention, KV heads             {grouped / 1e6:9.2f} MB   LV-XAttn sends {lv / grouped:.1%} of it")
    print(f"  Ring Attention, expanded to heads    {repeated / 1e6:9.2f} MB   LV-XAttn sends {lv / repeated:.1%} of it")
    return int(not 0 < lv < grouped)


CHECKS: dict[Callable[..., int], dict[str, Callable[[str], Any]]] = {
    answers: {"one": Path, "many": Path, "expected": str},
    accuracy: {"answers": Path, "at-least": float},
    evidence: {"one": Path, "many": Path, "data": Path},
    count_bytes: {"model": Path, "data": Path, "ranks": int},
}
"""The options of each command, which are the arguments of its function."""


def main(argv: Sequence[str]) -> int:
    """Run a command; return its exit status, 0 if the check passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for check, options in CHECKS.items():
        command = commands.add_parser(check.__name__.removeprefix("count_"), help=(check.__doc__ or "").splitlines()[0])
        command.set_defaults(check=check)
        for name, kind in options.items():
            command.add_argument(f"--{name}", type=kind, required=True)
    args = vars(parser.parse_args(argv))
    return args.pop("check")(**args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
