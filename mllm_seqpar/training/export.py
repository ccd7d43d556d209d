"""Export of the trained model as an ordinary directory: safetensors, config, processor, model card; its upload.

For --push_to_hub, `Trainer` would create the repository on rank 0 alone, after the model is loaded, and upload what is
in --output_dir, where the final model is not. Here, all ranks check before anything is loaded whether the repository
can be written to.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCardData
from torch import nn
from transformers import TrainingArguments

from mllm_seqpar import __version__
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.errors import ConfigError, first_line, writing
from mllm_seqpar.models.hub import local_directory

from .arguments import SAVE_DTYPES, FineTuneOptions


def export_dtype(choice: str, source: str) -> torch.dtype | None:
    """Return the dtype to save in: `choice`, or for "source" that of directory `source` (None if not recorded)."""
    if choice != "source":
        return getattr(torch, choice)
    config = json.loads((Path(local_directory(source)) / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name in SAVE_DTYPES else None


def export_model(
    model: nn.Module, processor: Any, directory: Path, dtype: torch.dtype | None = None, card: str | None = None
) -> None:
    """Write a directory that `from_pretrained` of the unpatched, unsharded model reads.

    Every rank calls this; rank 0 gathers the whole model in CPU memory and writes it. The directory is written under
    another name and then renamed, so an interrupted export leaves no incomplete model.

    Args:
        model: prepared and resharded. Its parameter names are those of the model before patching and sharding.
        processor: saved into the same directory; None to save none.
        directory: replaced if it exists.
        dtype: of the saved floating-point weights; None keeps their dtype.
        card: the text of README.md, the model card; None: what `save_pretrained` writes.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )

    draft = directory.with_name(directory.name + ".tmp")

    def write() -> None:
        weights = {name: x.to(dtype) if dtype and x.is_floating_point() else x for name, x in state.items()}
        # save_pretrained writes a tied weight once if all its names map to the same tensor
        first: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (other := first.setdefault(parameter, name)) != name:
                weights[name] = weights[other]
        model.save_pretrained(draft, state_dict=weights)  # type: ignore[operator]
        if dtype is not None:
            # save_pretrained wrote the dtype of the trained parameters, but loaders expect that of the file
            config = draft / "config.json"
            fields = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(fields, indent=2) + "\n")
        if processor is not None:
            processor.save_pretrained(draft)
        if card is not None:
            (draft / "README.md").write_text(card)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(draft, directory)

    def write_or_remove() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        try:
            with writing(directory, "the model", "free some space, and export it again"):
                write()
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    run_on_rank_0(as_communicator(), write_or_remove)


def run_on_rank_0(comm: Communicator, work: Callable[[], None], poll_seconds: float = 5.0) -> None:
    """Run `work` on rank 0 while the other ranks wait, even if it takes longer than the time limit of a collective.

    Rank 0 runs `work` in a thread, and all ranks communicate every `poll_seconds` until it is done.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        job = pool.submit(work) if comm.rank == 0 else None
        busy = True
        while busy:
            if job is not None:
                wait([job], timeout=poll_seconds)
            busy = bool(comm.gather_ints([job is not None and not job.done()])[0][0])
        if job is not None:
            job.result()


def create_repository(args: TrainingArguments) -> str:
    """Create the repository that the options name, unless it exists; return its id, USER/NAME.

    Raises:
        ConfigError: the Hub cannot be reached, or does not allow it.
    """
    name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
    try:
        return str(HfApi(token=args.hub_token).create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id)
    except Exception as error:  # of huggingface_hub, of its HTTP client, or of the operating system
        raise ConfigError(
            f"--push_to_hub: the repository {name} cannot be created ({type(error).__name__}: {first_line(error)}); "
            "check the network and `hf auth login`, or leave --push_to_hub out and upload OUTPUT_DIR/model later"
        ) from error


def upload(args: TrainingArguments, directory: Path) -> str:
    """Upload a directory to the repository; return its address."""
    commit = HfApi(token=args.hub_token).upload_folder(
        repo_id=str(args.hub_model_id),
        folder_path=directory,
        revision=args.hub_revision,
        commit_message="The final model of mllm-seqpar finetune",
    )
    return str(commit.commit_url)


_CARD_OPTIONS = (
    *("strategy", "self_attention", "sp", "fps", "max_frames", "freeze", "train", "global_batch_size"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "load_in_4bit"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "bf16", "seed"),
)
"""Options that the model card shows if they are set."""


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
    # The Hub refuses an upload whose card has a path as its base model.
    metadata = ModelCardData(
        base_model=None if is_directory else base,
        library_name="peft" if run.use_peft else "transformers",
        tags=["lora", "mllm-seqpar"] if run.use_peft else ["mllm-seqpar"],
    )
    results = {"last training loss": "loss", "last evaluation loss": "eval_loss"}
    logged = {text: [row[name] for row in log if name in row] for text, name in results.items()}
    losses = [f"- {text}: {series[-1]:.4g}" for text, series in logged.items() if series]
    values = {**vars(options.training), **vars(run), **vars(options.frames), **vars(options.parallel)}
    names = [name for name in _CARD_OPTIONS if run.use_peft or not name.startswith("lora_")]
    rows = [f"| `--{name}` | {_text(values[name])} |" for name in names if values[name] not in (None, [], False)]
    packages = ["torch", "transformers", "accelerate", *(["peft"] if run.use_peft else [])]
    versions = [f"- mllm-seqpar {__version__}", *(f"- {name} {version(name)}" for name in packages)]
    newline = "\n"
    return f"""\
---
{metadata.to_yaml()}
---

# {Path(str(options.training.output_dir)).absolute().name}

{"LoRA adapters" if run.use_peft else "A model"} fine-tuned from `{base}` on `{run.data}` ({samples:,} samples) \
for {steps:,} steps with `mllm-seqpar finetune`.

## Use

```bash
mllm-seqpar ask --model THIS_DIRECTORY --video movie.mp4 --question "What happens?"
```

## Results

{newline.join(losses) or "No loss was logged."}

## Options

| option | value |
|---|---|
{newline.join(rows)}

## Versions

{newline.join(versions)}
"""


def _text(value: Any) -> str:
    value = getattr(value, "value", value)  # of an Enum
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
