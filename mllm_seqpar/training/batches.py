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
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
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
from mllm_seqpar.videos.decode_options import decode_threads
from mllm_seqpar.videos.prefetch import begin_ahead

from .stored_tower import ARGUMENT, TowerReplay, has_outputs

_log = get_logger(__name__)

MOST_REPLACEMENTS = 100
"""After this many bad samples in a row, the run stops: the media are probably in another place."""

READ_AHEAD_BYTES = 4 << 30
"""Default limit of the bytes of frames that a rank reads ahead."""

_READ_AHEAD = 8
"""The largest number of micro-batches that are read ahead, unless a step has more."""

_LOADERS = 4
"""The largest number of threads that decode micro-batches; each of them uses `--decode_threads` threads."""

MicroBatch = ChatBatch
"""The earlier name of what `BatchReader` yields."""

_Begun = tuple[tuple[int, ...], Future[ChatBatch]]
"""Samples that other threads read, and what they make of them."""


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

    def read_all(self, passes: Iterable[Sequence[int]], ahead: int = 1) -> Generator[ChatBatch]:
        """Yield the samples of each pass as one micro-batch, while at least `ahead` of the following ones are read.

        All ranks take the same number.
        """
        begun = deque[tuple[Sequence[int], tuple[int, ...]]]()

        def chosen() -> Iterator[tuple[int, ...]]:
            for samples in passes:
                usable = attempt(partial(self._chosen, samples))[0] or tuple(samples)  # `read` raises the error
                begun.append((samples, usable))
                yield usable

        def agreed(loaded: Future[ChatBatch]) -> ChatBatch:
            samples, usable = begun.popleft()
            return self.read(samples, (usable, loaded))

        depth = max(ahead, _READ_AHEAD)
        reading = begin_ahead(
            chosen(), self.load, depth, self.threads, open_item=self.open, size=self._size, limit=self._ahead_bytes
        )
        with closing(reading):
            yield from map(agreed, reading)  # a loop would hold a micro-batch while it waits for the next one

    def read(self, samples: Sequence[int], begun: _Begun | None = None) -> ChatBatch:
        """Return these samples as one micro-batch. Every rank of the run must call this the same number of times.

        Args:
            samples: of this rank's group.
            begun: the samples that other threads have read instead; used unless some of these must be replaced.

        Raises:
            SeqParError: on all ranks, if a rank cannot read its part and the sample must not be replaced.
        """
        batch: ChatBatch | None = None
        decode = False

        def usable() -> ChatBatch:
            chosen = self._chosen(samples)
            if begun is not None and begun[0] == chosen:
                return begun[1].result()
            if batch is not None and batch.samples == chosen and not (decode and has_outputs(batch.arguments)):
                return batch
            return self.load(self.open(chosen), decode)

        # All ranks run each iteration together, and it has one of four outcomes:
        #   a rank failed for another reason than bad media: `agree` raises on all ranks;
        #   a rank found bad media: the ranks of its group replace the sample, and all ranks iterate again;
        #   all ranks of all groups have stored outputs of the tower, or all have none: the batch is returned;
        #   only some have stored outputs: all ranks decode frames instead, and iterate once more.
        while True:
            batch, error = attempt(usable)
            begun = None
            bad = error.sample if self._skips and isinstance(error, MediaError) else -1
            numbers = bad, batch is not None and has_outputs(batch.arguments)
            _, rows = agree(
                self._comm,
                "reading the training data",
                error=None if bad >= 0 else error,
                numbers=lambda _, numbers=numbers: numbers,
            )
            if any(row[0] >= 0 for row in rows):
                messages = self._comm.gather_texts(str(error) if bad >= 0 else "")
                faults = {rows[rank][0]: messages[rank] for rank in self._members if rows[rank][0] >= 0}
                for sample, message in [(self._replaced(samples[place]), text) for place, text in faults.items()]:
                    if sample not in self.skipped:
                        self.skipped[sample] = message
                        if self._comm.rank == self._members[0]:
                            _log.warning("skipped, %d so far: %s", len(self.skipped), message)
            elif len({row[1] for row in rows}) == 1:
                assert batch is not None
                return batch
            else:
                decode = True  # some rank computes features, so all do

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

    def open(self, samples: tuple[int, ...]) -> ChatBatch:
        """Read the text of a micro-batch and plan its frames, without decoding anything."""
        with self._lock, self._naming(samples):
            batch = self._dataset.batch(samples)
            text, layout = batch.text, self._chat_format.frame_layout
            shard = FrameShard.of(len(text.slots), self._group, layout, text.sizes)
            return replace(batch, samples=samples, shard=shard)

    def _size(self, batch: ChatBatch) -> int:
        """Return the bytes of this rank's frames when they are decoded."""
        assert batch.shard is not None
        with self._naming(batch.samples):
            return len(batch.shard) and len(batch.shard) * sum(x.nbytes for x in self._chat_format.blank())

    def load(self, batch: ChatBatch, decode: bool = False) -> ChatBatch:
        """Return an open micro-batch with its arguments, this rank's frames among them.

        If all ranks have stored outputs of the vision tower, as many rows that take the memory of one stand for the
        frames; `decode` does not use them.
        """
        shard, chat_format = batch.shard, self._chat_format
        assert shard is not None
        with self._naming(batch.samples):
            arguments: dict[str, Any] = chat_format.arguments(batch.text) | {"use_cache": False}
            if self._features is not None:
                arguments[ARGUMENT] = self._features.rows(batch, shard, read=not decode)
            if shard.total:
                if has_outputs(arguments):
                    blank = chat_format.joined([chat_format.blank()])
                    pixels = tuple(x[:1].expand(len(arguments[ARGUMENT]), *x.shape[1:]) for x in blank)
                else:
                    pixels = load_local_images(batch, shard.ranges, chat_format)
                arguments |= dict(zip(chat_format.frame_names, pixels, strict=True))
                if self._group.size > 1 or chat_format.always_sharded:
                    arguments["visual_shard"] = shard
            return replace(batch, arguments=arguments)

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
