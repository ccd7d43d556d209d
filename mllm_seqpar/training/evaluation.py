"""Evaluation with samples that several ranks share: each counts once, in the metrics and in the loss.

accelerate fills the last batch up with samples that came before, so that all groups compute equally often, and drops
their rows when it gathers. It knows nothing of the loss, which is one number for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mllm_seqpar.errors import ConfigError


def without_fillers(accelerator: Any, degree: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch with labels of -100 for the samples that only fill it up, where it holds others.

    Args:
        accelerator: which prepared the loader that is being read.
        degree: ranks that share a sample.
        inputs: with `labels` (batch, L) or without.
    """
    state, labels = accelerator.gradient_state, inputs.get("labels")
    if labels is None or not state.end_of_dataloader or state.remainder <= 0:
        return inputs
    rows = labels.shape[0]
    real = state.remainder - accelerator.process_index // degree * rows
    if real <= 0 or real >= rows:  # none: the whole batch's loss is dropped
        return inputs
    filler = torch.arange(rows, device=labels.device)[:, None] >= real
    return {**inputs, "labels": labels.masked_fill(filler, -100)}


def gather_once(accelerator: Any, unpatched: Any, data: Any, use_gather_object: bool = False) -> Any:
    """`gather_for_metrics` of one rank of every group: the others hold the same samples."""
    mesh = accelerator.torch_device_mesh
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return unpatched(data, use_gather_object=use_gather_object)
    if use_gather_object:
        raise ConfigError("SeqParTrainer: eval_use_gather_object=True is not supported; leave it out")
    degree, every = mesh["cp"].size(), accelerator.gather

    def gather(tensors: Any) -> Any:
        from accelerate.utils import recursively_apply

        def of_first_ranks(whole: Tensor) -> Tensor:
            return whole.unflatten(0, (accelerator.num_processes, -1))[::degree].flatten(0, 1)

        return recursively_apply(of_first_ranks, every(tensors))

    accelerator.gather = gather
    try:
        return unpatched(data, use_gather_object=False)
    finally:
        accelerator.gather = every


class _Counted(IterableDataset):
    """A stream that tells at its end how many samples it gave, and otherwise is the one it holds."""

    def __init__(self, stream: Any, told: Callable[[int], None]) -> None:
        self._stream, self._told = stream, told

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for sample in self._stream:
            count += 1
            yield sample
        self._told(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # set_epoch and generator, which accelerate asks for


@contextmanager
def counting_stream(loader: Any) -> Iterator[None]:
    """While a stream is evaluated that several groups read in turn: its loader learns how many samples of the last
    round are no fillers, which accelerate knows of datasets with a length only.

    Raises:
        ConfigError: worker processes read the stream, where it cannot be counted.
    """
    from accelerate.data_loader import IterableDatasetShard

    shard = getattr(loader, "dataset", None)
    if not isinstance(shard, IterableDatasetShard) or shard.drop_last:
        yield
        return
    if loader.num_workers:
        raise ConfigError(
            f"SeqParTrainer: dataloader_num_workers={loader.num_workers} and an evaluation set that is a stream, over "
            f"{shard.num_processes} groups of ranks: how many samples fill up the last batch would not be known; use 0 "
            "workers, or a dataset with a length"
        )
    stream, size = shard.dataset, shard.batch_size * (1 if shard.split_batches else shard.num_processes)

    def told(count: int) -> None:
        loader.remainder = count % size

    shard.dataset = _Counted(stream, told)
    try:
        yield
    finally:
        shard.dataset = stream
