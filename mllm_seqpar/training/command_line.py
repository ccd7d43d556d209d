"""The command line of fine-tuning: its parser, its configuration file, and the resulting options.

The command line is read first (`read_options`), and the dataclasses are created later (`make_options`): creating
`TrainingArguments` chooses the device and starts the process group, after which all ranks can agree on an error.
"""

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import HfArgumentParser

from mllm_seqpar._compat import options_of, turns_off
from mllm_seqpar.cli.options import Parser, canonical_arguments, show_ranks_option
from mllm_seqpar.errors import ConfigError

from .arguments import (
    KINDS,
    REFUSED,
    FineTuneOptions,
    FineTuningArguments,
    ModelAndData,
    SequenceParallel,
    StoredFrameOptions,
    check_optimizer,
    check_training,
)

Kind = TypeVar("Kind")

_EXAMPLE = """\
mllm-seqpar finetune --num_processes 2 --model DIR --data train.jsonl --output_dir runs/first --global_batch_size 8
  accelerate launch --config_file fsdp2.yaml -m mllm_seqpar finetune --config run.yaml --learning_rate 1e-5"""


_SHOWN = (
    *("output_dir", "max_steps", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "optim", "seed"),
    *(
        "eval_strategy",
        "eval_steps",
        "save_strategy",
        "save_steps",
        "max_grad_norm",
        "load_best_model_at_end",
        "use_cpu",
        "hub_model_id",
    ),
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


class _Parser(Parser, HfArgumentParser):
    """transformers' parser for dataclasses, with the rules of all commands."""


def read_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the value of each option in `argv`, or in the file that --config names, or its default.

    Raises:
        ConfigError: on an unknown option, a value of the wrong type, or a file that cannot be read.
    """
    parser = _Parser(
        dataclass_types=KINDS,
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
    _describe(parser, everything="--help_all" in canonical_arguments(parser, argv))
    values = parser.parse_args(argv)
    if values.config:
        in_file = parser.parse_args(_options_of(values.config, options_of(parser)))
        values = parser.parse_args(argv, in_file)
    return vars(values)


def _describe(parser: argparse.ArgumentParser, everything: bool) -> None:
    """Document --no_NAME and refused options; hide options that few runs need, unless `everything`."""
    shown = {*vars(FineTuningArguments)["__annotations__"], *_SHOWN}
    hidden = {item.name for item in fields(FineTuningArguments)} - shown | {*REFUSED}
    for action in parser._actions:
        if turns_off(action):
            action.help = f"turns --{action.dest} off"
        if action.dest in REFUSED:
            action.help = f"not supported: {REFUSED[action.dest]}"
        if action.dest in hidden and not everything:
            action.help = argparse.SUPPRESS


def _options_of(path: str, known: Mapping[str, Any]) -> list[str]:
    """Return the contents of a configuration file as a command line."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: expected options as 'name: value', found {type(found).__name__}")
    unknown = [str(name) for name in found if f"--{name}" not in known or name in ("config", "help", "help_all")]
    if unknown:
        raise ConfigError(f"--config {path}: unknown options {', '.join(unknown)}; --help lists the options")
    argv = []
    for name, value in found.items():
        if value is not None and value != []:
            value = json.dumps(value) if isinstance(value, dict) else value
            argv += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return argv


def make_options(values: Mapping[str, Any]) -> FineTuneOptions:
    """Return the options of a run from what `read_options` returned. It starts the process group.

    Raises:
        ConfigError: a value is not allowed, or would have no effect.
    """

    def given_to(kind: type[Kind]) -> Kind:
        return kind(**{item.name: values[item.name] for item in fields(kind)})  # type: ignore[arg-type]

    run, frames, parallel = given_to(ModelAndData), given_to(StoredFrameOptions), given_to(SequenceParallel)
    seqpar = replace(parallel.config(), logits="none")  # only the loss is used
    check_training(values, run)
    if seqpar.recompute_attention and not (values["gradient_checkpointing"] or values.get("activation_checkpointing")):
        raise ConfigError("--recompute_attention would have no effect: give --gradient_checkpointing too")
    given = {item.name: values[item.name] for item in fields(FineTuningArguments) if item.init}
    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # transformers is renaming them
        new = name.replace("gradient", "activation")
        if new in given and given[new] is None:
            given[new], given[name] = given[name] or None, None
    try:
        training = FineTuningArguments(**given)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(f"options of TrainingArguments: {' '.join(str(error).split())}") from error
    check_optimizer(training)
    if parallel.shard_weights and training.world_size == 1:
        raise ConfigError("--shard_weights: there is one process; start several with --num_processes N, or a launcher")
    return FineTuneOptions(training, run, frames, parallel, seqpar)
