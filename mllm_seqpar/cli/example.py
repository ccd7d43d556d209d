"""The command `mllm-seqpar example`: a tiny model and a task of short videos, to try every other command in minutes.

It needs neither a checkpoint nor a network. The task is the visual needle of `data.needle`; the model is an mPLUG-Owl3
with two hyper layers and random weights, which learns the task on a CPU. With this recipe, which was found by
experiment, it can answer questions about videos much longer than its training videos:

- The rotary base is so large that most channels hardly rotate within thousands of frames, so attention to a frame does
  not depend on how far back the frame is.
- The lengths of short videos are spread evenly on a logarithmic scale from 2 frames on. These teach the colours within
  a few dozen steps.
- For thousands of frames, one video in 9 has 256 to 1,280 frames (`longer`). Among thousands of keys of noise, the
  scores of the marker must stand out much more than in short videos.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mllm_seqpar.chats.multiple_choice import LETTERS, MultipleChoice
from mllm_seqpar.chats.needle import COLOURS, QUESTION, NeedleVideo, make_needle_videos, make_tokenizer

from .options import CommandOptions, option, parse_options
from .outputs import new_directory

LONGER_FRAMES = 256, 1280
FRAME_SIZE, PATCH_SIZE = 32, 8  # pixels
_OPTIONS = list(COLOURS)
_PROMPT = MultipleChoice(question=QUESTION, options=tuple(COLOURS), answer=None, category=None).prompt()


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(CommandOptions):
    """The options of `mllm-seqpar example`."""

    output: str = option(
        "directory to write; it must be empty or not exist: model, videos, train.jsonl, eval.jsonl, long.mp4"
    )
    short: int = option("videos for training with at most --short_frames frames", 192, least=1)
    short_frames: int = option("frames of the longest short video", 16, least=2)
    longer: int = option(
        "videos for training with 256 to 1,280 frames, so that the model also works for much longer ones", 0, least=0
    )
    unseen: int = option("videos for evaluation", 48, least=1)
    long_frames: int = option("frames of long.mp4", 300, least=2)
    seed: int = option("seed of videos and weights", 0, least=0, below=2**63)


def example(argv: Sequence[str]) -> None:
    """Write the example that the options in `argv` describe, and print the answer about its long video."""
    options = parse_options(
        ExampleOptions,
        argv,
        prog="mllm-seqpar example",
        description="Write a tiny mPLUG-Owl3 with random weights and a data set of short videos, to try the other "
        "commands.\nNeither a checkpoint nor a network is needed. One frame of each video shows a marker; the "
        "question is its colour.",
        example="mllm-seqpar example --output hour",
    )
    with new_directory("output", options.output) as draft:
        long = write_example(replace(options, output=str(draft)))
    long = replace(long, path=str(Path(options.output) / "long.mp4"))
    facts = {"long_video": long.path, "frames": long.frames, "marker": long.marker, "answer": long.colour}
    sys.stdout.write(json.dumps(facts) + "\n")


def write_example(options: ExampleOptions) -> NeedleVideo:
    """Write model, videos and data to `options.output`; return the long video with its answer."""
    folder = Path(options.output)
    kinds = {
        "short": (options.short, (2, options.short_frames)),
        "longer": (options.longer, LONGER_FRAMES),
        "unseen": (options.unseen, (2, options.short_frames)),
        "long": (1, (options.long_frames, options.long_frames)),
    }
    videos = {
        name: make_needle_videos(folder / "videos" / name, count, frames=frames, size=FRAME_SIZE, seed=seed)
        for seed, (name, (count, frames)) in enumerate(kinds.items(), options.seed + 1)
        if count
    }
    training = [*videos["short"], *videos.get("longer", [])]
    # Colours alternate, so that both kinds of questions come for each colour.
    half = len(COLOURS)
    lines = [_choice(x, folder) if i // half % 2 else x.sample(folder) for i, x in enumerate(training)]
    _write_lines(folder / "train.jsonl", lines)
    _write_lines(folder / "eval.jsonl", [_choice(video, folder) for video in videos["unseen"]])
    (long,) = videos["long"]
    long = replace(long, path=str(Path(long.path).rename(folder / "long.mp4")))
    _write_lines(folder / "long.jsonl", [long.sample(folder)])
    save_model(folder / "model", options.seed)
    return long


def save_model(folder: Path, seed: int) -> None:
    """Write a model of two layers of width 128, with 2 query heads and one KV head, and its processor."""
    import torch
    from transformers import SiglipVisionConfig

    from mllm_seqpar.models.mplug_owl3 import MPlugOwl3Config, MPlugOwl3ForConditionalGeneration
    from mllm_seqpar.processors.mplug_owl3.image_processing import MPlugOwl3ImageProcessor
    from mllm_seqpar.processors.mplug_owl3.processing import MPlugOwl3Processor

    tokenizer = make_tokenizer([_PROMPT])
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MPlugOwl3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        hyper_layers=[1, 2],
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        gate="vector",
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        initializer_range=0.1,
        tie_word_embeddings=False,
        vision_config=SiglipVisionConfig(**tower, image_size=FRAME_SIZE, patch_size=PATCH_SIZE),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        MPlugOwl3ForConditionalGeneration(config).save_pretrained(folder)
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=FRAME_SIZE), tokenizer).save_pretrained(folder)


def _choice(video: NeedleVideo, folder: Path) -> dict[str, Any]:
    """Return the question as a record of Video-MME's form."""
    return {
        "video": os.path.relpath(video.path, folder),
        "question": QUESTION,
        "options": _OPTIONS,
        "answer": LETTERS[list(COLOURS).index(video.colour)],
        "duration": "short" if video.frames < 6 else "medium",
    }


def _write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
