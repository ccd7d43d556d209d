"""Time an epoch on stored outputs of the frozen vision tower against the epoch that computes and stores them.

    python scripts/bench/stored_tower.py [--tower demo|so400m] [--videos 24] [--frames 64] [--csv rows.csv]

Three runs of one epoch train the language model of `mllm-seqpar example` in this process: `plain_s` decodes and encodes
every frame, `stored_s` also stores what the tower returns (`finetune --features`), `read_s` reads it. The seconds are
`train_runtime`, without loading. `so400m` is a tower of the size of SigLIP-so400m with random weights, for 378 x 378
pixels. The benchmark fails if the three runs have different losses. `ratio` is read_s / stored_s: the second epoch over
the first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import print_environment
from rows import append, as_text

from mllm_seqpar.cli.example import save_model
from mllm_seqpar.data.needle import make_needle_videos, write_needle_jsonl
from mllm_seqpar.training.finetune import fine_tune

SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=["demo", "so400m"], default="demo")
    parser.add_argument("--videos", type=int, default=24)
    parser.add_argument("--frames", type=int, default=64, help="frames of each video")
    parser.add_argument("--csv", type=Path, help="append the row to this file")
    args = parser.parse_args()
    print_environment("cpu")
    with tempfile.TemporaryDirectory() as scratch:
        row = measure(args, Path(scratch))
    print(", ".join(f"{key} {value}" for key, value in as_text([row])[0].items()), flush=True)
    if args.csv:
        append(args.csv, [row], "cpu")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    videos = make_needle_videos(folder / "videos", args.videos, frames=(args.frames, args.frames))
    write_needle_jsonl(folder / "train.jsonl", videos)
    save_model(folder / "model", seed=0)
    if args.tower == "so400m":
        enlarge_tower(folder / "model")
    runs = {"plain": [], "stored": ["--features", "features"], "read": ["--features", "features"]}
    logs = {name: train(folder, name, more) for name, more in runs.items()}
    losses = {name: [row["loss"] for row in log if "loss" in row] for name, log in logs.items()}
    if not losses["plain"] == losses["stored"] == losses["read"]:
        raise SystemExit(f"the runs have different losses: {losses}")
    seconds = {f"{name}_s": round(log[-1]["train_runtime"], 2) for name, log in logs.items()}
    stored = sum(path.stat().st_size for path in (folder / "features").rglob("*.safetensors"))
    row = {
        "tower": args.tower,
        "videos": args.videos,
        "frames": args.videos * args.frames,
        "stored_mb": stored // 10**6,
    }
    return row | seconds | {"ratio": round(seconds["read_s"] / seconds["stored_s"], 3)}


def enlarge_tower(model: Path) -> None:
    """Replace the vision tower of the model by one of the size of SigLIP-so400m."""
    from transformers import SiglipVisionConfig

    from mllm_seqpar.models.mplug_owl3 import (
        MPlugOwl3Config,
        MPlugOwl3ForConditionalGeneration,
        MPlugOwl3ImageProcessor,
        MPlugOwl3Processor,
    )

    config = MPlugOwl3Config.from_pretrained(model)
    config.vision_config = SiglipVisionConfig(**SO400M, image_size=378, patch_size=14)
    tokenizer = MPlugOwl3Processor.from_pretrained(model).tokenizer
    torch.manual_seed(0)
    MPlugOwl3ForConditionalGeneration(config).save_pretrained(model)
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=378), tokenizer).save_pretrained(model)


def train(folder: Path, name: str, more: list[str]) -> list[dict[str, Any]]:
    argv = ["--model", folder / "model", "--data", folder / "train.jsonl", "--output_dir", folder / name, "--use_cpu"]
    argv += ["--freeze", "vision", "--save_strategy", "no", "--disable_tqdm", True, "--warmup_steps", 0]
    fine_tune([*map(str, argv), *(str(folder / text) if text == "features" else text for text in more)])
    return json.loads((folder / name / "trainer_state.json").read_text())["log_history"]


if __name__ == "__main__":
    main()
