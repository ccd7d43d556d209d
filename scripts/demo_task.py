"""The demonstration's task, its model before training, and its score: see mllm_seqpar/data/needle.py.

    python scripts/demo_task.py make DIR                     # videos, train.jsonl, eval.jsonl, long.mp4, model/
    python scripts/demo_task.py score --model DIR/model --data DIR/eval.jsonl --at-least 0.95

The recipe, found by experiment, answers about videos many times longer than those it trains on:
- the rotary base is so large that most channels hardly turn within thousands of frames, so what the question looks for
  in a frame does not depend on how far back the frame lies;
- lengths are even on a logarithmic scale from 2 frames on: short videos teach the colours within a few dozen steps, and
- one video in 9 has 256 to 1,280 frames: against thousands of keys of noise the marker's scores must stand out clearly,
  which short videos alone do not ask for (without these, 2,100 frames: 1 right answer of 12).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import SiglipVisionConfig, set_seed

from mllm_seqpar.data import ChatDataset, load_local_frames
from mllm_seqpar.data.needle import NeedleVideo, make_needle_videos, make_tokenizer, write_needle_jsonl
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration
from mllm_seqpar.models.mplug_owl3.image_processing import MPlugOwl3ImageProcessor
from mllm_seqpar.models.mplug_owl3.processing import MPlugOwl3Processor


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """How much of what is made; `size` pixels a side, `patch` pixels a token's side."""

    short: int = 384
    short_frames: tuple[int, int] = (2, 64)
    longer: int = 48
    longer_frames: tuple[int, int] = (256, 1280)
    unseen: int = 96
    long_frames: int = 2100
    size: int = 32
    patch: int = 8


FINETUNE = "--steps 200 --global-batch 16 --micro-batch 8 --lr 3e-3 --warmup 30 --schedule cosine --weight-decay 0.01"
"""Options of scripts/finetune.py that the recipe was found with."""


def demo_config(tokenizer: Any, task: DemoTask, gate: str | None = "vector") -> MPlugOwl3Config:
    """A small mPLUG-Owl3: two layers of width 128, both with hyper attention; 2 heads over one KV head."""
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=task.size,
        patch_size=task.patch,
    )
    return MPlugOwl3Config(
        gate=gate,
        hyper_layers=[1, 2],
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        vision_config=vision,
    )


def make(folder: Path, task: DemoTask, seed: int = 0, gate: str | None = "vector") -> NeedleVideo:
    """Writes everything below `folder` and returns the long video with its answer."""
    short = make_needle_videos(
        folder / "videos/short", task.short, frames=task.short_frames, size=task.size, seed=seed + 1
    )
    longer = make_needle_videos(
        folder / "videos/longer", task.longer, frames=task.longer_frames, size=task.size, seed=seed + 2
    )
    unseen = make_needle_videos(
        folder / "videos/unseen", task.unseen, frames=task.short_frames, size=task.size, seed=seed + 3
    )
    write_needle_jsonl(folder / "train.jsonl", [*short, *longer])
    write_needle_jsonl(folder / "eval.jsonl", unseen)
    (long,) = make_needle_videos(
        folder / "videos/long", 1, frames=(task.long_frames,) * 2, size=task.size, seed=seed + 4
    )
    write_needle_jsonl(folder / "long.jsonl", [long])
    tokenizer = make_tokenizer()
    set_seed(seed)
    MPlugOwl3ForConditionalGeneration(demo_config(tokenizer, task, gate)).save_pretrained(folder / "model")
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=task.size), tokenizer).save_pretrained(folder / "model")
    return long


def score(model: Any, processor: Any, data: Path, batch_size: int = 16) -> tuple[int, int]:
    """(right answers, questions) of a model on a chat file: the tokens it generates against those of the answers."""
    dataset = ChatDataset(data, processor)
    right = 0
    for start in range(0, len(dataset), batch_size):
        numbers = range(start, min(start + batch_size, len(dataset)))
        samples = [dataset[number] for number in numbers]
        frames = dataset.batch(numbers)
        prompt = processor.encode(
            [sample.messages[:-1] for sample in samples],
            frames_per_video=[len(source) for sample in samples for source in sample.sources],
            add_generation_prompt=True,
            padding_side="left",
        )
        pixels = load_local_frames(frames, range(frames.frames), processor.image_processor)
        with torch.inference_mode():
            made = model.generate(**prompt, pixel_values=pixels, max_new_tokens=4, do_sample=False)
        answers = processor.batch_decode(made[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(a == s.messages[-1]["content"] for a, s in zip(answers, samples, strict=True))
    return right, len(dataset)


def main(argv: Sequence[str]) -> int:
    """The command line; 1 when a score is below what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write videos, chat files and the model before training")
    making.add_argument("folder", type=Path)
    making.add_argument("--frames", type=int, default=DemoTask.long_frames, help="of the long video")
    making.add_argument("--gate", default="vector", choices=("per_head", "vector", "none"))
    making.add_argument("--seed", type=int, default=0)
    scoring = commands.add_parser("score", help="accuracy of a trained model on unseen videos")
    scoring.add_argument("--model", type=Path, required=True)
    scoring.add_argument("--data", type=Path, required=True)
    scoring.add_argument("--at-least", type=float, default=0.0)
    args = parser.parse_args(argv)
    if args.command == "make":
        long = make(
            args.folder, DemoTask(long_frames=args.frames), args.seed, None if args.gate == "none" else args.gate
        )
        print(
            json.dumps({"long_video": long.path, "frames": long.frames, "marker": long.marker, "answer": long.colour})
        )
        return 0
    model = MPlugOwl3ForConditionalGeneration.from_pretrained(args.model).eval()
    right, questions = score(model, MPlugOwl3Processor.from_pretrained(args.model), args.data)
    print(f"accuracy on unseen videos: {right} of {questions} right ({right / questions:.1%})")
    return 0 if right >= args.at_least * questions else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
