"""Evaluation with samples that several ranks share: each sample counts once, in the metrics and in the loss.

accelerate repeats earlier samples to complete the last batch, so that all groups run the same number of batches, and
drops the duplicate rows when it gathers. The loss is one number per batch, from which it cannot drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mllm_seqpar.errors import ConfigError


def mask_duplicate_samples(accelerator: Any, degree: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Set the labels of duplicate samples to -100 in a batch that also has other samples.

    Args:
        accelerator: the one that prepared the data loader being read.
        degree: number of ranks that share a sample.
        inputs: the batch, with or without `labels` (batch, L).
    """
    state, labels = accelerator.gradient_state, inputs.get("labels")
    if labels is None or not state.end_of_dataloader or state.remainder <= 0:
        return inputs
    rows = labels.shape[0]
    real = state.remainder - accelerator.process_index // degree * rows
    if real <= 0 or real >= rows:  # with no real sample, the loss of the whole batch is dropped
        return inputs
    duplicate = torch.arange(rows, device=labels.device)[:, None] >= real
    return {**inputs, "labels": labels.masked_fill(duplicate, -100)}


def gather_once(accelerator: Any, gather_for_metrics: Any, data: Any, use_gather_object: bool = False) -> Any:
    """Run `gather_for_metrics` with one rank per group, because the ranks of a group have the same samples."""
    mesh = accelerator.torch_device_mesh
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return gather_for_metrics(data, use_gather_object=use_gather_object)
    if use_gather_object:
        raise ConfigError("SeqParTrainer: eval_use_gather_object=True is not supported; leave it out")
    degree, gather_all = mesh["cp"].size(), accelerator.gather

    def gather(tensors: Any) -> Any:
        from accelerate.utils import recursively_apply

        def first_rank_of_each_group(gathered: Tensor) -> Tensor:
            return gathered.unflatten(0, (accelerator.num_processes, -1))[::degree].flatten(0, 1)

        return recursively_apply(first_rank_of_each_group, gather_all(tensors))

    accelerator.gather = gather
    try:
        return gather_for_metrics(data, use_gather_object=False)
    finally:
        accelerator.gather = gather_all


class _CountedStream(IterableDataset):
    """Yields the samples of a stream and then passes their number to `on_end`."""

    def __init__(self, stream: Any, on_end: Callable[[int], None]) -> None:
        self._stream, self._on_end = stream, on_end

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for sample in self._stream:
            count += 1
            yield sample
        self._on_end(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # accelerate reads set_epoch and generator


@contextmanager
def count_streamed_samples(loader: Any) -> Iterator[None]:
    """Set the number of samples in the last round of `loader` that are not duplicates, if it reads a stream.

    accelerate computes this number only for datasets with a length.

    Raises:
        ConfigError: if worker processes read the stream, because the samples cannot be counted there.
    """
    from accelerate.data_loader import IterableDatasetShard

    shard = getattr(loader, "dataset", None)
    if not isinstance(shard, IterableDatasetShard) or shard.drop_last:
        yield
        return
    if loader.num_workers:
        raise ConfigError(
            f"SeqParTrainer: dataloader_num_workers={loader.num_workers} and an evaluation set that is a stream, over "
            f"{shard.num_processes} groups of ranks: duplicates in the last batch could not be counted; use 0 workers, "
            "or a dataset with a length"
        )
    stream, size = shard.dataset, shard.batch_size * (1 if shard.split_batches else shard.num_processes)

    def set_remainder(count: int) -> None:
        loader.remainder = count % size

    shard.dataset = _CountedStream(stream, set_remainder)
    try:
        yield
    finally:
        shard.dataset = stream
