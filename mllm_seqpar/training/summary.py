"""The summary of a run: a block before its first step, and the model card of its result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from torch import nn

from mllm_seqpar import __version__
from mllm_seqpar.patching.registry import find_adapter

from .arguments import FineTuneOptions
from .finetune_trainer import FineTuneTrainer

_CARD_OPTIONS = (
    *("strategy", "self_attention", "sp", "fps", "max_frames", "freeze", "train", "global_batch_size"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "load_in_4bit"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "bf16", "seed"),
)
"""Options that the model card shows if they are set."""


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained parameters and of all parameters. Weights in 4 bits count as before packing."""
    count: Any = getattr(model, "get_nb_trainable_parameters", None)  # PEFT's
    if count is not None:
        trained, every = count()
        return int(trained), int(every)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def run_summary(trainer: FineTuneTrainer, options: FineTuneOptions, steps: int, checkpoint: Path | None) -> str:
    """Return the block that precedes the first step.

    Args:
        steps: the last step of the schedule.
        checkpoint: the one that the run continues from, or None.
    """
    args, run, order, degree = options.training, options.run, trainer.data.order, trainer.sequence_parallel_size
    trained, every = trainable_parameters(trainer.model)
    rows = {
        "model": f"{type(find_adapter(trainer.model)[1]).__name__} from {run.model}",
        "trainable": f"{trained:,} of {every:,} parameters ({100 * trained / every:.3g}%)"
        + (f", LoRA of rank {run.lora_r}" if run.use_peft else ""),
        "data": f"{run.data}, {len(trainer.data.training):,} samples",
    }
    if trainer.data.evaluation is not None:
        rows["evaluation"] = f"{run.eval_data}, {len(trainer.data.evaluation):,} samples"
    rows["steps"] = f"{steps:,}, {order.steps_per_epoch:,} an epoch"
    rows["global batch"] = f"{order.global_batch} samples, in {order.micro_batches} forward passes of each rank"
    rows["ranks"] = f"{order.dp} data parallel x {degree} sequence parallel ranks, {_device(args)}"
    rows["weights"] = _placement(trainer, args)
    seqpar = options.seqpar
    rows["attention"] = f"{seqpar.strategy}; of the text {seqpar.self_attention}, {seqpar.text_layout}"
    rows["time"] = "estimated in each row (ETA), from the second step on"
    rows["output"] = str(args.output_dir)
    if checkpoint is not None:
        rows["continues"] = str(checkpoint)
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows.items())


def _device(args: Any) -> str:
    if args.device.type != "cpu":
        return torch.cuda.get_device_name(args.device)
    return "on the CPU" if torch.cuda.device_count() else "on the CPU: torch finds no GPU"


def _placement(trainer: FineTuneTrainer, args: Any) -> str:
    if args.world_size == 1:
        return "whole, on one rank"
    if trainer.is_fsdp_enabled:
        return f"sharded over {args.world_size} ranks (FSDP2)"
    return "replicated on each rank (DDP); --shard_weights shards them"


def model_card(options: FineTuneOptions, log: Sequence[Mapping[str, Any]], samples: int, steps: int) -> str:
    """Return the README.md of the result: the base model, the data, the options and the losses.

    Args:
        log: `log_history` of the trainer's state.
        samples: number of training samples.
        steps: number of steps that were trained.
    """
    run = options.run
    base = str(run.model)
    is_directory = os.path.exists(base)
    base = os.path.abspath(base) if is_directory else base.partition("@")[0]  # without the revision
    kind = "LoRA adapters" if run.use_peft else "A model"
    # The Hub refuses an upload whose card has a path as its base model.
    metadata = ModelCardData(
        base_model=None if is_directory else base,
        library_name="peft" if run.use_peft else "transformers",
        tags=["lora", "mllm-seqpar"] if run.use_peft else ["mllm-seqpar"],
    )
    given = {**vars(options.training), **vars(run), **vars(options.frames), **vars(options.parallel)}
    names = [name for name in _CARD_OPTIONS if run.use_peft or not name.startswith("lora_")]
    shown = {name: given[name] for name in names if given[name] not in (None, [], False)}
    losses = {name: [row[name] for row in log if name in row] for name in ("loss", "eval_loss")}
    results = [f"- {text}: {losses[name][-1]:.4g}" for name, text in _RESULTS.items() if losses[name]]
    packages = ["torch", "transformers", "accelerate", *(["peft"] if run.use_peft else [])]
    lines = [
        "---",
        metadata.to_yaml(),
        "---",
        "",
        f"# {Path(str(options.training.output_dir)).absolute().name}",
        "",
        f"{kind} fine-tuned from `{base}` on `{run.data}` ({samples:,} samples) for {steps:,} steps with "
        "`mllm-seqpar finetune`.",
        "",
        "## Use",
        "",
        "```bash",
        'mllm-seqpar ask --model THIS_DIRECTORY --video movie.mp4 --question "What happens?"',
        "```",
        "",
        "## Results",
        "",
        *(results or ["No loss was logged."]),
        "",
        "## Options",
        "",
        "| option | value |",
        "|---|---|",
        *(f"| `--{name}` | {_text(value)} |" for name, value in shown.items()),
        "",
        "## Versions",
        "",
        f"- mllm-seqpar {__version__}",
        *(f"- {name} {version(name)}" for name in packages),
    ]
    return "\n".join(lines) + "\n"


_RESULTS = {"loss": "last training loss", "eval_loss": "last evaluation loss"}


def _text(value: Any) -> str:
    value = getattr(value, "value", value)  # of an Enum
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
