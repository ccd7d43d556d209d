"""The command `mllm-seqpar configs`: lists the configurations of accelerate and the planner's files, or copies them.

An installed package contains them, and `accelerate launch` takes a path.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mllm_seqpar.planner.descriptions import CONFIGS

from .options import CommandOptions, option, parse_options
from .outputs import new_directory


@dataclass(frozen=True, kw_only=True)
class ConfigsOptions(CommandOptions):
    """The options of `mllm-seqpar configs`."""

    output: str | None = option(
        "directory to copy the files to; it must be empty or not exist; default: print their paths", None
    )


def configs(argv: Sequence[str]) -> None:
    """Print the paths of the configuration files, or copy them to the directory that `argv` names."""
    args = parse_options(
        ConfigsOptions,
        argv,
        prog="mllm-seqpar configs",
        description="List the files of configs/: configurations of accelerate launch, and models and clusters of plan.",
        example="mllm-seqpar configs --output configs\n"
        "  accelerate launch --config_file configs/fsdp2_cpu_2.yaml -m mllm_seqpar finetune --help",
    )
    files = [path.relative_to(CONFIGS) for path in sorted(CONFIGS.rglob("*.yaml"))]
    if args.output is None:
        sys.stdout.write("".join(f"{CONFIGS / name}\n" for name in files))
        return
    with new_directory("output", args.output) as draft:
        for name in files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CONFIGS / name, draft / name)
    sys.stdout.write(f"{args.output}: {len(files)} files\n")
