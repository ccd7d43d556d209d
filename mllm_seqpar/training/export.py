"""The trained model as an ordinary directory: safetensors, config, processor."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar.comm import Communicator, as_communicator

from .arguments import SAVE_DTYPES


def export_dtype(choice: str, source: str) -> torch.dtype | None:
    """The dtype to save in: `choice` by name, "source": that of the directory `source`; None: as trained."""
    if choice != "source":
        return getattr(torch, choice)
    config = json.loads((Path(source) / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name in SAVE_DTYPES else None


def export_model(model: nn.Module, processor: Any, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Writes what `from_pretrained` of the unpatched, unsharded model reads. Every rank calls it, rank 0 writes.

    The whole model is gathered in rank 0's CPU memory. The directory appears at once, under its final name.

    Args:
        model: prepared, resharded; parameter names are those of the model before patching and sharding.
        processor: saved beside it; None for none.
        directory: replaced when it exists.
        dtype: what floating-point weights are saved in; None: as they are.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )

    def write() -> None:
        # under all names the same tensor again, which save_pretrained then writes once
        weights = {name: x.to(dtype) if dtype and x.is_floating_point() else x for name, x in state.items()}
        weights |= {alias: weights[name] for alias, name in _tied(model).items()}
        draft = directory.with_name(directory.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        model.save_pretrained(draft, state_dict=weights)  # type: ignore[operator]  # a transformers model
        if dtype is not None:
            _tell_dtype(draft / "config.json", dtype)
        if processor is not None:
            processor.save_pretrained(draft)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(draft, directory)

    on_rank_0(as_communicator(), write)


def on_rank_0(comm: Communicator, work: Callable[[], None], news: float = 5.0) -> None:
    """Rank 0 does `work`, and the others wait for it, however long it takes.

    A large model takes longer to write than a collective waits for a rank. So rank 0 works in a thread, and all meet
    every `news` seconds until it is done.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        job = pool.submit(work) if comm.rank == 0 else None
        busy = True
        while busy:
            if job is not None:
                wait([job], timeout=news)
            busy = bool(comm.gather_ints([job is not None and not job.done()])[0][0])
        if job is not None:
            job.result()


def _tell_dtype(config: Path, dtype: torch.dtype) -> None:
    """Loaders read the dtype from the config, where save_pretrained has written that of the trained parameters."""
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")


def _tied(model: nn.Module) -> dict[str, str]:
    """Second and later names of parameters that have several, with their first name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }
