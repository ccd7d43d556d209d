"""The micro-batches of a run: which samples a step trains on, and how all ranks read them together.

A rank decodes only its own frames of a video, so a single rank may find a fault. Threads decode the next micro-batches
while the current ones are used, as far ahead as a limit on their bytes allows. When a micro-batch is taken, all ranks
exchange one small message. A sample that any rank of a group cannot read is replaced on all ranks of the group by
another one; any other error is raised on all ranks at the same micro-batch, so that they can still save a checkpoint
together.

`Trainer`'s own samplers give each step the same samples on any number of ranks only if the samples of an epoch fill its
last step, and its loaders read ahead in processes, to which a rank's share of the frames would have to be sent.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any

from mllm_seqpar._logging import get_logger
from mllm_seqpar.chats.batch import ChatBatch, MediaError, load_local_images
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import PASSED, ConfigError, DataError
from mllm_seqpar.sharding import FrameShard
from mllm_seqpar.videos.reader import decode_threads

from .stored_tower import ARGUMENT, TowerReplay

_log = get_logger(__name__)

MOST_REPLACEMENTS = 100
"""After this many bad samples in a row, the run stops: the media are probably in another place."""

READ_AHEAD_BYTES = 4 << 30
"""Default limit of the bytes of frames that a rank reads ahead."""

_READ_AHEAD = 8
"""The largest number of micro-batches that are read ahead, unless a step has more."""

_LOADERS = 4
"""The largest number of threads that decode micro-batches; each of them uses `--decode_threads` threads."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples of each step and data parallel group: index arithmetic, the same on every rank.

    An optimizer step takes the next `global_batch` samples of the epoch's permutation and distributes them over
    micro-batches, and each micro-batch over the data parallel groups, so a step trains on the same samples for any
    number of ranks: with G = dp * micro_batch, micro-batch m holds samples m*G ... m*G + G - 1 of the step, and group g
    takes the g-th `micro_batch` of those. Samples at the end of an epoch that do not fill a step are left out of it.

    Attributes:
        samples: number of samples in the data.
        global_batch: samples of one optimizer step.
        micro_batch: samples of one forward pass of one group.
        dp: number of data parallel groups.
        seed: seed of the permutations.
    """

    samples: int
    global_batch: int
    micro_batch: int
    dp: int
    seed: int

    def __post_init__(self) -> None:
        per_pass = self.micro_batch * self.dp
        if self.global_batch % per_pass:
            raise ConfigError(
                f"--global_batch_size {self.global_batch} is not a multiple of {per_pass} = "
                f"--per_device_train_batch_size {self.micro_batch} x {self.dp} data parallel groups; change one "
                "of them or --sp"
            )
        if self.samples < self.global_batch:
            raise ConfigError(
                f"a step has {self.global_batch} samples (--per_device_train_batch_size x groups x "
                f"--gradient_accumulation_steps), more than the {self.samples} samples of the training data; lower one "
                "of these options"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one pass over the data."""
        return self.samples // self.global_batch

    @property
    def micro_batches(self) -> int:
        """Number of forward passes of each group in one optimizer step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def passes(self, group: int, first: int, end: int) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of `group` from optimizer step `first` to the step before `end`."""
        size = self.micro_batch
        for step in range(first, end):
            epoch, index = divmod(step, self.steps_per_epoch)
            order = _permutation(self.samples, f"{self.seed}/{epoch}")
            samples = order[index * self.global_batch : (index + 1) * self.global_batch]
            for start in range(group * size, self.global_batch, size * self.dp):
                yield samples[start : start + size]


@lru_cache(maxsize=1)
def _permutation(samples: int, seed: str) -> list[int]:
    """Return the order of an epoch; cached, because shuffling a million samples takes most of a second."""
    order = list(range(samples))
    random.Random(seed).shuffle(order)
    return order


@dataclass(eq=False)
class MicroBatch:
    """The samples of one forward pass of a group. `BatchReader` opens it first, and then loads it.

    Attributes:
        samples: numbers of the samples in the data set, replacements included.
        chat: once opened, the text, with the numbers of targets, tokens and frames, and the places of the samples.
        shard: once opened, the frames of this rank.
        size: the bytes of these frames when they are decoded; 0 before.
        arguments: once loaded, the arguments of the model's forward, on the CPU; with stored features, also a
            `TowerRows`.
        loaded: ends when the arguments are there, or with the error.
    """

    samples: tuple[int, ...]
    chat: ChatBatch = field(init=False)
    shard: FrameShard = field(init=False)
    size: int = field(default=0, init=False)
    arguments: dict[str, Any] = field(default_factory=dict, init=False)
    loaded: Future[None] = field(default_factory=Future, init=False)

    @property
    def has_features(self) -> bool:
        """Whether stored features replace the frames."""
        return ARGUMENT in self.arguments and self.arguments[ARGUMENT].states is not None


class BatchReader:
    """Reads micro-batches on all ranks together.

    Args:
        dataset: its option `on_bad_media` says whether bad samples are replaced.
        group: the consecutive ranks that share samples.
        comm: all ranks of the run, for one small exchange per micro-batch; any group that `as_communicator` takes.
        ahead_bytes: limit on the bytes of frames that are read ahead; one micro-batch is always allowed.
        features: read instead of frames if all ranks have those of a micro-batch.

    Attributes:
        skipped: the fault of each sample that was replaced, by its number; equal on all ranks of a group.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        group: Any,
        comm: Any = None,
        ahead_bytes: int = READ_AHEAD_BYTES,
        features: TowerReplay | None = None,
    ) -> None:
        self._dataset, self._group, self._comm = dataset, as_communicator(group), as_communicator(comm)
        self._ahead_bytes, self._features = ahead_bytes, features
        self._chat_format = chat_family(dataset.processor)
        self._lock = threading.Lock()  # tokenizers and tables are used by one thread at a time
        first = self._comm.rank - self._group.rank
        self._members = range(first, first + self._group.size)
        self._skips = dataset.on_bad_media == "skip"
        self.skipped: dict[int, str] = {}
        self.threads = min(_LOADERS, dataset.threads or decode_threads())  # that decode micro-batches

    def read_all(self, passes: Iterable[Sequence[int]], ahead: int = 1) -> Generator[MicroBatch]:
        """Yield the samples of each pass as one micro-batch, while at least `ahead` of the following ones are read.

        All ranks take the same number.
        """
        waiting = deque[tuple[Sequence[int], MicroBatch]]()

        def following() -> MicroBatch:
            samples, begun = waiting.popleft()
            wait([begun.loaded])  # in any case, because its bytes count until it is released
            batch = self.read(samples, begun)
            reading.release(begun)
            return batch

        with closing(_ReadAhead(self, self._ahead_bytes)) as reading:
            for samples in passes:
                chosen = attempt(partial(self._chosen, samples))[0] or tuple(samples)  # `read` raises the error
                waiting.append((samples, reading.begin(chosen)))
                if len(waiting) > max(ahead, _READ_AHEAD):
                    yield following()
            while waiting:
                yield following()

    def read(self, samples: Sequence[int], begun: MicroBatch | None = None) -> MicroBatch:
        """Return these samples as one micro-batch. Every rank of the run must call this the same number of times.

        Args:
            samples: of this rank's group.
            begun: what other threads read of them; returned unless some of its samples must be replaced.

        Raises:
            SeqParError: on all ranks, if a rank cannot read its part and the sample must not be replaced.
        """
        batch, decode = begun, False
        while True:
            batch, error = attempt(partial(self._usable, samples, batch, decode))
            bad = error.sample if self._skips and isinstance(error, MediaError) else -1
            numbers = bad, batch is not None and batch.has_features
            _, rows = agree(
                self._comm,
                "reading the training data",
                error=None if bad >= 0 else error,
                numbers=lambda _, numbers=numbers: numbers,
            )
            features = {row[1] for row in rows}
            if any(row[0] >= 0 for row in rows):
                messages = self._comm.gather_texts(str(error) if bad >= 0 else "")
                faults = {rows[rank][0]: messages[rank] for rank in self._members if rows[rank][0] >= 0}
                for sample, message in [(self._replaced(samples[place]), text) for place, text in faults.items()]:
                    self._skip(sample, message)
            elif len(features) == 1:
                assert batch is not None
                return batch
            else:
                decode = True  # some rank computes features, so all do

    def _usable(self, samples: Sequence[int], batch: MicroBatch | None, decode: bool) -> MicroBatch:
        """Return `batch` if it has these samples, with replacements for known bad ones; otherwise load them.

        With `decode`, stored features are not used.
        """
        chosen = self._chosen(samples)
        if batch is None or batch.samples != chosen or (decode and batch.has_features):
            batch = MicroBatch(chosen)
            self.open(batch)
            self.load(batch, decode)
        batch.loaded.result()
        return batch

    def _chosen(self, samples: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._replaced, samples))

    def _replaced(self, sample: int) -> int:
        """Return `sample`, or the first one that is not known to be bad and may replace it; DataError if there is none.

        The candidates are far apart, because neighbours often share a video: all samples of a bad video would be
        replaced by the same sample. They depend on nothing else, so a resumed run and a run with other ranks find the
        same replacements.
        """
        total = len(self._dataset)
        candidates = min(total, MOST_REPLACEMENTS + 1)
        # Near the golden ratio, and without a common divisor, so that each sample is a candidate once.
        step = next(step for step in count(max(1, round(0.618 * total))) if math.gcd(step, total) == 1)
        for number in range(candidates):
            if (candidate := (sample + number * step) % total) not in self.skipped:
                return candidate
        raise DataError(
            f"{candidates} samples in a row cannot be read, so the media are probably in another place; "
            f"run `mllm-seqpar check-data`. One of them: {self.skipped[sample]}"
        )

    def open(self, batch: MicroBatch) -> None:
        """Read the text of a micro-batch and plan its frames, without decoding anything."""
        with self._lock, self._naming(batch.samples):
            batch.chat = self._dataset.batch(batch.samples)
            text, layout = batch.chat.text, self._chat_format.frame_layout
            batch.shard = FrameShard.of(len(text.slots), self._group, layout, text.sizes)
            batch.size = len(batch.shard) and len(batch.shard) * sum(x.nbytes for x in self._chat_format.blank())

    def load(self, batch: MicroBatch, decode: bool = False) -> None:
        """Decode this rank's frames of an open micro-batch; unless `decode`, only if their features are not stored."""
        with self._naming(batch.samples):
            rows = None if self._features is None else self._features.rows(batch.chat, batch.shard, read=not decode)
            stored = None if rows is None or rows.states is None else len(rows)
            arguments = self._arguments(batch.chat, batch.shard, stored)
            batch.arguments = arguments if rows is None else arguments | {ARGUMENT: rows}
        batch.loaded.set_result(None)

    @contextmanager
    def _naming(self, samples: Sequence[int]) -> Iterator[None]:
        """Raise DataError with the places of the samples for errors of a processor, which depend on their content."""
        try:
            yield
        except PASSED:
            raise
        except Exception as error:
            places = ", ".join(self._dataset.records.place(sample) for sample in samples)
            raise DataError(f"{places}: {type(error).__name__}: {error}") from error

    def _arguments(self, batch: ChatBatch, shard: FrameShard, stored: int | None) -> dict[str, Any]:
        """Return the arguments of the model's forward, with the frames of `shard`, and labels.

        If `stored` rows of the tower are read, as many rows that take the memory of one stand for the frames.
        """
        chat_format = self._chat_format
        arguments: dict[str, Any] = chat_format.arguments(batch.text) | {"use_cache": False}
        if shard.total:
            if stored is None:
                pixels = load_local_images(batch, shard.ranges, chat_format)
            else:
                blank = chat_format.joined([chat_format.blank()])
                pixels = tuple(x[:1].expand(stored, *x.shape[1:]) for x in blank)
            arguments |= dict(zip(chat_format.frame_names, pixels, strict=True))
            if self._group.size > 1 or chat_format.always_sharded:
                arguments["visual_shard"] = shard
        return arguments

    def _skip(self, sample: int, message: str) -> None:
        if sample not in self.skipped:
            self.skipped[sample] = message
            if self._comm.rank == self._members[0]:
                _log.warning("skipped, %d so far: %s", len(self.skipped), message)


class _ReadAhead:
    """Threads that read micro-batches in order: one thread opens them, and others load as many as the limit allows.

    One micro-batch is always loaded, whatever its size. No thread waits for memory: what does not fit yet is loaded
    once a micro-batch is released. A program that ends with an error therefore does not need to close this. What a
    thread raises is the result of the micro-batch, even if it is not an Exception, such as an error inside Rust code.

    Args:
        reader: opens and loads a micro-batch.
        limit: bytes of the frames of all micro-batches that are loaded and not released.
    """

    def __init__(self, reader: BatchReader, limit: int) -> None:
        self._reader, self._limit = reader, limit
        self._threads = reader.threads
        self._opening = ThreadPoolExecutor(1, thread_name_prefix="open")
        self._loading = ThreadPoolExecutor(self._threads, thread_name_prefix="load")
        self._opened = deque[MicroBatch]()  # that are not being loaded yet
        self._bytes = self._running = 0
        self._lock = threading.Lock()

    def begin(self, samples: tuple[int, ...]) -> MicroBatch:
        """Begin to read the next micro-batch, and return it."""
        batch = MicroBatch(samples)
        self._submit(self._opening, self._open, batch)
        return batch

    def release(self, batch: MicroBatch) -> None:
        """Stop counting the bytes of a micro-batch."""
        with self._lock:
            self._bytes -= batch.size
        self._load_what_fits()

    def close(self) -> None:
        """Begin nothing more, and wait for what is being read."""
        with self._lock:
            self._threads = 0
        for pool in (self._opening, self._loading):
            pool.shutdown(cancel_futures=True)

    @staticmethod
    def _submit(pool: ThreadPoolExecutor, step: Callable[[MicroBatch], None], batch: MicroBatch) -> bool:
        """Return whether `pool` will run the step; if it cannot, its error is the result of the micro-batch.

        A pool that could not start a thread has queued the step all the same, and runs it once it has a thread. Steps
        therefore do nothing with a micro-batch that has a result.
        """
        try:
            pool.submit(step, batch)
        except RuntimeError as error:  # the system allows no further thread, or the program ends
            batch.loaded.set_exception(error)
            return False
        return True

    def _open(self, batch: MicroBatch) -> None:
        if batch.loaded.done():
            return
        try:
            self._reader.open(batch)
        except BaseException as error:  # noqa: BLE001 - raised where the micro-batch is taken
            batch.loaded.set_exception(error)
            return
        with self._lock:
            self._opened.append(batch)
        self._load_what_fits()

    def _load_what_fits(self) -> None:
        with self._lock:
            while self._opened and self._running < self._threads:
                if self._bytes and self._bytes + self._opened[0].size > self._limit:
                    return
                batch = self._opened.popleft()
                self._bytes += batch.size
                self._running += self._submit(self._loading, self._load, batch)

    def _load(self, batch: MicroBatch) -> None:
        with self._lock:  # it was submitted under the lock
            if batch.loaded.done():
                return
        try:
            self._reader.load(batch)
        except BaseException as error:  # noqa: BLE001 - raised where the micro-batch is taken
            batch.loaded.set_exception(error)
        with self._lock:
            self._running -= 1
        self._load_what_fits()
