"""Checks of the options of `TrainingArguments`, before fine-tuning loads anything."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from mllm_seqpar.errors import ConfigError

from .arguments import FineTuningArguments, ModelAndData

_POSITIVE = (
    *("learning_rate", "adam_epsilon", "num_train_epochs", "ddp_timeout", "gradient_accumulation_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size"),
)
REFUSED = {
    "fp16": "float16 is not verified with sequence parallelism; use --bf16",
    "torch_compile": "torch.compile does not compile the forward pass of a patched model",
    "auto_find_batch_size": "the order of the data is fixed before training; set --per_device_train_batch_size",
    "dataloader_num_workers": "each rank reads ahead in threads, because the ranks agree on bad media while reading",
    "dataloader_drop_last": "samples that do not fill a step are always left out of their epoch",
    "train_sampling_strategy": "samples are shuffled in an order that does not depend on the number of processes",
    "ignore_data_skip": "a resumed run continues with the samples that follow the checkpoint",
    "enable_jit_checkpoint": "a run that receives SIGTERM saves a checkpoint on all ranks without it",
    "label_smoothing_factor": "the loss is the model's own, over the shards of the text",
    "save_only_model": "a checkpoint has what a resumed run needs; OUTPUT_DIR/model has the weights alone",
    "deepspeed": "DeepSpeed (ZeRO) is not supported; use FSDP2: --shard_weights",
    "fsdp": "use --shard_weights, which shards by FSDP2, on CPUs too",
    "fsdp_config": "use --shard_weights, or a configuration of `accelerate launch` for other settings of FSDP2",
    "hub_strategy": "--push_to_hub uploads the final model, at the end",
}
"""Options of `TrainingArguments` that must keep their default, with the reason."""


def check_training(values: Mapping[str, Any], run: ModelAndData) -> None:
    """Raise ConfigError for invalid options of `TrainingArguments`, before it is created."""
    if not values["output_dir"]:
        raise ConfigError("--output_dir is missing; --help lists the options")
    for name in _POSITIVE:
        if not (math.isfinite(values[name]) and values[name] > 0):
            raise ConfigError(f"--{name}: {values[name]} is not allowed; give more than 0")
    if values["max_steps"] < 1 and values["max_steps"] != -1:
        raise ConfigError(
            f"--max_steps: {values['max_steps']} is not allowed; give more than 0, or -1 for --num_train_epochs"
        )
    defaults = {item.name: item.default for item in fields(FineTuningArguments)}
    for name, reason in REFUSED.items():
        if name in defaults and values[name] != defaults[name]:
            raise ConfigError(f"--{name} {values[name]} is not supported: {reason}")
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        raise ConfigError(f"mixed_precision: fp16 in the launch configuration: {REFUSED['fp16']}")
    for name, unused in (("eval_strategy", "no"), ("load_best_model_at_end", False), ("eval_on_start", False)):
        if run.eval_data is None and values[name] != unused:
            raise ConfigError(f"--{name} {values[name]}: there is nothing to evaluate on; give --eval_data")
    if values["metric_for_best_model"] not in (None, "loss", "eval_loss"):
        raise ConfigError(f"--metric_for_best_model {values['metric_for_best_model']}: evaluation has eval_loss only")
    if run.global_batch_size and values["gradient_accumulation_steps"] != 1:
        raise ConfigError(
            "--global_batch_size sets --gradient_accumulation_steps; give one of them, and "
            "--per_device_train_batch_size for the samples of one forward pass"
        )
    _check_trackers(values["report_to"])


def _check_trackers(names: Sequence[str]) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    installed = get_available_reporting_integrations()
    for name in names:
        if name in (*installed, "all", "none"):
            continue
        if name in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"--report_to {name}: its package is not installed: pip install {name}, or leave it out")
        raise ConfigError(f"--report_to {name}: unknown; give some of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")


def check_optimizer(args: TrainingArguments) -> None:
    """Raise ConfigError if `Trainer` could not create the optimizer, instead of failing after the model is loaded."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, nn.Module())
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, ImportError) or args.optim_target_modules is None:  # no module is a target here
            name = getattr(args.optim, "value", args.optim)
            raise ConfigError(f"--optim {name}: {' '.join(str(error).split())}") from error
