"""The command `mllm-seqpar convert`: converts a published checkpoint to one model directory in safetensors.

mPLUG-Owl3, IDEFICS and Llama 3.2 Vision are published as one directory, which is loaded, checked and saved again.
OpenFlamingo is published in parts: a language model, a CLIP and a checkpoint.pt.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar.errors import AdapterError, ConfigError, first_line
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.models.loading import load_model, load_processor, model_class, model_directories
from mllm_seqpar.patching.registry import adapters, find_adapter

from .launch import DTYPES
from .options import CommandOptions, option, parse_options
from .outputs import new_directory

PARTS = ("language_model", "vision_model", "checkpoint", "cross_attn_every_n_layers", "only_attend_immediate_media")
_FILE, _INDEX = "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(CommandOptions):
    """The published files and the directory to write."""

    output: str = option("directory to write; it must be empty or not exist")
    model: str | None = option(
        "a published checkpoint: its directory, or USER/NAME on the Hub; or adapters, which are merged", None
    )
    dtype: str = option("dtype of the weights (auto: as published; OpenFlamingo: float32)", "auto", choices=DTYPES)
    language_model: str | None = option("instead of --model, for OpenFlamingo: directory or id of its text model", None)
    vision_model: str | None = option("for OpenFlamingo: directory or id of its CLIP", None)
    checkpoint: str | None = option(
        "for OpenFlamingo: the published checkpoint.pt, or the directory or id that has it; default: untrained "
        "cross-attention",
        None,
    )
    cross_attn_every_n_layers: int | None = option(
        "for OpenFlamingo: layers per cross-attention block; default: as in the checkpoint", None, least=1
    )
    only_attend_immediate_media: bool = option(
        "for OpenFlamingo: a token attends only to the last image before it", True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            for name in PARTS:
                self._refuse_unused(name, "--model names a whole checkpoint; leave it out")
        elif self.language_model is None or self.vision_model is None:
            raise ConfigError(
                "nothing to convert: give --model, or for OpenFlamingo --language_model and --vision_model"
            )


def convert(argv: Sequence[str]) -> None:
    """Write the directory that the command line `argv` describes. An interrupted run leaves no incomplete directory."""
    args = parse_options(
        ConvertOptions,
        argv,
        prog="mllm-seqpar convert",
        description="Write a published checkpoint as one model directory in safetensors, with its processor.",
        example="mllm-seqpar convert --model mPLUG/mPLUG-Owl3-7B-240728 --output owl --dtype bfloat16\n"
        "  mllm-seqpar convert --language_model MPT_DIR --vision_model openai/clip-vit-large-patch14 \\\n"
        "      --checkpoint checkpoint.pt --output flamingo",
    )
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    with new_directory("output", args.output) as draft:
        if args.model is not None:
            with tempfile.TemporaryDirectory(dir=draft.parent) as scratch:
                folders = model_directories(args.model)
                _require_supported(folders[-1])
                source = str(_safetensors(folders[0], Path(scratch)))
                processor = load_processor(source)
                model: Any = load_model(source, dtype=dtype or "auto")
                model.save_pretrained(draft)
                del model  # the weights are not needed for what follows
            processor.save_pretrained(draft)
        else:
            from mllm_seqpar.models import open_flamingo

            assert args.language_model is not None and args.vision_model is not None
            checkpoint = None if args.checkpoint is None else Path(local_directory(args.checkpoint))
            open_flamingo.convert(
                draft,
                language_model=args.language_model,
                vision_model=args.vision_model,
                checkpoint=checkpoint / "checkpoint.pt" if checkpoint and checkpoint.is_dir() else checkpoint,
                cross_attn_every_n_layers=args.cross_attn_every_n_layers,
                only_attend_immediate_media=args.only_attend_immediate_media,
                dtype=dtype or torch.float32,
            )
        model = load_model(str(draft), dtype="auto", device_map="meta")  # compares names and shapes
    count = sum(parameter.numel() for parameter in model.parameters())
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    sys.stdout.write(
        f"{Path(args.output).resolve()}: {type(model).__name__}, {count:,} parameters, {', '.join(dtypes)}\n"
    )


def _require_supported(folder: Path) -> None:
    """Raise ConfigError if no adapter supports the model that the config.json of a directory describes."""
    config, cls = model_class(folder)
    with torch.device("meta"):
        model = cls(config)
    try:
        find_adapter(model)
    except AdapterError as error:
        raise ConfigError(
            f"--model {folder}: {cls.__name__} (model_type {config.model_type!r}) does not belong to a supported "
            f"family; supported families: {', '.join(sorted(adapters()))}"
        ) from error


def _safetensors(folder: Path, scratch: Path) -> Path:
    """Return the folder, or if its weights are pickled, `scratch` with the same files and its weights in safetensors.

    Only tensors are unpickled; a file with anything else is refused.
    """
    from safetensors.torch import save_file

    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if any(folder.glob("*.safetensors")) or not pickled:
        return folder
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith("pytorch_model"):
            (scratch / file.name).symlink_to(file.resolve())
    places: dict[str, str] = {}
    for number, file in enumerate(pickled, 1):
        name = _FILE.format(number, len(pickled))
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{file}: {first_line(error)}") from error
        # tensors that share memory cannot be saved; loading ties them again
        save_file({key: x.clone().contiguous() for key, x in state.items()}, scratch / name, metadata={"format": "pt"})
        places |= dict.fromkeys(state, name)
    (scratch / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return scratch
