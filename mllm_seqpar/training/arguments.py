"""What the fine-tuning script can be told: one frozen dataclass, from which the command line is made."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from mllm_seqpar.config import CHOICES
from mllm_seqpar.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")


def _option(default: Any, text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": text, **extra})


def _required(text: str) -> Any:
    return field(metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Everything that decides a run. `scripts/finetune.py --help` prints the same texts.

    The batch is given as the number of samples of one optimizer step, whatever the layout: the same command line trains
    the same model on 1 process and on 64.
    """

    model: str = _required("directory of the model to start from, safetensors, with its processor")
    data: str = _required("training data: JSONL, one chat a line")
    output: str = _required("directory for metrics, checkpoints and the final model; shared by all nodes")
    eval_data: str | None = _option(None, "evaluation data, same format; loss only")

    sp: int | None = _option(None, "ranks that share one sample (sequence parallel degree); default: all ranks")
    strategy: str = _option("lv-xattn", f"cross-attention: {', '.join(CHOICES['strategy'])}")
    self_attention: str = _option("ring", f"self-attention of the text: {', '.join(CHOICES['self_attention'])}")
    text_layout: str = _option("zigzag", "how text tokens are dealt to ranks: zigzag, striped, contiguous")
    tile: str | None = _option(None, "tile of the mesh strategy, as AxB; not in this version")
    kernel: str = _option("auto", "block attention kernel")
    recompute_visual: bool = _option(True, "recompute K and V of visual tokens in backward instead of keeping them")

    steps: int | None = _option(None, "optimizer steps; default: as many as --epochs gives")
    epochs: float = _option(1.0, "passes over the data when --steps is not given")
    global_batch: int = _option(8, "samples of one optimizer step, over all ranks")
    micro_batch: int = _option(1, "samples of one forward pass of one sequence parallel group")
    stop_after: int | None = _option(None, "save a checkpoint and stop after this step; the schedule is unchanged")

    lr: float = _option(1e-5, "peak learning rate")
    min_lr: float = _option(0.0, "learning rate at the end of the schedule, as a part of --lr")
    schedule: str = _option("cosine", "after the warmup: cosine, linear, constant")
    warmup: float = _option(0.03, "steps of linear warmup, or a part of all steps when below 1")
    weight_decay: float = _option(0.01, "of matrices; vectors (norms, biases, gates) are never decayed")
    beta1: float = _option(0.9, "of AdamW")
    beta2: float = _option(0.95, "of AdamW")
    eps: float = _option(1e-8, "of AdamW")
    clip: float = _option(1.0, "maximal norm of all gradients together; 0 does not clip")

    freeze: str = _option("", "parts that stay as they are, comma-separated: vision, projector, language, or patterns")
    train: str = _option("", "patterns of parameters that train although --freeze covers them, comma-separated")
    gradient_checkpointing: bool = _option(False, "recompute the activations of each layer in backward")

    fps: float | None = _option(None, "frames a second to take of each video; default: the data's own")
    max_frames: int | None = _option(None, "most frames of one video, evenly spaced; default: no limit")
    max_length: int | None = _option(None, "most text tokens of a sample; longer ones are refused")

    eval_every: int = _option(0, "steps between evaluations; 0: only at the end")
    save_every: int = _option(0, "steps between checkpoints; 0: none but that of --stop-after")
    keep: int = _option(2, "checkpoints to keep")
    resume: str | None = _option(None, "continue from a checkpoint: auto (the latest in --output, if any) or its path")
    seed: int = _option(0, "of the order of the data and of all random numbers")
    device: str = _option("auto", "auto, cpu or cuda")
    timeout: float | None = _option(None, "seconds until a silent rank is given up; default: 600 on GPUs, 300 on CPU")
    progress: bool = _option(True, "progress bar on rank 0")

    def __post_init__(self) -> None:
        for name in ("steps", "stop_after", "sp", "max_frames", "max_length", "timeout", "fps"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0")
        for name in ("global_batch", "micro_batch", "keep", "epochs", "lr", "eps"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in ("eval_every", "save_every", "warmup", "weight_decay", "clip"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("min_lr", 0 <= self.min_lr <= 1, "a part of --lr, from 0 to 1")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("device", self.device in ("auto", "cpu", "cuda"), "one of auto, cpu, cuda")
        self.tile_shape()

    def tile_shape(self) -> tuple[int, int] | None:
        """`tile` as two numbers."""
        if self.tile is None:
            return None
        parts = self.tile.lower().split("x")
        self._require("tile", len(parts) == 2 and all(part.isdigit() for part in parts), "two numbers such as 2x2")
        return int(parts[0]), int(parts[1])

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(self, name)!r} is not allowed; give {allowed}")


TRAJECTORY = frozenset(
    {"steps", "epochs", "global_batch", "seed", "lr", "min_lr", "schedule", "warmup", "weight_decay", "beta1", "beta2"}
    | {"eps", "clip", "freeze", "train", "fps", "max_frames", "max_length"}
)
"""The arguments that change the course of the training: a checkpoint continues only under the same ones."""


class _Parser(argparse.ArgumentParser):
    """Reports through an exception: under a launcher every rank parses, and one line is enough."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def parser() -> argparse.ArgumentParser:
    """The command line of `TrainArguments`: underscores become dashes, a bool has a --no- form."""
    made = _Parser(prog="finetune.py", description="Fine-tune a cross-attention MLLM on video, sequence-parallel.")
    for item in fields(TrainArguments):
        flag = "--" + item.name.replace("_", "-")
        required = item.default is dataclasses.MISSING
        text = item.metadata["help"].replace("%", "%%")
        if isinstance(item.default, bool):
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, help=text)
            continue
        shown = "" if required or item.default in (None, "") else f" (default: {item.default})"
        made.add_argument(
            flag, type=_kind(str(item.type)), required=required, default=None if required else item.default,
            help=text + shown, metavar=item.name.upper(),
        )  # fmt: skip
    return made


def _kind(annotation: str) -> type:
    for name, kind in (("int", int), ("float", float)):
        if name in annotation:
            return kind
    return str


def parse(argv: Sequence[str]) -> TrainArguments:
    """The arguments in `argv` (without the program's name).

    Raises:
        ConfigError: an unknown option, a value of the wrong type or out of its range.
    """
    return TrainArguments(**vars(parser().parse_args(argv)))
