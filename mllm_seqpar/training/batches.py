"""The micro-batches of a run in training order, read by all ranks together, with replacements for bad samples.

A rank decodes only its own frames of a video, so a fault may be seen by one rank alone. After each micro-batch all
ranks exchange one small message. A sample that any rank of a group cannot read is replaced on all ranks of the group
by the next one in the epoch's order; any other error is raised on all ranks at the same micro-batch, so that they can
still save a checkpoint together.

The exchange must not use a communicator that the training uses, because the next micro-batch is read in a thread
while the current one is computed: `reader_communicator` creates a gloo group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.data.chat import ChatBatch, MediaError
from mllm_seqpar.data.prefetch import read_ahead
from mllm_seqpar.errors import ConfigError, DataError, SeqParError

from .data_loader import ShardedDataLoader
from .sample_order import SampleOrder, eval_order

_log = get_logger(__name__)

MOST_REPLACEMENTS = 100
"""After this many bad samples in a row, the run stops: the media are probably not where they should be."""


def reader_communicator(timeout: float) -> Communicator:
    """Return a communicator of all ranks for `BatchReader`. Every rank calls this, at the same point of the program.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return as_communicator("self")
    return as_communicator(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch with this rank's frames decoded.

    Attributes:
        chat: the text, with the numbers of targets, tokens and frames, and the places of the samples.
        arguments: the arguments of the model's forward, on the CPU.
        samples: numbers of the samples in the data set, replacements included.
    """

    chat: ChatBatch
    arguments: dict[str, Any]
    samples: tuple[int, ...]


class _Slot:
    """One sample of a micro-batch, or its replacement."""

    def __init__(self, sample: int, replacements: Iterator[int]) -> None:
        self.sample, self._replacements, self._tried = sample, replacements, 0

    def advance(self, skipped: dict[int, str]) -> None:
        """Move to the next sample that is not known to be bad; DataError if there is none."""
        first = skipped[self.sample]
        while self.sample in skipped:
            self._tried += 1
            following = next(self._replacements, None)
            if following is None or self._tried > MOST_REPLACEMENTS:
                raise DataError(
                    f"{self._tried} samples in a row cannot be read, so the media may not be where they should be; "
                    f"run `mllm-seqpar check-data`. One of them: {first}"
                )
            self.sample = following


class BatchReader:
    """Reads micro-batches on all ranks together.

    Args:
        loader: this rank's; its data set has the option `on_bad_media`.
        comm: all ranks of the run; `reader_communicator()`.
        sp: number of consecutive ranks that share samples.

    Attributes:
        skipped: what is wrong with each sample that was replaced, by its number; equal on all ranks of a group.
    """

    def __init__(self, loader: ShardedDataLoader, comm: Communicator, sp: int) -> None:
        self._loader, self._comm = loader, comm
        first = comm.rank // sp * sp
        self._members = range(first, first + sp)
        self._skips = loader.dataset.on_bad_media == "skip"
        self.skipped: dict[int, str] = {}

    def read(self, samples: Sequence[int], replacements: Callable[[int], Iterator[int]]) -> LoadedBatch:
        """Return these samples as one micro-batch. Every rank of the run calls this equally often.

        Args:
            samples: of this rank's group.
            replacements: the samples that may replace a sample, in order; equal on all ranks of a group.

        Raises:
            SeqParError: on all ranks, if a rank cannot read its part and the sample must not be replaced.
        """
        slots = [_Slot(sample, replacements(sample)) for sample in samples]
        loaded: LoadedBatch | None = None
        while True:
            error: Exception | None = None
            if loaded is None:
                loaded, error = attempt(partial(self._load, slots))
            bad = error.sample if self._skips and isinstance(error, MediaError) else -1
            fatal = error is not None and bad < 0
            rows = self._comm.gather_ints([int(fatal), bad])
            if any(row[0] for row in rows):
                agree(self._comm, "reading the training data", error=error if fatal else None)
            if all(row[1] < 0 for row in rows):
                assert loaded is not None
                return loaded
            messages = self._comm.gather_texts(str(error) if bad >= 0 else "")
            for rank in self._members:
                if rows[rank][1] >= 0:
                    self._skip(slots[rows[rank][1]].sample, messages[rank])
                    loaded = None

    def _load(self, slots: Sequence[_Slot]) -> LoadedBatch:
        for slot in slots:
            if slot.sample in self.skipped:
                slot.advance(self.skipped)
        samples = tuple(slot.sample for slot in slots)
        try:
            batch = self._loader.batch(samples)
            return LoadedBatch(batch.chat, batch.inputs(torch.device("cpu")), samples)
        except SeqParError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # of a processor, for this content
            places = ", ".join(self._loader.dataset.records.place(sample) for sample in samples)
            raise DataError(f"{places}: {type(error).__name__}: {error}") from error

    def _skip(self, sample: int, message: str) -> None:
        if sample not in self.skipped:
            self.skipped[sample] = message
            if self._comm.rank == self._members[0]:
                _log.warning("skipped, %d so far: %s", len(self.skipped), message)


class TrainingBatches(IterableDataset[LoadedBatch]):
    """The micro-batches of this rank's group, in training order, from a step on; those of a step are read in a thread.

    Pass it to a `DataLoader` with `batch_size=None` and no worker processes, or iterate over it. `skipped` of the
    reader counts what was replaced.

    Args:
        reader: this rank's.
        order: the order of the samples.
        group: number of this rank's data parallel group.
        first_step: the optimizer step to begin with; a resumed run yields what an uninterrupted one would.
        steps: the step to end before.
    """

    def __init__(self, reader: BatchReader, order: SampleOrder, *, group: int, first_step: int = 0, steps: int) -> None:
        self.reader, self._order, self._group = reader, order, group
        self._first_step, self._steps = first_step, steps

    def __len__(self) -> int:
        return (self._steps - self._first_step) * self._order.micro_batches

    def __iter__(self) -> Iterator[LoadedBatch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "TrainingBatches in a worker process of a DataLoader, which cannot communicate with other ranks; use "
                "num_workers=0 (a thread reads ahead)"
            )
        steps = range(self._first_step, self._steps)
        passes = ((step, samples) for step in steps for samples in self._order.step(step, self._group))
        with closing(read_ahead(passes, self._read, self._order.micro_batches)) as batches:
            yield from batches

    def _read(self, item: tuple[int, list[int]]) -> LoadedBatch:
        step, samples = item
        return self.reader.read(samples, partial(self._order.replacements, step))


class EpochBatches(IterableDataset[dict[str, Any]]):
    """The arguments of forward for each micro-batch of an epoch, for a `Trainer` that iterates over it once per epoch.

    Where a resumed epoch begins in its middle, None stands for each micro-batch that `Trainer` skips, so that nothing
    is decoded in vain.

    Args:
        reader: this rank's.
        order: the order of the samples.
        group: number of this rank's data parallel group.
        step: returns the number of completed steps.
    """

    def __init__(self, reader: BatchReader, order: SampleOrder, group: int, step: Callable[[], int]) -> None:
        self._reader, self._order, self._group, self._step = reader, order, group, step

    def __len__(self) -> int:
        return self._order.steps_per_epoch * self._order.micro_batches

    def __iter__(self) -> Iterator[Any]:
        start = self._step()
        epoch, done = self._order.position(start)
        yield from [None] * (done * self._order.micro_batches)
        end = (epoch + 1) * self._order.steps_per_epoch
        batches = TrainingBatches(self._reader, self._order, group=self._group, first_step=start, steps=end)
        for batch in batches:
            yield batch.arguments


class EvaluationBatches(IterableDataset[tuple[LoadedBatch, bool]]):
    """The micro-batches of this rank's group in an evaluation, and whether each counts; equally many in all groups.

    Args:
        reader: this rank's, of the evaluation data.
        samples: number of samples in the data.
        micro_batch: samples of a forward pass of a group.
        groups: number of data parallel groups.
        group: number of this rank's group.
    """

    def __init__(self, reader: BatchReader, samples: int, micro_batch: int, groups: int, group: int) -> None:
        self._reader, self.samples = reader, samples
        self._passes = eval_order(samples, micro_batch, groups, group)

    def __len__(self) -> int:
        return len(self._passes)

    def __iter__(self) -> Iterator[tuple[LoadedBatch, bool]]:
        with closing(read_ahead(self._passes, lambda item: (self._reader.read(item[0], _none), item[1]))) as batches:
            yield from batches


def _none(sample: int) -> Iterator[int]:
    """An evaluation replaces no sample."""
    return iter(())
