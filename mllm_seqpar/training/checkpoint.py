"""Checkpoints from which training continues bit for bit on the same grid of ranks.

OUTPUT/checkpoint-00000010/ contains
    shards/         trained parameters, buffers and optimizer state, written by torch.distributed.checkpoint: each rank
                    writes its shards, and another number of ranks can read them
    random-R.pt     the random number generators of rank R
    progress.json   step, epoch, grid of ranks, and the arguments that determine the trajectory; written last

All files are written to a directory with the suffix .tmp, which rank 0 renames when all ranks are done. A crash leaves
the previous checkpoint unchanged. Frozen parameters are not saved: a resumed run loads them from --model.

The optimizer's state is read from its tensors and not through torch's get_optimizer_state_dict, which creates a state
for parameters that never had a gradient (for example the last layer of a vision tower whose second-to-last hidden
states are used) and then does not find it in the file.
"""

import json
import os
import random
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import check_collectively
from mllm_seqpar.errors import ConfigError, DataError

_NAME = re.compile(r"checkpoint-(\d{8})")
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run and the conditions under which it may continue.

    Attributes:
        step: completed optimizer steps.
        epoch: completed passes over the data.
        batch: completed steps in the current epoch.
        dp: number of data parallel groups.
        sp: ranks per group.
        conditions: values that must be equal to continue: arguments of the trajectory, digest of the data.
    """

    step: int
    epoch: int
    batch: int
    dp: int
    sp: int
    conditions: dict[str, Any]


def save_checkpoint(
    output: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int
) -> Path:
    """Write a checkpoint and return its directory; delete all but the last `keep` up to it. Every rank calls this."""
    final = output / f"checkpoint-{progress.step:08d}"
    draft = final.with_suffix(".tmp")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        for incomplete in output.glob("checkpoint-*.tmp"):
            shutil.rmtree(incomplete)
        draft.mkdir(parents=True)
    _barrier()
    with _without_single_process_warning():
        dcp.save(_state(model, optimizer), checkpoint_id=draft / "shards")
    torch.save(_random_state(), draft / f"random-{rank}.pt")
    _barrier()
    if rank == 0:
        (draft / "progress.json").write_text(json.dumps(asdict(progress), indent=1))
        if final.exists():  # written before a resume from an earlier checkpoint
            shutil.rmtree(final)
        os.replace(draft, final)
        # A run resumed from an earlier checkpoint may have later ones, which do not count as newer than this one.
        for old in [path for path in list_checkpoints(output) if path <= final][:-keep]:
            shutil.rmtree(old)
    _barrier()
    return final


def require_shared_directory(comm: Communicator, output: Path) -> None:
    """Raise ConfigError on all ranks unless every rank sees in `output` the files that rank 0 writes there.

    All ranks write parts of a checkpoint, and nodes without a common file system would fail at the first one only.
    """
    (name, *_) = comm.gather_texts(f".shared-{uuid.uuid4().hex}")
    check_collectively(comm, "output", lambda: (output / name).touch() if comm.rank == 0 else None)
    seen = [row[0] for row in comm.gather_ints([(output / name).exists()])]
    if comm.rank == 0:
        (output / name).unlink()
    if not all(seen):
        raise ConfigError(
            f"--output {output}: ranks {', '.join(str(rank) for rank, found in enumerate(seen) if not found)} do not "
            "see the files of rank 0 there, and a checkpoint has files of all ranks; give a directory on a file system "
            "that all nodes share, or write no checkpoints (--save-every 0)"
        )


def list_checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    if not output.is_dir():
        return []
    return sorted(p for p in output.iterdir() if _NAME.fullmatch(p.name) and (p / "progress.json").is_file())


def find_checkpoint(resume: str | None, output: Path) -> Path | None:
    """Return the checkpoint to resume from: None for None, and for "auto" if there is no checkpoint yet.

    Raises:
        DataError: if `resume` is not a complete checkpoint.
    """
    if resume is None:
        return None
    if resume == "auto":
        found = list_checkpoints(output)
        return found[-1] if found else None
    path = Path(resume)
    if not (path / "progress.json").is_file():
        known = ", ".join(p.name for p in list_checkpoints(path)) or "none"
        raise DataError(
            f"--resume {resume} is not a complete checkpoint (no progress.json in it); checkpoints inside it: {known}"
        )
    return path


def read_progress(checkpoint: Path, conditions: dict[str, Any]) -> Progress:
    """Return the progress of a checkpoint after checking that it may continue under `conditions`.

    Raises:
        ConfigError: if a condition differs from the checkpoint's.
        DataError: if the file is damaged.
    """
    try:
        progress = Progress(**json.loads((checkpoint / "progress.json").read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(f"{checkpoint}/progress.json is damaged: {error}") from error
    now = json.loads(json.dumps(conditions))  # converts tuples to lists, as in the file
    names = sorted(progress.conditions.keys() | now.keys())
    differing = [
        f"{name} was {progress.conditions.get(name)!r} and is {now.get(name)!r} now"
        for name in names
        if progress.conditions.get(name) != now.get(name)
    ]
    if differing:
        raise ConfigError(
            f"cannot continue {checkpoint}: {'; '.join(differing)}. "
            "Use the same options, or start again without --resume"
        )
    return progress


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore parameters, buffers, optimizer state and random number generators. Every rank calls this.

    A rank that did not exist when the checkpoint was written keeps its random number generators.

    Raises:
        DataError: if the checkpoint has other parameters than the model.
    """
    reader = dcp.FileSystemReader(checkpoint / "shards")
    known = reader.read_metadata().state_dict_metadata
    _allocate_optimizer_state(model, optimizer, {name for name in known if name.startswith("optimizer/")})
    state = _state(model, optimizer)
    missing, extra = sorted(state.keys() - known.keys()), sorted(known.keys() - state.keys())
    if missing or extra:
        raise DataError(
            f"{checkpoint} does not fit the model: missing {missing[:3]} ({len(missing)} in all), unexpected "
            f"{extra[:3]} ({len(extra)} in all); use the --model and --freeze that it was saved with"
        )
    with _without_single_process_warning():
        dcp.load(state, storage_reader=reader)
    rank = dist.get_rank() if dist.is_initialized() else 0
    random_file = checkpoint / f"random-{rank}.pt"
    if random_file.is_file():
        _set_random_state(torch.load(random_file, weights_only=True))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all tensors of a checkpoint by name: those in use, which dcp reads from and writes into."""
    names = _names(model)
    state: dict[str, Any] = {f"model/{name}": p.detach() for p, name in names.items() if p.requires_grad}
    persistent = model.state_dict().keys()
    state |= {f"model/{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            state[f"optimizer/{names[parameter]}/{key}"] = value
    return state


def _allocate_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Create a tensor for every saved entry, sharded as its parameter, for dcp to read into."""
    for parameter, name in _names(model).items():
        prefix = f"optimizer/{name}/"
        keys = sorted(entry.removeprefix(prefix) for entry in saved if entry.startswith(prefix))
        optimizer.state.pop(parameter, None)
        if keys:
            # AdamW counts steps in a scalar; all other state is sharded as the parameter.
            optimizer.state[parameter] = {
                key: torch.tensor(0.0) if key == "step" else torch.zeros_like(parameter.detach()) for key in keys
            }


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """Suppress the warning that dcp issues at every checkpoint of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
