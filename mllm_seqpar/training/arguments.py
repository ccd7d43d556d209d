"""The options of fine-tuning: transformers' `TrainingArguments`, and three dataclasses of this package.

The command line and its configuration file are read first (`read_options`), and the dataclasses are created later
(`make_options`): creating `TrainingArguments` chooses the device and starts the process group, after which all ranks
can agree on an error. All options are checked before the model and the data are loaded.
"""

import argparse
import copy
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy, SchedulerType

from mllm_seqpar._compat import optional_import, options_of, turns_off
from mllm_seqpar.chats.data_set import ON_BAD_MEDIA
from mllm_seqpar.chats.multiple_choice import DEFAULT_TEMPLATE, check_template
from mllm_seqpar.cli.launch import LONGEST_TIMEOUT
from mllm_seqpar.cli.options import (
    CommandOptions,
    Parser,
    Range,
    canonical_arguments,
    option,
    show_ranks_option,
    suggestion,
)
from mllm_seqpar.cli.shared_options import StoredFrameOptions, StrategyOptions
from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError, library_fault

Kind = TypeVar("Kind")

SAVE_DTYPES = ("source", "float32", "bfloat16", "float16")
SELF_ATTENTION = tuple(name for name in CHOICES["self_attention"] if name != "star")
"""Star Attention has no backward pass."""


@dataclass
class FineTuningArguments(TrainingArguments):
    """`TrainingArguments` with other defaults, for fine-tuning large models on video."""

    _argument_group_name = "options of transformers.TrainingArguments"

    per_device_train_batch_size: int = option(
        "samples of one forward pass of the ranks that share a sample", 1, least=1
    )
    per_device_eval_batch_size: int = option("samples of one forward pass of an evaluation", 1, least=1)
    num_train_epochs: float = option("passes over the data, unless --max_steps is given", 1.0, above=0)
    learning_rate: float = option("peak learning rate", 1e-5, above=0)
    lr_scheduler_type: SchedulerType | str = option("learning rate after the warmup", "cosine")
    warmup_steps: float = option("steps of linear warmup, or a fraction of all steps if below 1", 0.03, least=0)
    weight_decay: float = option(
        "weight decay of matrices; vectors (norms, biases, gates) are not decayed", 0.01, least=0
    )
    adam_beta2: float = option("beta2 of AdamW", 0.95, least=0, below=1)
    logging_steps: float = option("steps between rows of the log, or a fraction of all steps if below 1", 1, above=0)
    logging_nan_inf_filter: bool = option("leave losses that are not finite out of the log", False)
    push_to_hub: bool = option("upload the final model to the Hugging Face Hub", False)
    hub_strategy: HubStrategy | str = option("when to upload", "end")
    save_total_limit: int | None = option("number of checkpoints to keep; 0: all", 2, least=0)
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "trackers of experiments, such as tensorboard wandb trackio"}
    )
    ddp_timeout: int = option("seconds to wait for a rank in a collective", 600, least=1, most=LONGEST_TIMEOUT)
    resume_from_checkpoint: str | None = option(
        "continue from a checkpoint: its path, or auto for the last complete one in --output_dir, if any", None
    )


@dataclass(frozen=True, kw_only=True)
class ModelAndData(CommandOptions):
    """The model, its trained parts, the data, and when to save."""

    _argument_group_name = "model and data"

    model: str | None = option("directory or Hub id of the model to start from, with its processor; required", None)
    data: str | None = option(
        "training data: JSONL, JSON, parquet, arrow, tar shards, or an id on the Hub; required", None
    )
    eval_data: str | None = option("evaluation data, in the same formats", None)
    media_root: str | None = option(
        "directory that relative paths of media start from; default: that of the data", None
    )
    template: str = option("text of multiple-choice questions, with {question} and {options}", DEFAULT_TEMPLATE)
    features: str | None = option(
        "directory for the outputs of the frozen vision tower: written in the first epoch, and read later", None
    )
    read_ahead_gib: float = option(
        "frames of the following samples that a rank reads ahead, in GiB of host memory", 4.0, above=0
    )
    max_length: int | None = option(
        "maximum number of text tokens per sample; longer samples are refused; default: the model's context",
        None,
        least=1,
    )
    on_bad_media: str = option("skip: replace a sample with broken media by another", "fail", choices=ON_BAD_MEDIA)
    global_batch_size: int | None = option(
        "samples of one optimizer step over all ranks; sets --gradient_accumulation_steps", None, least=1
    )
    stop_after: int | None = option(
        "save a checkpoint and stop after this step; the schedule is unchanged", None, least=1
    )
    save_minutes: float = option("save a checkpoint whenever this many minutes have passed; 0: never", 30.0, least=0)
    save_dtype: str = option("dtype of the final model; source: that of --model", "source", choices=SAVE_DTYPES)
    freeze: list[str] | None = option("parts to freeze: vision, projector, language, module paths, or patterns", None)
    train: list[str] | None = option("parts or patterns to train although --freeze matches them", None)
    use_peft: bool = option("train LoRA adapters instead of the weights", False)
    lora_r: int = option("rank of the adapters", 16, least=1)
    lora_alpha: int = option("the adapters are scaled by lora_alpha / lora_r", 32, least=1)
    lora_dropout: float = option("dropout on the input of the adapters", 0.05, least=0, below=1)
    lora_target_modules: list[str] | None = option("names of modules that get adapters; default: all-linear", None)
    lora_modules_to_save: list[str] | None = option(
        "names of modules whose weights are trained in addition to the adapters", None
    )
    load_in_4bit: bool = option("QLoRA: load the frozen weights in 4 bits; needs a GPU and bitsandbytes", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing; --help lists the options")
        check_template(self.template)
        if not self.freeze:
            self._refuse_unused("train", "nothing is frozen; give --freeze, or leave it out")
        if self.use_peft:
            optional_import("peft", extra="peft", needed_for="--use_peft")
        if self.use_peft and self.load_in_4bit:
            if not torch.cuda.is_available():
                raise ConfigError(
                    "--load_in_4bit needs a GPU, and torch finds none; leave it out to train LoRA adapters"
                )
            optional_import("bitsandbytes", extra="qlora", needed_for="--load_in_4bit")
        if not self.use_peft:
            for item in fields(self):
                if item.name.startswith("lora_") or item.name == "load_in_4bit":
                    self._refuse_unused(item.name, "it is an option of adapters; give --use_peft")


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(StrategyOptions):
    """How a sample is divided over ranks; see `SeqParConfig`."""

    _argument_group_name = "sequence parallelism"

    sp: int | None = option(
        "ranks that share a sample; default: cp_size of the launch configuration's parallelism, else all ranks",
        None,
        least=1,
    )
    self_attention: str = option("self-attention of the text", "ring", choices=SELF_ATTENTION)
    text_layout: str = option("how text tokens are sharded over ranks", "zigzag", choices=CHOICES["text_layout"])
    cluster: str | None = option(
        "cluster file by which auto and mesh choose; by default, auto measures in the first pass, and mesh counts "
        "bytes",
        None,
    )
    vision_chunk_size: int | None = option("frames that the vision tower encodes at once", 32, least=1)
    recompute_visual: bool = option("recompute K and V of visual tokens in backward instead of storing them", True)
    recompute_attention: bool = option("with --gradient_checkpointing, recompute attention too", False)
    visual_offload: str | None = option("cpu: keep the visual features in host memory", None, choices=("cpu",))


@dataclass(frozen=True)
class FineTuneOptions:
    """The options of a run."""

    training: FineTuningArguments
    run: ModelAndData
    frames: StoredFrameOptions
    parallel: SequenceParallel
    seqpar: SeqParConfig


_KINDS = (ModelAndData, StoredFrameOptions, SequenceParallel, FineTuningArguments)

_SEEDS = Range(least=0, below=2**32)  # of NumPy
RANGES = {
    "max_steps": Range(least=-1),
    "adam_beta1": Range(least=0, below=1),
    "adam_epsilon": Range(above=0),
    "gradient_accumulation_steps": Range(least=1),
    "max_grad_norm": Range(least=0),
    "neftune_noise_alpha": Range(above=0),
    "torch_empty_cache_steps": Range(least=1),
    "eval_steps": Range(above=0),
    "eval_delay": Range(least=0),
    "eval_accumulation_steps": Range(least=1),
    "save_steps": Range(above=0),
    "seed": _SEEDS,
    "data_seed": _SEEDS,
    "ddp_bucket_cap_mb": Range(least=1),
} | {item.name: item.metadata["range"] for item in fields(FineTuningArguments) if "range" in item.metadata}
"""The numbers that options of `TrainingArguments` may have; `FineTuningArguments` states those of its own fields."""

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
    "deepspeed": "it replaces the averaging of gradients; use --shard_weights, which shards by FSDP2",
    "fsdp": "use --shard_weights, which shards by FSDP2, on CPUs too",
    "fsdp_config": "use --shard_weights, or a configuration of `accelerate launch` for other settings of FSDP2",
    "debug": "underflow_overflow looks at all tensors of a pass, and ranks may have empty ones",
    "hub_strategy": "--push_to_hub uploads the final model, at the end",
}
"""Options of `TrainingArguments` that must keep their default, with the reason."""

_EXAMPLE = """\
mllm-seqpar finetune --num_processes 2 --model DIR --data train.jsonl --output_dir runs/first --global_batch_size 8
  accelerate launch --config_file fsdp2.yaml -m mllm_seqpar finetune --config run.yaml --learning_rate 1e-5"""


_SHOWN = (
    *("output_dir", "max_steps", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "optim", "seed"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end"),
    *("max_grad_norm", "use_cpu", "hub_model_id"),
)
"""Options of `TrainingArguments` that --help shows in addition to those with another default; --help_all shows all."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None, which the texts explain, and each name once, with underscores."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


class _Stored(argparse.Action):
    """The default action, with an argument for the metadata of a field that transformers passes on."""

    def __init__(self, option_strings: Sequence[str], dest: str, range: Range | None = None, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class _Parser(Parser, HfArgumentParser):
    """transformers' parser for dataclasses, with the rules of all commands."""

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        self.register("action", None, _Stored)  # before transformers adds the first field
        return super().add_argument_group(*args, **kwargs)


def read_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the value of each option in `argv`, or in the file that --config names, or its default.

    Raises:
        ConfigError: on an unknown option, a value of the wrong type, or a file that cannot be read.
    """
    parser = _Parser(
        dataclass_types=_KINDS,
        prog="mllm-seqpar finetune",
        usage="%(prog)s [--num_processes N] [--config FILE] --model DIR --data FILE --output_dir DIR [options]",
        description="Fine-tune a cross-attention MLLM on video, sequence-parallel.",
        example=_EXAMPLE,
        formatter_class=_Help,
    )
    show_ranks_option(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with options; the command line takes precedence"
    )
    parser.add_argument("--help_all", action="help", help="show all options of TrainingArguments too, and exit")
    shown = {*vars(FineTuningArguments)["__annotations__"], *_SHOWN}
    hidden = {item.name for item in fields(FineTuningArguments)} - shown | {*REFUSED}
    everything = "--help_all" in canonical_arguments(parser, argv)
    for action in parser._actions:
        if turns_off(action):
            action.help = f"turns --{action.dest} off"
        if action.dest in REFUSED:
            action.help = f"not supported: {REFUSED[action.dest]}"
        if action.dest in hidden and not everything:
            action.help = argparse.SUPPRESS
    values = parser.parse_args(argv)
    if values.config:
        in_file = parser.parse_args(_options_of(values.config, options_of(parser)))
        values = parser.parse_args(argv, in_file)
    return vars(values)


def _options_of(path: str, known: Mapping[str, Any]) -> list[str]:
    """Return the contents of a configuration file as a command line."""
    import yaml

    try:
        options = yaml.safe_load(Path(path).read_text())  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: expected options as 'name: value', found {type(options).__name__}")
    unknown = [str(name) for name in options if f"--{name}" not in known or name in ("config", "help", "help_all")]
    if unknown:
        listed = ", ".join(name + suggestion(name, known).replace("--", "") for name in unknown)
        raise ConfigError(f"--config {path}: unknown options {listed}; --help lists the options")
    argv = []
    for name, value in options.items():
        if value is not None and value != []:
            value = json.dumps(value) if isinstance(value, dict) else value
            argv += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return argv


def make_options(values: Mapping[str, Any]) -> FineTuneOptions:
    """Return the options of a run from what `read_options` returned. It starts the process group.

    Raises:
        ConfigError: a value is not allowed, or would have no effect.
    """

    def options_of_kind(kind: type[Kind]) -> Kind:
        return kind(**{item.name: values[item.name] for item in fields(kind)})  # type: ignore[arg-type]

    run, frames = options_of_kind(ModelAndData), options_of_kind(StoredFrameOptions)
    parallel = options_of_kind(SequenceParallel)
    seqpar = replace(parallel.config(), logits="none")  # only the loss is used
    _check_training(values, run)
    if seqpar.recompute_attention and not (values["gradient_checkpointing"] or values.get("activation_checkpointing")):
        raise ConfigError("--recompute_attention would have no effect: give --gradient_checkpointing too")
    arguments = {item.name: values[item.name] for item in fields(FineTuningArguments) if item.init}
    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # transformers is renaming them
        new = name.replace("gradient", "activation")
        if new in arguments and arguments[new] is None:
            arguments[new], arguments[name] = arguments[name] or None, None
    try:
        training = FineTuningArguments(**arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        fault = library_fault(error) or str(error)
        raise ConfigError(f"options of TrainingArguments: {' '.join(fault.split())}") from error
    checkpointing = training.gradient_checkpointing_kwargs or getattr(training, "activation_checkpointing_kwargs", None)
    parameters = {*inspect.signature(torch.utils.checkpoint.checkpoint).parameters, "preserve_rng_state"}
    if unknown := sorted(set(checkpointing or {}) - parameters):
        raise ConfigError(
            f"--gradient_checkpointing_kwargs: {unknown[0]} is unknown; torch.utils.checkpoint.checkpoint takes "
            "use_reentrant, determinism_check, debug, early_stop and preserve_rng_state"
        )
    reporters = {"flyte", *get_available_reporting_integrations()}  # transformers does not check flyte
    if missing := [name for name in training.report_to if name not in reporters]:
        raise ConfigError(
            f"--report_to {missing[0]}: transformers knows no such tool, or its package is not installed; install the "
            "package, or leave the tool out"
        )
    if parallel.shard_weights and training.world_size == 1:
        raise ConfigError("--shard_weights: there is one process; start several with --num_processes N, or a launcher")
    return FineTuneOptions(training, run, frames, parallel, seqpar)


def _check_training(values: Mapping[str, Any], run: ModelAndData) -> None:
    """Raise ConfigError for invalid options of `TrainingArguments`, before it is created."""
    if not values["output_dir"]:
        raise ConfigError("--output_dir is missing; --help lists the options")
    if values["max_steps"] == 0:
        raise ConfigError("--max_steps: 0 is not allowed; give more than 0, or -1 for --num_train_epochs")
    for name, allowed in RANGES.items():
        allowed.require(name, values.get(name))  # some releases of transformers lack an option
    defaults = {item.name: item.default for item in fields(FineTuningArguments)}
    for name, reason in REFUSED.items():
        if name in defaults and values[name] not in (defaults[name], None):
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
