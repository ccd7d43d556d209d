"""The micro-batches of a run in training order, read by all ranks together, with replacements for bad samples.

A rank decodes only its own frames of a video, so a single rank may find a fault. After each micro-batch, all ranks
exchange one small message. A sample that any rank of a group cannot read is replaced on all ranks of the group by
another one (`replacement`); any other error is raised on all ranks at the same micro-batch, so that they can still
save a checkpoint together.

The exchange must not use a communicator that the training uses, because the next micro-batches are read in threads
while the current one is computed: `reader_communicator` creates a separate gloo group. Several threads decode one
micro-batch each, as far ahead as a limit on their bytes allows. One thread agrees on the micro-batches with the other
ranks, in order. It uses what another thread has decoded, unless the agreement has replaced one of these samples.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.data.chat import ChatBatch, ChatDataset, MediaError, load_local_images
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.prefetch import ReadAheadLimit
from mllm_seqpar.data.reader import decode_threads
from mllm_seqpar.errors import DataError, SeqParError
from mllm_seqpar.sharding import FrameShard

from .stored_tower import ARGUMENT, StoredTower

_log = get_logger(__name__)

MOST_REPLACEMENTS = 100
"""After this many bad samples in a row, the run stops: the media are probably in another place."""

READ_AHEAD_BYTES = 4 << 30
"""Default limit of the bytes of frames that a rank reads ahead."""

_READ_AHEAD = 8
"""The largest number of micro-batches that are read ahead, unless a step has more."""

_LOADERS = 4
"""The largest number of threads that decode micro-batches; each of them uses `--decode_threads` threads."""


def reader_communicator(timeout: float) -> Communicator:
    """Return a communicator of all ranks for `BatchReader`. All ranks must call this at the same point of the program.

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
        arguments: the arguments of the model's forward, on the CPU; with stored features, also a `TowerRows`.
        samples: numbers of the samples in the data set, replacements included.
    """

    chat: ChatBatch
    arguments: dict[str, Any]
    samples: tuple[int, ...]
    has_features: bool = False


def replacement(sample: int, number: int, samples: int) -> int:
    """Return the `number`-th sample that may replace `sample`, of `samples` in the data; the first of them is itself.

    Each sample is returned once. The step is near the golden ratio of their number, because neighbours often share a
    video. It depends on nothing else, so a resumed run and a run with other ranks find the same replacements.
    """
    step = next(step for step in count(max(1, round(0.618 * samples))) if math.gcd(step, samples) == 1)
    return (sample + number * step) % samples


class BatchReader:
    """Reads micro-batches on all ranks together.

    Args:
        dataset: its option `on_bad_media` says whether bad samples are replaced.
        group: the consecutive ranks that share samples.
        comm: all ranks of the run; `reader_communicator()`.
        ahead_bytes: limit on the bytes of frames that are read ahead; one micro-batch is always allowed.
        features: read instead of frames if all ranks have those of a micro-batch.

    Attributes:
        skipped: the fault of each sample that was replaced, by its number; equal on all ranks of a group.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        group: Any,
        comm: Communicator,
        ahead_bytes: int = READ_AHEAD_BYTES,
        features: StoredTower | None = None,
    ) -> None:
        self._dataset, self._group, self._comm = dataset, as_communicator(group), comm
        self._ahead_bytes, self._features = ahead_bytes, features
        self._family = chat_family(dataset.processor)
        self._opening = threading.Lock()  # tokenizers and tables are used by one thread at a time
        first = comm.rank - self._group.rank
        self._members = range(first, first + self._group.size)
        self._skips = dataset.on_bad_media == "skip"
        self.skipped: dict[int, str] = {}

    def read_all(self, passes: Iterable[Sequence[int]], ahead: int = 1) -> Generator[LoadedBatch]:
        """Yield the samples of each pass as one micro-batch, while at least `ahead` of the following ones are read.

        All ranks take the same number. If they stop early, they still agree on the micro-batches that any rank has
        begun.
        """
        limit, waiting = ReadAheadLimit(self._ahead_bytes), deque[Future[LoadedBatch]]()
        threads = min(_LOADERS, self._dataset.threads or decode_threads())
        loading = ThreadPoolExecutor(threads, thread_name_prefix="load")
        agreeing = ThreadPoolExecutor(1, thread_name_prefix="agree")
        released = count()

        def following() -> LoadedBatch:
            batch = waiting.popleft().result()
            limit.release(next(released))
            return batch

        try:
            for number, samples in enumerate(passes):
                chosen, _ = attempt(partial(self._chosen, samples))  # `read` raises the error, on all ranks
                chosen = chosen or tuple(samples)
                begun = loading.submit(self._load, chosen, partial(limit.admit, number))
                waiting.append(agreeing.submit(self.read, samples, (chosen, begun)))
                if len(waiting) > max(ahead, _READ_AHEAD):
                    yield following()
            while waiting:
                yield following()
        finally:
            limit.close()
            loading.shutdown(cancel_futures=True)
            agreeing.shutdown()

    def read(
        self, samples: Sequence[int], begun: tuple[tuple[int, ...], Future[LoadedBatch]] | None = None
    ) -> LoadedBatch:
        """Return these samples as one micro-batch. Every rank of the run must call this the same number of times.

        Args:
            samples: of this rank's group.
            begun: the samples, with replacements, that another thread loads, and its result.

        Raises:
            SeqParError: on all ranks, if a rank cannot read its part and the sample must not be replaced.
        """
        loaded: LoadedBatch | None = None
        decode = False
        while True:
            error: Exception | None = None
            if loaded is None:
                loaded, error = attempt(partial(self._usable, samples, begun, decode))
            stopped = isinstance(error, CancelledError)
            bad = error.sample if self._skips and isinstance(error, MediaError) else -1
            fatal = error is not None and bad < 0 and not stopped
            has_features = loaded is not None and loaded.has_features
            numbers = bad, has_features
            _, rows = agree(
                self._comm,
                "reading the training data",
                error=error if fatal else None,
                numbers=lambda _, numbers=numbers: numbers,
            )
            if any(row[0] >= 0 for row in rows):
                messages = self._comm.gather_texts(str(error) if bad >= 0 else "")
                faults = {rows[rank][0]: messages[rank] for rank in self._members if rows[rank][0] >= 0}
                for sample, message in [(self._replaced(samples[place]), text) for place, text in faults.items()]:
                    self._skip(sample, message)
                    loaded = None
            elif any(row[1] for row in rows) and not all(row[1] for row in rows):
                decode = True  # some rank computes features, so all do
                loaded = None if has_features else loaded
            elif loaded is None:
                raise CancelledError
            else:
                return loaded

    def _usable(
        self, samples: Sequence[int], begun: tuple[tuple[int, ...], Future[LoadedBatch]] | None, decode: bool
    ) -> LoadedBatch:
        """Load these samples, with replacements for those that are known to be bad; `begun` if it has the same."""
        chosen = self._chosen(samples)
        if begun is not None:
            loading, result = begun
            result.exception()  # waits in any case, because a batch is released only after it was admitted
            if loading == chosen and not decode:
                return result.result()
        return self._load(chosen, decode=decode)

    def _chosen(self, samples: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._replaced, samples))

    def _replaced(self, sample: int) -> int:
        """Return `sample`, or its first replacement that is not known to be bad; DataError if there is none."""
        total = len(self._dataset)
        for number in range(min(total, MOST_REPLACEMENTS + 1)):
            if (found := replacement(sample, number, total)) not in self.skipped:
                return found
        raise DataError(
            f"{number + 1} samples in a row cannot be read, so the media are probably in another place; "
            f"run `mllm-seqpar check-data`. One of them: {self.skipped[sample]}"
        )

    def _load(
        self, samples: Sequence[int], admit: Callable[[int], None] | None = None, decode: bool = False
    ) -> LoadedBatch:
        """Decode this rank's frames of these samples, once `admit` has admitted their number of bytes.

        With `decode`, frames are decoded although their features are stored.
        """
        size = 0
        try:
            try:
                with self._opening:
                    batch = self._dataset.batch(samples)
                    shard = FrameShard.of(len(batch.text.slots), self._group, self._family.frame_layout)
                    size = len(shard) and len(shard) * sum(x.nbytes for x in self._family.blank())
            finally:
                if admit is not None:
                    admit(size)  # even without a batch, because the following ones wait for their turn
            rows = None if self._features is None else self._features.rows(batch, shard, read=not decode)
            has_features = rows is not None and rows.states is not None
            arguments = self._arguments(batch, shard, decode=not has_features)
            if rows is not None:
                arguments[ARGUMENT] = rows
            return LoadedBatch(batch, arguments, tuple(samples), has_features)
        except SeqParError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # of a processor, for this content
            places = ", ".join(self._dataset.records.place(sample) for sample in samples)
            raise DataError(f"{places}: {type(error).__name__}: {error}") from error

    def _arguments(self, batch: ChatBatch, shard: FrameShard, decode: bool) -> dict[str, Any]:
        """Return the arguments of the model's forward, with the frames of `shard`, and labels.

        Without `decode`, blank images that take the memory of one stand for the frames.
        """
        family = self._family
        arguments: dict[str, Any] = family.arguments(batch.text) | {"use_cache": False}
        if shard.total:
            if decode:
                pixels = load_local_images(batch, shard.ranges, family)
            else:
                pixels = tuple(x.expand(len(shard), *x.shape[1:]) for x in family.blank())
            arguments |= dict(zip(family.frame_names, pixels, strict=True))
            if self._group.size > 1 or family.always_sharded:
                arguments["visual_shard"] = shard
        return arguments

    def _skip(self, sample: int, message: str) -> None:
        if sample not in self.skipped:
            self.skipped[sample] = message
            if self._comm.rank == self._members[0]:
                _log.warning("skipped, %d so far: %s", len(self.skipped), message)


class Restarted(IterableDataset[Any]):
    """What `begin` yields, from its start in each iteration, for a `DataLoader` with `batch_size=None`.

    Args:
        begin: called by each iteration.
        length: the number of items of a whole iteration.
    """

    def __init__(self, begin: Callable[[], Generator[Any]], length: int) -> None:
        self._begin, self._length = begin, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        with closing(self._begin()) as items:
            yield from items
