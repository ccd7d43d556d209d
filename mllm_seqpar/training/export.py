"""Export of the trained model as an ordinary directory: safetensors, config and processor; its upload to the Hub.

For --push_to_hub, `Trainer` would create the repository on rank 0 alone, after the model is loaded, and upload what is
in --output_dir, where the final model is not. Here, all ranks check before anything is loaded whether the repository
can be written to.
"""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.errors import ConfigError, first_line
from mllm_seqpar.models.hub import local_directory

from .arguments import SAVE_DTYPES


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

    def write() -> None:
        weights = {name: x.to(dtype) if dtype and x.is_floating_point() else x for name, x in state.items()}
        # save_pretrained writes a tied weight once if all its names map to the same tensor
        weights |= {alias: weights[name] for alias, name in _tied(model).items()}
        draft = directory.with_name(directory.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
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

    run_on_rank_0(as_communicator(), write)


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


def _tied(model: nn.Module) -> dict[str, str]:
    """Return {alias: first name} for parameters that have several names."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }


def create_repository(args: TrainingArguments) -> str:
    """Create the repository that the options name, unless it exists; return its id, USER/NAME.

    Raises:
        ConfigError: the Hub cannot be reached, or does not allow it.
    """
    name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
    try:
        return str(_api(args).create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id)
    except Exception as error:  # of huggingface_hub, of its HTTP client, or of the operating system
        raise ConfigError(
            f"--push_to_hub: the repository {name} cannot be created ({type(error).__name__}: {first_line(error)}); "
            "check the network and `hf auth login`, or leave --push_to_hub out and upload OUTPUT_DIR/model later"
        ) from error


def upload(args: TrainingArguments, directory: Path) -> str:
    """Upload a directory to the repository; return its address."""
    commit = _api(args).upload_folder(
        repo_id=str(args.hub_model_id),
        folder_path=directory,
        revision=args.hub_revision,
        commit_message="The final model of mllm-seqpar finetune",
    )
    return str(commit.commit_url)


def _api(args: TrainingArguments) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=args.hub_token)
