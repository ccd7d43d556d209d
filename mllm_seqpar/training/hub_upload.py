"""The upload of the final model to the Hugging Face Hub (--push_to_hub).

`Trainer` would create the repository on rank 0 alone, after the model is loaded, and upload what is in --output_dir,
where the final model is not. Here, all ranks check before anything is loaded whether the repository can be written to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from mllm_seqpar.errors import ConfigError, first_line


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
