"""Layer: one process. The command line of fine-tuning, its configuration file, and what it trains."""

import argparse
import collections
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from family_cases import BATCHES
from family_harness import model_of
from launch import ROOT
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching.registry import find_adapter
from mllm_seqpar.training import arguments, early_check, finetune
from mllm_seqpar.training.arguments import FineTuneOptions, make_options, read_options
from mllm_seqpar.training.early_check import check_command_line
from mllm_seqpar.training.model import choose_parameters

REQUIRED = ["--model", "m", "--data", "d", "--output_dir", "o", "--use_cpu"]


def options(*argv: str) -> FineTuneOptions:
    return make_options(read_options([*REQUIRED, *argv]))


def test_options_reach_their_dataclasses_with_underscores_and_hyphens() -> None:
    given = ["--sp", "2", "--strategy", "mesh", "--tile", "2x1", "--no_recompute_visual", "--fps", "0.5"]
    given += ["--freeze", "vision", "*.bias", "--per-device-train-batch-size", "3", "--lora_r", "4", "--use-peft"]
    found = options(*given)
    assert found.seqpar.tile == (2, 1) and found.seqpar.recompute_visual is False and found.parallel.sp == 2
    assert (found.frames.fps, found.run.freeze, found.run.lora_r) == (0.5, ["vision", "*.bias"], 4)
    assert found.training.per_device_train_batch_size == 3
    assert (found.training.lr_scheduler_type, found.training.adam_beta2, found.training.report_to) == (
        "cosine",
        0.95,
        [],
    )


def test_command_line_wins_over_the_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "learning_rate: 1e-4\nsp: 2\nfreeze: [vision, projector]\nuse_peft: true\nlr_scheduler_kwargs: {a: 1}\n"
        "run_name: -first\n"
    )
    found = options("--config", str(config), "--learning_rate", "2e-4")
    assert (found.training.learning_rate, found.parallel.sp, found.run.use_peft) == (2e-4, 2, True)
    assert found.run.freeze == ["vision", "projector"] and found.training.lr_scheduler_kwargs == {"a": 1}
    assert found.training.run_name == "-first"
    assert options("--config", str(config), "--freeze", "language").run.freeze == ["language"]
    (tmp_path / "run.json").write_text(json.dumps({"lr": 1, "sp": 2}))
    with pytest.raises(ConfigError, match=r"run.json: unknown options lr \(did you mean learning_rate\?\); --help"):
        options("--config", str(tmp_path / "run.json"))
    config.write_text("max_stepz: 3\nzzz: 1\n")
    with pytest.raises(ConfigError, match=r"unknown options max_stepz \(did you mean max_steps\?\), zzz; --help"):
        options("--config", str(config))
    config.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected options as 'name: value', found list"):
        options("--config", str(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--learning_rate", "0"], "--learning_rate: 0.0 is not allowed; give more than 0"),
        (["--learning_rate", "x"], "--learning_rate.*invalid float value: 'x'"),
        (["--tile", "4"], "two numbers such as 2x2"),
        (["--learning_rate", "inf"], "--learning_rate: inf is not allowed"),
        (["--lr_scheduler_type", "sine"], "--lr_scheduler_type.*invalid choice: 'sine'"),
        (["--freeze", "vision", "--freeze", "language"], "--freeze is given twice; give all values after one --freeze"),
        (["--max-steps", "3", "--max_steps", "4"], "--max_steps is given twice; give it once"),
        (["--max_stepz", "3"], r"unrecognized arguments: --max_stepz 3 \(did you mean --max_steps\?\)"),
        (["--optim", "adan"], "--optim.*invalid choice: 'adan'"),
        (["--save_strategy", "never"], "--save_strategy.*invalid choice: 'never'"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps: 0 is not allowed; give 1 or more"),
        (["--save_only_model"], "--save_only_model True is not supported: a checkpoint has what a resumed run needs"),
        (["--eval_strategy", "steps"], "--eval_strategy steps: there is nothing to evaluate on; give --eval_data"),
        (["--eval_on_start"], "--eval_on_start True: there is nothing to evaluate on"),
        (["--metric_for_best_model", "accuracy"], "--metric_for_best_model accuracy: evaluation has eval_loss only"),
        (["--train", "vision"], "vision.* would have no effect: nothing is frozen"),
        (["--lora_r", "3"], "3 would have no effect: it is an option of adapters; give --use_peft"),
        (["--self_attention", "star"], "--self_attention.*invalid choice: 'star'"),
        (["--recompute_attention"], "--recompute_attention would have no effect: give --gradient_checkpointing too"),
        (["--fp16"], "--fp16 True is not supported: float16 is not verified"),
        (["--label_smoothing_factor", "0.1"], "--label_smoothing_factor 0.1 .*: the loss is the model's own"),
        (["--torch_compile"], "--torch_compile True is not supported: torch.compile does not compile"),
        (["--dataloader_num_workers", "2"], "--dataloader_num_workers 2 is not supported: each rank reads ahead"),
        (["--learning_rate", "1", "--learning-rate", "2"], "--learning_rate is given twice; give it once"),
        (["--lerning_rate", "1"], r"unrecognized arguments: --lerning_rate 1 \(did you mean --learning_rate\?\)"),
        (["--num_processes", "2"], "--num_processes 2: give it on the command line, to mllm-seqpar"),
        (["--max_steps", "0"], "--max_steps: 0 is not allowed; give more than 0, or -1 for --num_train_epochs"),
        (["--global_batch_size", "8", "--gradient_accumulation_steps", "2"], "give one of them"),
        (["--save_minutes", "-1"], "-1.0 is not allowed; give 0 or more"),
        (["--weight_decay", "-1"], "--weight_decay: -1.0 is not allowed; give 0 or more"),
        (["--max_grad_norm", "-1"], "--max_grad_norm: -1.0 is not allowed; give 0 or more"),
        (["--logging_steps", "-5"], "--logging_steps: -5.0 is not allowed; give more than 0"),
        (["--eval_steps", "-1"], "--eval_steps: -1.0 is not allowed; give more than 0"),
        (["--gradient_checkpointing_kwargs", '{"a": 1}'], "--gradient_checkpointing_kwargs: a is unknown; torch.utils"),
        (["--debug", "underflow_overflow"], "--debug .* is not supported: underflow_overflow looks at all tensors"),
        (["--on_bad_media", "ignore"], "--on_bad_media.*invalid choice: 'ignore'"),
        (["--fsdp"], "--fsdp True is not supported: use --shard_weights"),
        (["--report_to", "no_tool"], "--report_to no_tool: transformers knows no such tool, or its package is not"),
        (["--deepspeed", "zero.json"], "--deepspeed zero.json is not supported: it replaces the averaging"),
        (["--shard_weights"], "--shard_weights: there is one process; start several with --num_processes N"),
        (["--push_to_hub", "--hub_strategy", "every_save"], "every_save is not supported: --push_to_hub uploads the"),
        (["--lr", "1"], r"--lr 1 \(did you mean --learning_rate\?\)"),
        (["--template", "Reply with a letter."], "'Reply with a letter.': it has no {question}; it takes {question}"),
        (["--template", "{question} {Options}"], "the field {Options} is unknown"),
        (["--logging_steps", "2.5"], "options of TrainingArguments: --logging_steps must be an integer"),
    ],
)
def test_invalid_arguments_are_named(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*given)


def test_help_begins_with_the_options_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--help"])
    shown = capsys.readouterr().out
    assert "--num_processes N " in shown[: shown.index("\n  --model MODEL ")] and "-rate" not in shown
    assert shown.index("--lora_r ") < shown.index("options of transformers.TrainingArguments:")
    assert 45 < len(re.findall(r"^  --", shown, re.MULTILINE)) < 80 and "not supported" not in shown
    assert "--no_recompute_visual" in shown and "turns --recompute_visual off" in shown
    with pytest.raises(SystemExit):
        read_options(["--help-all"])
    shown = capsys.readouterr().out
    assert shown.index("--fp16") < shown.index("not supported: float16 is not verified")


def test_every_option_passes_the_check_before_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(arguments, "canonical_arguments", lambda parser, argv: parsers.append(parser) or argv)
    read_options(REQUIRED)
    fields = early_check._fields  # which parses transformers' source
    monkeypatch.setattr(early_check, "_fields", functools.cache(lambda file: [*fields(file)]))
    lines: dict[int, list[str]] = collections.defaultdict(list)  # a command line may give an option once
    names: collections.Counter[str] = collections.Counter()
    for action in parsers[0]._actions:
        if "help" not in action.dest:  # which ends the check
            for name in action.option_strings:
                number = names[action.dest]
                names[action.dest] += 1
                lines[number] += [name] if action.nargs == 0 else [name, "0.5" if action.type is float else "3"]
    assert len(lines[0]) > 200 and len(lines[1]) > 50
    for argv in lines.values():
        check_command_line(argv)
    for argv, message in (
        (["--lerning_rate", "1"], r"did you mean --learning_rate\?"),
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["--max_steps", "few"], "--max_steps: invalid int value: 'few'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_command_line(argv)


def test_a_wrong_option_is_reported_without_importing_torch() -> None:
    """The import takes seconds, on each rank."""
    code = """
import sys
from mllm_seqpar.__main__ import main
status = main(["finetune", "--num_processes", "2", "--use_lora"])
print(status, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (
        done.stdout == "2 []\n"
        and "error: unrecognized arguments: --use_lora (did you mean --use_peft?)" in done.stderr
    )


def test_checkpointing_of_activations_needs_no_deprecated_name(recwarn: pytest.WarningsRecorder) -> None:
    found = options("--gradient_checkpointing", "--recompute_attention")
    assert found.training.gradient_checkpointing
    assert not [warning for warning in recwarn if "gradient_checkpointing" in str(warning.message)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
def test_four_bits_without_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="--load_in_4bit needs a GPU, and torch finds none"):
        options("--use_peft", "--load_in_4bit")


@pytest.mark.parametrize("family", BATCHES)
def test_each_parameter_of_a_family_belongs_to_one_part(family: str) -> None:
    model = model_of(family, BATCHES[family])
    parts: Any = find_adapter(model)[0]
    for name, _ in model.named_parameters():
        found = [sum(f"{name}.".startswith(f"{path}.") for path in paths) for paths in parts.parts.values()]
        assert found.count(1) == 1, name


def test_part_may_name_a_single_parameter() -> None:
    model = model_of("moss_vl", BATCHES["moss_vl"])
    frozen = choose_parameters(model, ["projector"], [], find_adapter(model)[0].parts)
    assert "model.separator_token" in frozen and "model.visual.merger.linear_fc1.weight" in frozen
    assert "model.visual.pos_embed.weight" not in frozen


def test_parameters_are_frozen_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="--freeze '': no parameter of Sequential matches"):
        choose_parameters(model, [",,"], [], {})
    with pytest.raises(ConfigError, match="--train 1: --freeze 0 covers none of these"):
        choose_parameters(model, ["0"], ["1"], {})
    assert choose_parameters(model, ["first"], ["0.bias"], {"first": ["0"]}) == ["0.weight"]
    with pytest.raises(ConfigError, match="--train 'last': .* matches; give first, a module path"):
        choose_parameters(model, [], ["last"], {"first": ["0"]})
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
def test_a_launch_configuration_for_gpus_is_refused_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(finetune, "make_options", lambda values: made.append(values))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="the launch configuration is for GPUs .*torch finds 0 .*pass --use_cpu"):
        finetune._options({"use_cpu": False}, cpu=True)
    finetune._options({"use_cpu": True}, cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    finetune._options({"use_cpu": False}, cpu=True)
    assert made == [{"use_cpu": True}] * 2
